"""`vitrail check`: checks a data set and shows the recipe that training would choose."""

import json as as_json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import vitrail
from vitrail.cli.flags import (
    NO_COLUMNS,
    ColumnNames,
    Data,
    Device,
    Labels,
    OptionalInt,
    OptionalPath,
    SkipBroken,
    Switch,
    given_settings,
)
from vitrail.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from vitrail.audit.audit import Audit
    from vitrail.audit.findings import Finding
    from vitrail.run.check import DataCheck

EXAMPLES_SHOWN = 10  # groups of each finding
COPIES_SHOWN = 4  # images of each group
CLASSES_SHOWN = 20
COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def check(
    data: Data,
    *,
    out: OptionalPath = None,
    augmented: OptionalPath = None,
    skip_broken: SkipBroken = False,
    workers: OptionalInt = None,
    device: Device = "auto",
    json: Switch = False,
    columns: ColumnNames = NO_COLUMNS,
    labels: Labels = None,
) -> None:
    """Check a data set before training on it.

    Finds broken files, duplicates within and across splits, class imbalance and unusual images, and
    shows the recipe that `train` would choose. Exits with 1 if training would fail. The data itself
    is never changed.

    Args:
        out: write a page with pictures of the findings, such as check.html
        augmented: write a contact sheet of augmented training images, such as augmented.png
        workers: processes that decode images (default: one per core, at most 8)
        json: print one JSON document
    """
    result = vitrail.check(
        data,
        out=out,
        augmented=augmented,
        skip_broken=skip_broken,
        workers=workers,
        device=device,
        columns=given_settings(columns),
        labels=labels,
    )
    if json:
        print(as_json.dumps(result.to_dict(), indent=1))
    else:
        print_check(result)
    if result.error:
        raise UserError(result.error)


def print_check(result: "DataCheck") -> None:
    """A summary of the data, its problems, and the recipe that training would choose."""
    from rich.console import Console

    from vitrail.audit.page import summarise_audit
    from vitrail.cli.messages import flags_of, translate
    from vitrail.cli.train import train
    from vitrail.display.text import printable

    console = Console(highlight=False, soft_wrap=True)
    console.print(printable(result.source.name), style="bold", markup=False)
    for name, value in summarise_audit(result.audit):
        console.print(f"  {name:<20}{value}", markup=False)
    print_classes(console, result.audit)
    for finding in result.findings:
        console.print(
            f"\n{finding.name}: {printable(finding.title)}",
            style=COLOURS[finding.severity],
            markup=False,
        )
        for line in describe_examples(result.audit, finding):
            console.print(f"  {line}", markup=False)
        if finding.advice:
            advice = translate(printable(finding.advice), flags_of(train))
            console.print(f"  -> {advice}", style="dim", markup=False)
    if not result.findings:
        console.print("\nno problems found", style="green")
    if result.plan is not None:
        console.print("\nwhat `vitrail train` would do", style="bold")
        for reason in result.plan.reasons:
            console.print(f"  {reason}", markup=False)


def print_classes(console: "Console", audit: "Audit") -> None:
    """The number of images of each class; of many classes, the largest and the smallest."""
    from rich.table import Table
    from rich.text import Text

    from vitrail.data.source import SPLITS
    from vitrail.display.text import printable

    counts, names = audit.counts, audit.source.classes
    order = sorted(range(len(names)), key=lambda k: -counts[k].sum())
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("class")
    for column in ("images", *SPLITS):
        table.add_column(column, justify="right", no_wrap=True)
    for rank, k in enumerate(order):
        if len(order) > CLASSES_SHOWN and rank == CLASSES_SHOWN // 2:
            table.add_row(f"... {len(order) - CLASSES_SHOWN:,} more ...")
        if min(rank, len(order) - 1 - rank) < CLASSES_SHOWN // 2:
            numbers = (f"{number:,}" for number in (counts[k].sum(), *counts[k]))
            table.add_row(Text(printable(names[k]), overflow="ellipsis"), *numbers)
    console.print()
    console.print(table)


def describe_examples(audit: "Audit", finding: "Finding") -> Iterator[str]:
    """One line for each of the first groups of a finding."""
    from vitrail.data.source import label_names
    from vitrail.display.text import printable

    source = audit.source

    def name(item: int) -> str:
        path = printable(source.ids[item])
        if finding.differs == "split":
            return f"{path} ({source.splits[item]})"
        label = printable(label_names(source, item))
        return f"{path} ({label})" if finding.differs else path

    for group in finding.groups[:EXAMPLES_SHOWN]:
        names = " = ".join(map(name, group.items[:COPIES_SHOWN]))
        if len(group.items) > COPIES_SHOWN:
            names += f" and {len(group.items) - COPIES_SHOWN:,} more"
        yield ": ".join(part for part in (names, printable(group.text)) if part)
    if len(finding.groups) > EXAMPLES_SHOWN:
        yield f"and {len(finding.groups) - EXAMPLES_SHOWN:,} more"
