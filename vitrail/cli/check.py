"""`vitrail check`: what is wrong with a data set, and what training would do with it."""

import json as as_json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitrail.cli.flags import COLUMNS, Names, SkipBroken, changes
from vitrail.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from vitrail.audit.findings import Finding, Judgement
    from vitrail.data.source import Source
    from vitrail.run.recipe import Recipe

EXAMPLES = 10  # shown of each finding
COPIES = 4  # shown of each group of copies
SHOWN_CLASSES = 20
COLOURS = {"stop": "bold red", "warn": "yellow", "note": "cyan"}


def check(
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")],
    *,
    out: Path | None = None,
    augmented: Path | None = None,
    skip_broken: SkipBroken = False,
    workers: int | None = None,
    device: str = "auto",
    columns: Annotated[Names, COLUMNS] = Names(),  # noqa: B008
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Look at every image of a data set before training on it.

    Finds broken files, copies within and across splits, uneven classes and odd pictures, and says
    what training would do. Ends with 1 if training would fail. Nothing in the data is changed.

    Args:
        data: folder of class folders, table of paths and labels, tar shards, or a built-in name
        out: write a page with pictures of what was found, such as check.html
        augmented: write a sheet of what the model will see in training, such as sheet.png
        skip_broken: judge as training with --data.skip-broken would
        workers: processes that decode; none: one per core, at most 8
        device: that training would use; auto takes a GPU if there is one
        columns: what the columns of a table are called
        json: print one JSON document
    """
    from vitrail import files
    from vitrail.audit.examine import examine
    from vitrail.audit.findings import Finding, judge, plain
    from vitrail.data.config import Columns
    from vitrail.data.open import open_data
    from vitrail.data.sources.places import keep_out
    from vitrail.display.text import printable
    from vitrail.run.build import pick_device

    place = pick_device(device).type
    if augmented is not None and augmented.suffix.lower() != ".png":
        raise UserError(f"the sheet is a PNG; {augmented} is named otherwise")
    if workers is not None and workers < 0:
        raise UserError(f"workers is {workers}; give a number of at least 0")
    source = open_data(data, columns=Columns(**changes(columns)))
    for flag, target in (("--out", out), ("--augmented", augmented)):
        if target is not None:
            if target.is_dir():
                raise UserError(f"{target} is a folder; give the name of a file")
            keep_out(source, target, flag)
    judgement = judge(examine(source, workers=workers), skip_broken=skip_broken)
    plan, recipe = design(data, source, place)
    if recipe is None:
        judgement.findings.insert(
            0, Finding("No recipe", "stop", "nothing can be trained", plan["error"])
        )
    sheet = None
    if recipe is not None and (out or augmented):
        sheet = draw(judgement, recipe)
    if augmented and sheet:
        files.write(augmented, sheet)
    if out:
        from vitrail.audit.page import page

        files.write(out, page(judgement, plan, sheet))
    if json:
        print(as_json.dumps({**plain(judgement), "plan": plan}, indent=1))
    else:
        show(judgement, plan)
    stops = [finding for finding in judgement.findings if finding.weight == "stop"]
    if stops:
        whys = "; ".join(f"{finding.title}; {finding.advice}" for finding in stops)
        raise UserError(printable(f"training on {source.name} would fail: {whys}"))


def design(data: str, source: "Source", device: str) -> tuple[dict[str, Any], "Recipe | None"]:
    """What `train` would choose, and why; or the error that it would end with."""
    from vitrail.data.open import address
    from vitrail.run.auto import choose, look
    from vitrail.run.build import check_sense
    from vitrail.run.recipe import Recipe, build, merge

    try:
        facts = look(source)
        choice = choose(facts, device=device)
        rest = {"source": address(data), "view": {"size": choice.settings["vit"]["image"]}}
        recipe = build(Recipe, merge(choice.settings, rest))
        check_sense(recipe, facts)
    except UserError as error:
        return {"error": str(error)}, None
    return {"settings": choice.settings, "reasons": choice.reasons}, recipe


def draw(judgement: "Judgement", recipe: "Recipe") -> bytes:
    """A sheet of some training images, of as many classes as there is room for."""
    import numpy as np

    from vitrail.data.preview import one_of_each, preview
    from vitrail.display.sheet import sheet
    from vitrail.display.text import printable

    source = judgement.examination.source
    usable = np.ones(len(source), bool)
    usable[list(judgement.examination.broken)] = False
    batch = preview(source, one_of_each(source, usable), recipe.view, recipe.data)
    return sheet(
        batch.images,
        batch.targets,
        [printable(name) for name in source.classes],
        mean=recipe.view.mean,
        std=recipe.view.std,
    )


def show(judgement: "Judgement", plan: dict[str, Any]) -> None:
    from rich.console import Console

    from vitrail.audit.page import facts
    from vitrail.display.text import printable

    console = Console(highlight=False, soft_wrap=True)
    source = judgement.examination.source
    console.print(printable(source.name), style="bold", markup=False)
    for name, value in facts(judgement):
        console.print(f"  {name:<20}{value}", markup=False)
    show_classes(console, judgement)
    for finding in judgement.findings:
        console.print(
            f"\n{finding.name}: {printable(finding.title)}",
            style=COLOURS[finding.weight],
            markup=False,
        )
        for line in examples(judgement, finding):
            console.print(f"  {line}", markup=False)
        if finding.advice:
            console.print(f"  -> {printable(finding.advice)}", style="dim", markup=False)
    if not judgement.findings:
        console.print("\nnothing wrong was found", style="green")
    if "reasons" in plan:
        console.print("\nwhat `vitrail train` would do", style="bold")
        for reason in plan["reasons"]:
            console.print(f"  {reason}", markup=False)


def show_classes(console: "Console", judgement: "Judgement") -> None:
    """How many images each class has; of many classes the largest and the smallest."""
    from rich.table import Table
    from rich.text import Text

    from vitrail.audit.findings import SPLITS
    from vitrail.display.text import printable

    counts, names = judgement.counts, judgement.examination.source.classes
    order = sorted(range(len(names)), key=lambda k: -counts[k].sum())
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("class")
    for column in ("images", *SPLITS):
        table.add_column(column, justify="right", no_wrap=True)
    for place, k in enumerate(order):
        if len(order) > SHOWN_CLASSES and place == SHOWN_CLASSES // 2:
            table.add_row(f"... {len(order) - SHOWN_CLASSES:,} more ...")
        if min(place, len(order) - 1 - place) < SHOWN_CLASSES // 2:
            numbers = (f"{number:,}" for number in (counts[k].sum(), *counts[k]))
            table.add_row(Text(printable(names[k]), overflow="ellipsis"), *numbers)
    console.print()
    console.print(table)


def examples(judgement: "Judgement", finding: "Finding") -> Iterator[str]:
    """Some of what a finding is about, one in each line."""
    from vitrail.display.text import printable

    source = judgement.examination.source
    detail = {"Leaks": "split", "Near leaks": "split", "Conflicts": "label"}.get(finding.name)

    def name(item: int) -> str:
        path = printable(source.ids[item])
        if detail == "split":
            return f"{path} ({source.splits[item]})"
        label = printable(source.classes[source.labels[item]])
        return f"{path} ({label})" if detail else path

    for group in finding.groups[:EXAMPLES]:
        names = " = ".join(map(name, group.items[:COPIES]))
        if len(group.items) > COPIES:
            names += f" and {len(group.items) - COPIES:,} more"
        yield ": ".join(part for part in (names, printable(group.words)) if part)
    if len(finding.groups) > EXAMPLES:
        yield f"and {len(finding.groups) - EXAMPLES:,} more"
