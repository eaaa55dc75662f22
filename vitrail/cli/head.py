"""`vitrail head`: fits and compares scikit-learn classifiers on frozen features."""

import json as as_json
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import vitrail
from vitrail.cli.flags import (
    NO_COLUMNS,
    NO_VIT,
    BatchSize,
    ColumnNames,
    Data,
    Device,
    Labels,
    LoadedVit,
    Model,
    Normalisation,
    OptionalPath,
    SkipBroken,
    Switch,
    given_settings,
    unset,
)
from vitrail.errors import UserError
from vitrail.heads.kinds import DEFAULT_KIND, KINDS

TABLE_WIDTH = 140  # columns; numbers are never cut off

if TYPE_CHECKING:
    from vitrail.heads.few_shot import FewShotScore
    from vitrail.inference.head_comparison import HeadComparison

HeadKinds: TypeAlias = Annotated[
    tuple[str, ...],
    unset(
        name="kind",
        metavar="KIND [KIND ...]",
        help=f"kinds of heads to fit: {', '.join(KINDS)} (default: {DEFAULT_KIND})",
    ),
]
FeatureLayers: TypeAlias = Annotated[
    tuple[int, ...],
    unset(
        metavar="INT [INT ...]",
        help="blocks whose features are concatenated, counted from 0, or from the end as -1, -2 "
        "(default: the last)",
    ),
]


def head(
    model: Model,
    data: Data,
    *,
    kinds: HeadKinds = (),
    all: Switch = False,
    features: Literal["pooled", "cls", "average"] = "pooled",
    layers: FeatureLayers = (),
    shots: Annotated[tuple[int, ...], unset(metavar="INT [INT ...]")] = (),
    out: OptionalPath = None,
    batch: BatchSize = 64,
    device: Device = "auto",
    skip_broken: SkipBroken = False,
    preprocess: Normalisation = None,
    json: Switch = False,
    labels: Labels = None,
    columns: ColumnNames = NO_COLUMNS,
    vit: LoadedVit = NO_VIT,
) -> None:
    """Fit and compare scikit-learn classifiers on frozen features.

    Fits on the training split, selects the best head on the validation split, and reports the
    accuracy on the test split. With several labels per image, a head has one estimator for each
    label, and the accuracy counts images all of whose labels are right. Use the saved head with
    `predict --head` and `evaluate --head`.

    Args:
        all: fit every kind
        features: input of the model's own head (pooled), its [CLS] token, or the average patch
        shots: also fit on this many images per class; mean and standard deviation of 5 draws
        out: file for the best head (default: head.skops beside the model)
        json: print one JSON document
    """
    from vitrail.inference.head_comparison import default_head_path

    if all and kinds:
        raise UserError("`all` and `kinds` exclude each other; give one of them")
    comparison = vitrail.compare_heads(
        model,
        data,
        kinds=tuple(KINDS) if all else tuple(dict.fromkeys(kinds)) or (DEFAULT_KIND,),
        features=features,
        layers=layers,
        shots=shots,
        out=out or default_head_path(model),
        batch=batch,
        device=device,
        skip_broken=skip_broken,
        preprocess=preprocess,
        vit=given_settings(vit),
        columns=given_settings(columns),
        labels=labels,
    )
    if json:
        print(as_json.dumps(comparison.to_list(), indent=1))
    else:
        print_comparison(comparison)


def print_comparison(comparison: "HeadComparison") -> None:
    """One row for each kind of head; an asterisk marks the selected one."""
    from rich.console import Console
    from rich.table import Table

    from vitrail.display.text import format_bytes

    shots = [one.shots for one in comparison.results[0].shots]
    accuracy = {"test": "test", "val": "validation"}[comparison.split]
    columns = ("", "head", accuracy, "95 % interval", "validation", "fit", "predict", "size")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in (*columns, *(f"{n} shot{'s' * (n > 1)}" for n in shots), "parameters"):
        table.add_column(
            column, justify="left" if column in ("", "head", "parameters") else "right"
        )
    for row in comparison.results:
        low, high = row.interval
        parameters = ", ".join(f"{key} {value}" for key, value in row.fitted.parameters.items())
        table.add_row(
            "*" if row is comparison.best else "",
            row.head.kind,
            f"{row.accuracy:.1%}",
            f"{low:.1%} to {high:.1%}",
            "-" if row.validation is None else f"{row.validation:.1%}",
            f"{row.fitted.search_seconds + row.fitted.fit_seconds:.1f} s",
            f"{row.predict_seconds:.2f} s",
            format_bytes(row.size),
            *map(format_few_shots, row.shots),
            parameters,
        )
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, TABLE_WIDTH)
    counts = comparison.images
    console.print(
        f"{counts['train']:,} training, {counts['val']:,} validation and "
        f"{counts['test']:,} test images; features of width {comparison.results[0].head.width}"
    )
    console.print(table)
    criterion = (
        "validation accuracy" if comparison.best.validation is not None else "cross-validation"
    )
    console.print(f"* best by {criterion}, saved in {comparison.file}", markup=False)


def format_few_shots(one: "FewShotScore") -> str:
    if one.mean is None or one.std is None:
        return "-"
    return f"{one.mean:.1%} ± {100 * one.std:.1f}"
