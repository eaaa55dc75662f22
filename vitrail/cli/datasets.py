"""`vitrail datasets`: lists the built-in data sets."""

import json as as_json
from typing import TYPE_CHECKING

import vitrail
from vitrail.cli.flags import Switch

if TYPE_CHECKING:
    from vitrail.data.sources.catalogue import DatasetInfo


def datasets(*, json: Switch = False) -> None:
    """List built-in data sets.

    Args:
        json: print one JSON document
    """
    infos = vitrail.datasets()
    if json:
        print(as_json.dumps([info.to_dict() for info in infos], indent=1))
    else:
        print_datasets(infos)


def print_datasets(infos: "list[DatasetInfo]") -> None:
    from rich.console import Console
    from rich.table import Table

    from vitrail.data.sources.places import data_folder

    table = Table(box=None, header_style="bold")
    table.add_column("name", no_wrap=True)
    for column in ("classes", "train", "test", "pixels", "channels"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("present", no_wrap=True)
    table.add_column("download", no_wrap=True)
    for info in infos:
        table.add_row(*format_dataset(info))
    console = Console()
    console.print(table)
    console.print(
        f"\nData sets are looked up in {data_folder()} and downloaded to it; the environment "
        "variable VITRAIL_DATA changes it.\n"
        "unverified: the download was never tried; its published checksum is compared.\n"
        "imagenet10 is a subset of your own copy of ImageNet.",
        highlight=False,
        soft_wrap=True,
    )


def format_dataset(info: "DatasetInfo") -> list[str]:
    from vitrail.data.sources.catalogue import DATASETS

    download = "unverified" if DATASETS[info.name].downloads else "none"
    return [
        info.name,
        *(f"{number:,}" for number in (info.classes, info.train, info.test)),
        "varies" if info.image is None else str(info.image),
        str(info.channels),
        "yes" if info.present else "no",
        "not needed" if info.verified else download,
    ]
