"""`vitrail evaluate`: measures accuracy and calibration on labelled images."""

import json as as_json
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from vitrail.cli.flags import (
    NO_COLUMNS,
    NO_VIT,
    BatchSize,
    ColumnNames,
    Data,
    Device,
    Engine,
    HeadFile,
    LoadedVit,
    Model,
    Normalisation,
    Raw,
    SkipBroken,
    Switch,
    Views,
    given_settings,
    unset,
)
from vitrail.cli.predict import load_classifier

if TYPE_CHECKING:
    from rich.console import Console

Split: TypeAlias = Annotated[Literal["train", "val", "test", "all"] | None, unset()]

CLASSES_SHOWN = 20  # those with the lowest F1
CONFUSION_SHOWN = 12  # classes up to which the whole matrix fits a terminal
PAIRS_SHOWN = 10  # most confused pairs, where the matrix does not fit
ERRORS_SHOWN = 5


def evaluate(
    model: Model,
    data: Data,
    *,
    split: Split = None,
    raw: Raw = False,
    views: Views = 1,
    batch: BatchSize = 64,
    head: HeadFile = None,
    device: Device = "auto",
    engine: Engine = None,
    skip_broken: SkipBroken = False,
    preprocess: Normalisation = None,
    json: Switch = False,
    columns: ColumnNames = NO_COLUMNS,
    vit: LoadedVit = NO_VIT,
) -> None:
    """Evaluate a model on labelled images.

    Measures accuracy with its confidence interval, precision and recall per class, the confusion
    matrix, and calibration.

    Args:
        split: split to evaluate on (default: test, or all images if the data has no splits)
        json: print one JSON document
    """
    evaluation = load_classifier(model, head, device, engine, preprocess, vit, views).evaluate(
        data,
        split=split,
        batch=batch,
        skip_broken=skip_broken,
        columns=given_settings(columns),
        raw=raw,
    )
    if json:
        print(as_json.dumps(evaluation.to_dict(), indent=1))
    else:
        print_evaluation(evaluation.to_dict(), raw=raw)


def print_evaluation(document: dict[str, Any], *, raw: bool = False) -> None:
    """The document that `--json` prints, as tables."""
    from rich.console import Console

    from vitrail.display.text import printable

    console = Console(highlight=False)
    low, high = document["interval"]
    if document.get("labels") == "multi":
        print_multi_label(console, document)
        return
    console.print(
        f"accuracy [bold]{document['accuracy']:.1%}[/], 95 % interval {low:.1%} to {high:.1%}, "
        f"on {document['images']:,} images ({document['split']})"
        + (f", {document['views']} views of each" if document["views"] > 1 else "")
    )
    console.print(
        f"top-5 accuracy {document['top5']:.1%}, log-loss {document['log_loss']:.3f}, "
        f"calibration error (ECE) {document['ece']:.3f}"
    )
    console.print(describe_temperature(document["temperature"], raw))
    print_class_scores(console, document)
    print_confusion(console, document)
    if document["mistakes"]:
        console.print("most confident errors:")
        for one in document["mistakes"][:ERRORS_SHOWN]:
            guess = f"{one['predicted']} ({one['probability']:.0%})"
            line = printable(f"{one['path']}: {one['label']} predicted as {guess}")
            console.print(f"  {line}", markup=False)


def print_multi_label(console: "Console", document: dict[str, Any]) -> None:
    """The scores of a multi-label model."""
    low, high = document["interval"]
    console.print(
        f"mAP [bold]{document['map']:.3f}[/], micro F1 {document['micro_f1']:.3f}, macro F1 "
        f"{document['macro_f1']:.3f}, on {document['images']:,} images ({document['split']})"
    )
    console.print(
        f"exact match {document['accuracy']:.1%}, 95 % interval {low:.1%} to {high:.1%}, log-loss "
        f"{document['log_loss']:.3f}, calibration error (ECE) {document['ece']:.3f}"
    )
    print_class_scores(console, document)


def describe_temperature(temperature: float | None, raw: bool) -> str:
    if temperature is None:
        return "temperature not fitted"
    return f"temperature {temperature:.2f}{' (not applied: --raw)' if raw else ''}"


def print_class_scores(console: "Console", document: dict[str, Any]) -> None:
    """Precision, recall and F1 of the classes with the lowest F1."""
    from rich.table import Table
    from rich.text import Text

    from vitrail.display.text import printable

    present = {name: score for name, score in document["per_class"].items() if score["count"]}
    lowest = sorted(present.items(), key=lambda pair: pair[1]["f1"])[:CLASSES_SHOWN]
    table = Table(box=None, header_style="bold", title_justify="left")
    for column in ("class", "precision", "recall", "F1", "images"):
        table.add_column(column, justify="left" if column == "class" else "right")
    for name, score in lowest:
        rates = (f"{score[key]:.3f}" for key in ("precision", "recall", "f1"))
        table.add_row(Text(printable(name)), *rates, str(score["count"]))
    if len(present) > len(lowest):
        console.print(f"the {len(lowest)} of {len(present)} classes with the lowest F1:")
    console.print(table)


def print_confusion(console: "Console", document: dict[str, Any]) -> None:
    """The confusion matrix where it fits the terminal, otherwise the most confused pairs."""
    from rich.table import Table
    from rich.text import Text

    from vitrail.display.text import printable

    classes, confusion = [printable(name) for name in document["classes"]], document["confusion"]
    if len(classes) <= CONFUSION_SHOWN:
        console.print("confusion matrix (rows: true class, columns: predicted class):")
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
    for count, true, predicted in sorted(pairs, reverse=True)[:PAIRS_SHOWN]:
        console.print(f"  {true} predicted as {predicted}: {count}", markup=False)
