"""`vitrail verify`: checks that a model file is intact and computes the same answers here."""

import sys

import vitrail
from vitrail.cli.flags import Device, Engine, Model, Switch
from vitrail.cli.output import print_result


def verify(
    model: Model, *, device: Device = "auto", engine: Engine = None, json: Switch = False
) -> None:
    """Verify that a model is the one that was tested.

    Compares the sha256 of every tensor with the one that was stored with it, and the logits of
    generated reference images with those that were computed after training. The exit code is 1 if
    either differs.

    Args:
        json: print one JSON document
    """
    result = vitrail.verify(model, device=device, engine=engine)
    print_result(result, json)
    if not result.passed:
        sys.exit(1)
