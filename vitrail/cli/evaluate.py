"""`vitrail evaluate`: how good a model is, and how sure that number is."""

import json as as_json
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vitrail.cli.flags import COLUMNS, Names, SkipBroken, Vit, changes


def evaluate(
    model: Annotated[str, tyro.conf.Positional],
    data: Annotated[str, tyro.conf.Positional],
    *,
    split: Literal["train", "val", "test", "all"] | None = None,
    batch: int = 64,
    head: Path | None = None,
    device: str = "auto",
    skip_broken: SkipBroken = False,
    preprocess: Literal["half", "imagenet", "clip"] | None = None,
    vit: Vit = Vit(),  # noqa: B008
    columns: Annotated[Names, COLUMNS] = Names(),  # noqa: B008
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Measure a model on labelled images.

    Args:
        model: run folder, model file, or any weights that can be read
        data: folder, table, shards or built-in name
        split: part to judge; by default test images, or all where there is no split
        batch: images at once
        head: file that `vitrail head` made for this model, or the folder that holds it
        device: cpu, cuda, cuda:1 ...; auto takes a GPU if there is one
        skip_broken: go on without images that cannot be read
        preprocess: mean and deviation that foreign weights expect, if their file does not say
        vit: the model at another image size, or what foreign weights do not say of themselves
        columns: what the columns of a table are called, by default as in training
        json: print one JSON document
    """
    from rich.console import Console
    from rich.progress import Progress

    from vitrail.data.source import indices
    from vitrail.run.classifier import load
    from vitrail.run.head import load_with_head
    from vitrail.run.scores import evaluate, open_for

    hints = {"preprocess": preprocess, "vit": changes(vit)}
    if head is None:
        classifier = load(model, device=device, **hints)
    else:
        classifier = load_with_head(model, head, device=device, **hints)
    source, part = open_for(classifier, data, split, changes(columns))
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("evaluating", total=len(indices(source, part)))
        numbers = evaluate(
            classifier,
            source,
            part,
            batch=batch,
            skip_broken=skip_broken,
            progress=lambda images: bar.advance(task, images),
        )
    if json:
        print(as_json.dumps(numbers, indent=1))
    else:
        show(numbers)


def show(numbers: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vitrail.display.text import printable

    console = Console(highlight=False)
    low, high = numbers["interval"]
    console.print(
        f"accuracy [bold]{numbers['accuracy']:.1%}[/], 95 % interval {low:.1%} to {high:.1%}, "
        f"on {numbers['images']} images ({numbers['split']})"
    )
    heat = "not fitted" if numbers["temperature"] is None else f"{numbers['temperature']:.2f}"
    console.print(
        f"top-5 {numbers['top5']:.1%}   log-loss {numbers['log_loss']:.3f}   "
        f"calibration error {numbers['ece']:.3f}   temperature {heat}"
    )
    present = {name: score for name, score in numbers["per_class"].items() if score["count"]}
    worst = sorted(present.items(), key=lambda pair: pair[1]["f1"])[:20]
    table = Table(box=None, header_style="bold", title_justify="left")
    for column in ("class", "precision", "recall", "f1", "images"):
        table.add_column(column, justify="left" if column == "class" else "right")
    for name, score in worst:
        rates = (f"{score[key]:.3f}" for key in ("precision", "recall", "f1"))
        table.add_row(Text(printable(name)), *rates, str(score["count"]))
    if len(present) > len(worst):
        console.print(f"the {len(worst)} worst of {len(present)} classes:")
    console.print(table)
    show_confusion(console, numbers)
    if numbers["mistakes"]:
        console.print("most confident mistakes:")
        for one in numbers["mistakes"][:5]:
            sure = f"{one['predicted']} ({one['probability']:.0%})"
            line = printable(f"{one['path']}: {one['label']} taken for {sure}")
            console.print(f"  {line}", markup=False)


def show_confusion(console: Any, numbers: dict[str, Any]) -> None:
    """The matrix where it fits the screen; else the pairs that are confused most."""
    from rich.table import Table
    from rich.text import Text

    from vitrail.display.text import printable

    classes, confusion = [printable(name) for name in numbers["classes"]], numbers["confusion"]
    if len(classes) <= 12:
        console.print("true class down, predicted across:")
        table = Table(box=None, header_style="bold")
        table.add_column("")
        for name in classes:
            table.add_column(Text(name[:6]), justify="right")
        for name, row in zip(classes, confusion, strict=True):
            table.add_row(Text(name[:12]), *(str(count) if count else "." for count in row))
        console.print(table)
        return
    pairs = [
        (count, classes[i], classes[j])
        for i, row in enumerate(confusion)
        for j, count in enumerate(row)
        if i != j and count
    ]
    console.print("most confused:")
    for count, true, predicted in sorted(pairs, reverse=True)[:10]:
        console.print(f"  {true} taken for {predicted}: {count}", markup=False)
