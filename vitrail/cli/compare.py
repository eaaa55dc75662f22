"""`vitrail compare`: several runs side by side, and whether they differ by more than chance."""

import json as as_json
from pathlib import Path
from typing import Annotated

import tyro

from vitrail.errors import UserError


def compare(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    *,
    out: Path | None = None,
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Compare finished runs, on the same test images where they share them.

    Args:
        runs: run folders, at least two
        out: write a page with the table and the curves of all, such as compare.html
        json: print one JSON document
    """
    from vitrail import files
    from vitrail.run.report.compare import compare, page

    if out is not None and out.is_dir():
        raise UserError(f"{out} is a folder; give the name of a file")
    entries = compare(runs)
    if out is not None:
        files.write(out, page(entries))
    if json:
        print(as_json.dumps({"runs": [entry.facts for entry in entries]}, indent=1))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vitrail.display.text import printable
    from vitrail.run.report.compare import COLUMNS, row

    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if number > 3 else "left")
    for entry in entries:
        table.add_row(*(Text(printable(value)) for value in row(entry)))
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 140)  # paths and numbers are read whole, or not at all
    console.print(table)
    for entry in entries:
        console.print(f"{entry.number}: {printable(entry.words)}", markup=False)
    if out is not None:
        console.print(f"page {out}", markup=False)
    else:
        console.print("curves of all in one page: --out compare.html", markup=False)
