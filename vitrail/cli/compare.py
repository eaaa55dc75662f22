"""`vitrail compare`: several runs side by side, and whether they differ significantly."""

import json as as_json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

import vitrail
from vitrail.cli.flags import OptionalPath, Switch, unset
from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.run.report.compare import Comparison

TABLE_WIDTH = 140  # columns; paths and numbers are never cut off


def compare(
    runs: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        unset(metavar="RUN ...", help="run folders, at least two"),
    ] = (),
    *,
    out: OptionalPath = None,
    json: Switch = False,
) -> None:
    """Compare runs.

    Shows the results side by side, and whether test accuracies differ significantly; of
    pretrainings, whether their linear probes do.

    Args:
        out: write a page with the table and the learning curves, such as compare.html
        json: print one JSON document
    """
    if out is not None and out.is_dir():
        raise UserError(f"{out} is a folder; give `out` a file name")
    comparison = vitrail.compare(*runs)
    if out is not None:
        comparison.write_page(out)
    if json:
        print(as_json.dumps(comparison.to_dict(), indent=1))
    else:
        print_runs(comparison)
        print("learning curves in one page: --out compare.html" if out is None else f"page {out}")


def print_runs(comparison: "Comparison") -> None:
    """One row for each run, then what differs significantly."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vitrail.display.text import printable
    from vitrail.run.report.compare import COLUMNS

    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if number > 3 else "left")
    for run in comparison.runs:
        table.add_row(*(Text(printable(cell)) for cell in run.to_row()))
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table)
    if features := comparison.feature_rows():
        table = Table(*features[0], box=None, header_style="bold", pad_edge=False)
        for row in features[1:]:
            table.add_row(*(Text(printable(cell)) for cell in row))
        console.print()
        console.print(table)
        console.print(
            "compare losses only between runs with the same data, method and settings of the method"
        )
    for run in comparison.runs:
        console.print(f"{run.number}: {printable(run.verdict)}", markup=False)
