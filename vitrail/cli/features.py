"""`vitrail features`: stores the features of a data set of any size in Parquet parts."""

from typing import Literal

import vitrail
from vitrail.cli.flags import (
    NO_VIT,
    Data,
    Device,
    LoadedVit,
    Model,
    Normalisation,
    On,
    OptionalInt,
    Out,
    Switch,
    given_settings,
)
from vitrail.cli.output import print_result


def features(
    model: Model,
    data: Data,
    *,
    out: Out,
    on: On = "local",
    dtype: Literal["float32", "float16"] = "float32",
    part: OptionalInt = None,
    device: Device = "auto",
    preprocess: Normalisation = None,
    json: Switch = False,
    vit: LoadedVit = NO_VIT,
) -> None:
    """Store the features of images, any number of them.

    Writes Parquet parts with the columns id, features and error; an image that cannot be read has
    an error. The same command again continues a job that was killed. `vitrail similar` searches
    the result.

    Args:
        dtype: float16 takes half the space
        part: images per part (default: 256 to 4096, from the number of images)
        json: print one JSON document
    """
    result = vitrail.features(
        model,
        data,
        out=out,
        on=on,
        dtype=dtype,
        part=part,
        device=device,
        preprocess=preprocess,
        vit=given_settings(vit),
    )
    print_result(result, json)
