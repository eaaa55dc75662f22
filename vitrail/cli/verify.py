"""`vitrail verify`: checks that a model file is intact and computes the same answers here."""

import json as as_json
import sys

import vitrail
from vitrail.cli.flags import Device, Model, Switch
from vitrail.errors import UserError


def verify(model: Model, *, device: Device = "auto", json: Switch = False) -> None:
    """Verify that a model is the one that was tested.

    Compares the sha256 of every tensor with the one that was stored with it, and the logits of
    generated reference images with those that were computed after training. The exit code is 1 if
    either differs.

    Args:
        json: print one JSON document
    """
    result = vitrail.verify(model, device=device)
    if json:
        print(as_json.dumps(result.to_dict(), indent=1))
        sys.exit(0 if result.passed else 1)
    if not result.passed:
        raise UserError(
            f"{model} computes other answers here than after training: logits differ by up to "
            f"{result.largest_difference:.1e}, tolerance {result.tolerance:.1e} ({result.engine}); "
            f"try another version of torch, or another `device`"
        )
    print(result)
