"""`vitrail evaluate`: measures accuracy and calibration on labelled images."""

import json as as_json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from vitrail.cli.flags import (
    NO_COLUMNS,
    NO_VIT,
    BatchSize,
    CalibrationData,
    ColumnNames,
    Data,
    Device,
    Engine,
    HeadFile,
    LoadedVit,
    Model,
    Normalisation,
    OptionalFloat,
    Raw,
    SkipBroken,
    Switch,
    Views,
    given_settings,
    unset,
)
from vitrail.cli.predict import check_promises, load_classifier

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

Corruptions: TypeAlias = Annotated[Literal["quick", "full"] | None, unset()]
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
    coverage: OptionalFloat = None,
    abstain: OptionalFloat = None,
    corruptions: Corruptions = None,
    page: Path = Path("corruptions.html"),
    foreign: CalibrationData = None,
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
        coverage: promised coverage of the prediction sets that are measured (default: 0.95)
        abstain: promised error rate of the abstention that is measured (default: 0.01)
        corruptions: also measure the accuracy under common corruptions: quick (100 images, two
            strengths) or full (up to 1000 images, five strengths)
        page: page with the curves and pictures of --corruptions
        foreign: also measure how well images of this other kind are recognised as odd
        json: print one JSON document
    """
    classifier = load_classifier(model, head, device, engine, preprocess, vit, views)
    promises: dict[str, Any] = {**check_promises(classifier, coverage, abstain, None)}
    if corruptions is not None:
        promises["corruptions"] = corruptions
    if foreign is not None:
        promises["foreign"] = foreign
    evaluation = classifier.evaluate(
        data,
        split=split,
        batch=batch,
        skip_broken=skip_broken,
        columns=given_settings(columns),
        raw=raw,
        **promises,
    )
    robustness = getattr(evaluation, "corruptions", None)  # of models with one class per image
    if robustness is not None:
        robustness.save(page)
        log.info(f"wrote {page}")
    if json:
        print(as_json.dumps(evaluation.to_dict(), indent=1))
    else:
        print_evaluation(evaluation.to_dict(), raw=raw)
        if robustness is not None:
            print(robustness)
        if (other := getattr(evaluation, "foreign", None)) is not None:
            print(
                f"foreign images, {other.data}: AUROC {other.auroc:.3f}, of the maximum "
                f"probability {other.baseline:.3f}; {other.flagged:.1%} flagged as odd"
            )


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
    print_trust(console, document["trust"])
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
    print_trust(console, {"abstention": None, "odd": None, **document["trust"]})
    print_class_scores(console, document)


def describe_temperature(temperature: float | None, raw: bool) -> str:
    if temperature is None:
        return "temperature not fitted"
    return f"temperature {temperature:.2f}{' (not applied: --raw)' if raw else ''}"


def print_trust(console: "Console", trust: dict[str, Any]) -> None:
    """What the model promised, and what was measured."""
    if sets := trust["sets"]:
        low, high = sets["interval"]
        console.print(
            f"sets for a coverage of {sets['promised']:.1%}: coverage {sets['coverage']:.1%} "
            f"({low:.1%} to {high:.1%}), mean size {sets['mean_size']:.2f}, "
            f"{sets['single']:.1%} have one class"
        )
    if answers := trust["abstention"]:
        error = "none" if answers["error"] is None else f"{answers['error']:.2%}"
        console.print(
            f"answers for an error of at most {answers['promised']:.1%}: "
            f"{answers['answered']:.1%} answered, error among them {error}"
        )
    if trust["odd"] is not None:
        console.print(f"odd images: {trust['odd']:.1%}")


def print_class_scores(console: "Console", document: dict[str, Any]) -> None:
    """Precision, recall and F1 of the classes with the lowest F1."""
    from rich.table import Table
    from rich.text import Text

    from vitrail.display.text import printable

    present = {name: score for name, score in document["per_class"].items() if score["count"]}
    lowest = sorted(present.items(), key=lambda pair: pair[1]["f1"])[:CLASSES_SHOWN]
    table = Table(box=None, header_style="bold", title_justify="left")
    sets = (document["trust"]["sets"] or {}).get("per_class")
    columns = ["class", "precision", "recall", "F1", "images"]
    for column in [*columns, "coverage", "set size"] if sets else columns:
        table.add_column(column, justify="left" if column == "class" else "right")
    for name, score in lowest:
        cells = [f"{score[key]:.3f}" for key in ("precision", "recall", "f1")]
        cells.append(str(score["count"]))
        if sets:
            cells += [f"{sets[name]['coverage']:.3f}", f"{sets[name]['mean_size']:.2f}"]
        table.add_row(Text(printable(name)), *cells)
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
