"""`vitrail shard`: writes a data set as tar shards, to a folder or a bucket."""

from typing import Annotated

import tyro

import vitrail
from vitrail.cli.flags import (
    NO_COLUMNS,
    ColumnNames,
    Data,
    Labels,
    OptionalInt,
    Switch,
    given_settings,
)
from vitrail.cli.output import print_result


def shard(
    data: Data,
    *,
    out: Annotated[str, tyro.conf.arg(metavar="PATH_OR_URL")],
    shard_mb: float = 256.0,
    seed: int = 0,
    workers: OptionalInt = None,
    json: Switch = False,
    columns: ColumnNames = NO_COLUMNS,
    labels: Labels = None,
) -> None:
    """Write a data set as tar shards, to a folder or a bucket.

    WebDataset layout, with the images as they are, in the splits that `train` would use, shuffled.
    Every shard is read back and verified. The same command continues after an interruption. Then
    `vitrail train s3://bucket/photos` works as on a folder.

    Args:
        out: a folder, or a URL such as s3://bucket/photos
        shard_mb: megabytes of images in a shard
        seed: of the order of the images
        workers: shards that are written at the same time (default: 4)
        json: print one JSON document
    """
    result = vitrail.shard(
        data,
        out=out,
        shard_mb=shard_mb,
        seed=seed,
        workers=workers,
        columns=given_settings(columns),
        labels=labels,
    )
    print_result(result, json)
