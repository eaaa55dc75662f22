"""`vitrail datasets`: the built-in sets, and which of them are here."""

import json as as_json

from vitrail.data.sources.catalogue import SETS, Builtin, present
from vitrail.data.sources.places import data_folder


def datasets(json: bool = False) -> None:
    """List the data sets that go by a name, and which of them are present.

    Args:
        json: print one JSON document instead of a table
    """
    rows = [row(name, known) for name, known in SETS.items()]
    if json:
        print(as_json.dumps(rows, indent=1))
    else:
        show(rows)


def row(name: str, known: Builtin) -> dict[str, object]:
    return {
        "name": name,
        "classes": len(known.classes),
        "train": known.train,
        "test": known.test,
        "image": known.image,
        "channels": known.channels,
        "present": present(name),
        "verified": known.verified,
    }


def show(rows: list[dict[str, object]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    table.add_column("name", no_wrap=True)
    for column in ("classes", "train", "test", "pixels", "channels"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("here", no_wrap=True)
    table.add_column("download", no_wrap=True)
    for entry in rows:
        table.add_row(*cells(entry))
    console = Console()
    console.print(table)
    console.print(
        f"\nLooked for in {data_folder()} (VITRAIL_DATA), and downloaded to it.\n"
        "unverified: never tried by who wrote this; the checksum is the published one.\n"
        "imagenet10 is cut out of an ImageNet of yours.",
        highlight=False,
        soft_wrap=True,
    )


def cells(entry: dict[str, object]) -> list[str]:
    known = SETS[str(entry["name"])]
    source = "unverified" if known.downloads else "none"
    numbers = [f"{entry[key]:,}" for key in ("classes", "train", "test")]
    return [
        str(entry["name"]),
        *numbers,
        "varies" if entry["image"] is None else str(entry["image"]),
        str(entry["channels"]),
        "yes" if entry["present"] else "no",
        "not needed" if entry["verified"] else source,
    ]
