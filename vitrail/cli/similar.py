"""`vitrail similar`: finds the stored images that are most similar to an image."""

import json as as_json
import logging
from pathlib import Path
from typing import Annotated, TypeAlias

import tyro

import vitrail
from vitrail.cli.flags import CalibrationData, Device, Images, OptionalPath, Switch, unset
from vitrail.cli.predict import Result, find_images
from vitrail.errors import UserError

StoredFeatures: TypeAlias = Annotated[
    str,
    tyro.conf.Positional,
    unset(metavar="FEATURES", help="folder or URL that `vitrail features` wrote"),
]
MovedModel: TypeAlias = Annotated[str | None, unset(metavar="MODEL")]

log = logging.getLogger(__name__)


def similar(
    features: StoredFeatures,
    images: Images = (),
    *,
    top: int = 10,
    model: MovedModel = None,
    data: CalibrationData = None,
    sheet: OptionalPath = None,
    device: Device = "auto",
    json: Switch = False,
) -> None:
    """Find the stored images that are most similar to an image.

    Compares with all stored features, by cosine similarity.

    Args:
        top: neighbours of each image
        model: where the model of the features is now, if it was moved
        data: where the images of the features are now, if they were moved; for --sheet
        sheet: PNG file to write: each image, followed by its neighbours
        json: print one JSON line per image
    """
    if not images:
        raise UserError("no images were given; give files or folders, or - for paths on stdin")
    unreadable: list[Result] = []
    paths = list(find_images(images, unreadable))
    for path, error in unreadable:
        raise UserError(f"{path}: {error}")
    found = vitrail.similar(
        features, paths, top=top, model=model, data=data, sheet=sheet, device=device
    )
    if sheet is not None:
        log.info(f"wrote {Path(sheet)}")
    for one in found:
        print(as_json.dumps(one.to_dict()) if json else one)
