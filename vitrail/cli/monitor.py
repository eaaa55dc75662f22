"""`vitrail monitor`: compares new images with the validation images of a model."""

import logging
import sys
from pathlib import Path
from typing import Annotated, TypeAlias

import tyro

import vitrail
from vitrail.cli.flags import Device, Model, Switch
from vitrail.cli.output import print_result

NewPredictions: TypeAlias = Annotated[
    str,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="PREDICTIONS", help="lines that `vitrail predict --json` printed, or a folder"
    ),
]

CHANGED = 3  # exit code

log = logging.getLogger(__name__)


def monitor(
    model: Model,
    predictions: NewPredictions,
    *,
    page: Path = Path("drift.html"),
    device: Device = "auto",
    json: Switch = False,
) -> None:
    """Test whether new images are still like the validation images.

    Compares the predicted classes, the confidence and the rate of odd images, and writes a page.
    The exit code is 3 if something changed.

    Args:
        page: page to write
        json: print one JSON document
    """
    result = vitrail.monitor(model, predictions, device=device)
    result.save(page)
    log.info(f"wrote {page}")
    print_result(result, json)
    if result.changed:
        sys.exit(CHANGED)
