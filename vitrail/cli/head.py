"""`vitrail head`: any classifier on the features of a frozen model, compared."""

import json as as_json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vitrail.cli.flags import COLUMNS, Names, SkipBroken, Vit, changes
from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.heads.shots import Shots
    from vitrail.run.head import Comparison


def head(
    model: Annotated[str, tyro.conf.Positional],
    data: Annotated[str, tyro.conf.Positional],
    *,
    kind: tuple[str, ...] = (),
    all: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    features: Literal["pooled", "cls", "average"] = "pooled",
    layers: tuple[int, ...] = (),
    shots: tuple[int, ...] = (),
    out: Path | None = None,
    batch: int = 64,
    device: str = "auto",
    skip_broken: SkipBroken = False,
    preprocess: Literal["half", "imagenet", "clip"] | None = None,
    vit: Vit = Vit(),  # noqa: B008
    columns: Annotated[Names, COLUMNS] = Names(),  # noqa: B008
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Fit classifiers on frozen features, compare them, and keep the best.

    Learns from training images, chooses on validation images, tells the accuracy on test images.
    `predict` and `evaluate` use the kept one with --head.

    Args:
        model: run folder, model file, or any weights that can be read, with or without a head
        data: folder, table, shards or built-in name; its classes become those of the head
        kind: one or more of logistic (the linear probe, and the default), linear-svm, rbf-svm, knn,
            random-forest, extra-trees, boosting, lda, nearest-mean, mlp
        all: every kind
        features: what the model's own head reads (pooled), its [CLS] token if it has one, or the
            average of the patches
        layers: blocks whose features are joined, from 0, or from -1 down; by default the last one
        shots: learn also from so few images of each class: 5 draws, mean and spread
        out: file for the best head, by default head.skops beside the model, or in this
            folder if the model is not on this machine or its folder cannot be written to
        batch: images at once
        device: cpu, cuda, cuda:1 ...; auto takes a GPU if there is one
        skip_broken: go on without images that cannot be read
        preprocess: mean and deviation that foreign weights expect, if their file does not say
        vit: the model at another image size, or what foreign weights do not say of themselves
        columns: what the columns of a table are called
        json: print one JSON document
    """
    from vitrail.data.config import Columns
    from vitrail.heads import keep, kinds
    from vitrail.heads.features import Extractor, Features
    from vitrail.run.head import DEFAULT, Headed, beside, compare, frozen

    if all and kind:
        raise UserError("all are asked for, and some by name; give --all or --kind")
    if out is not None and out.is_dir():
        raise UserError(f"{out} is a folder; give the name of a file, such as {out / keep.FILE}")
    names = tuple(kinds.KINDS) if all else tuple(dict.fromkeys(kind)) or DEFAULT
    for name in names:
        kinds.find(name)
    weights, view, place = frozen(model, device, preprocess=preprocess, vit=changes(vit))
    wanted = Features(what=features, layers=layers)
    headed = Headed(weights, view, place, wanted)
    headed.extractor = Extractor(
        model=headed.model, view=view, features=wanted, batch=batch, skip_broken=skip_broken
    )
    called = Columns(**changes(columns))
    path = out or beside(model)
    found = compare(headed, data, names, shots, telling(), columns=called, out=path)
    keep.save(path, found.best.head)
    if json:
        print(as_json.dumps(plain(found, path), indent=1))
    else:
        show(found, path)


def telling() -> Any:
    """Says on a terminal which head is being fitted."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    return lambda name: console.print(f"fitting {name}", end="\r" if console.is_terminal else "\n")


def plain(found: "Comparison", path: Path) -> list[dict[str, Any]]:
    return [
        {
            "kind": row.head.kind,
            "accuracy": row.accuracy,
            "interval": list(row.interval),
            "fit_seconds": round(row.fitted.fit_seconds, 4),
            "predict_seconds": round(row.predict_seconds, 4),
            "split": found.split,
            "validation": row.validation,
            "cross_validation": row.fitted.cross_validation,
            "parameters": row.fitted.parameters,
            "search_seconds": round(row.fitted.search_seconds, 4),
            "bytes": row.size,
            "shots": [vars(one) for one in row.shots],
            "best": row is found.best,
            "file": str(path) if row is found.best else None,
        }
        for row in found.rows
    ]


def show(found: "Comparison", path: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    few = [one.shots for one in found.rows[0].shots]
    words = {"test": "test", "val": "validation"}[found.split]
    columns = ("", "head", words, "95 % interval", "validation", "fit", "predict", "size")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in (*columns, *(f"{n} shot{'s' * (n > 1)}" for n in few), "chosen"):
        table.add_column(column, justify="left" if column in ("", "head", "chosen") else "right")
    for row in found.rows:
        low, high = row.interval
        chosen = ", ".join(f"{key} {value}" for key, value in row.fitted.parameters.items())
        table.add_row(
            "*" if row is found.best else "",
            row.head.kind,
            f"{row.accuracy:.1%}",
            f"{low:.1%} to {high:.1%}",
            "-" if row.validation is None else f"{row.validation:.1%}",
            f"{row.fitted.search_seconds + row.fitted.fit_seconds:.1f} s",
            f"{row.predict_seconds:.2f} s",
            size(row.size),
            *map(few_shots, row.shots),
            chosen,
        )
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 140)
    counts = found.images
    console.print(
        f"{counts['train']:,} training images, {counts['val']:,} for validation, "
        f"{counts['test']:,} for the test; features of width {found.rows[0].head.width}"
    )
    console.print(table)
    judge = "validation images" if found.best.validation is not None else "cross-validation"
    console.print(f"* the best on {judge}, kept in {path}", markup=False)


def few_shots(one: "Shots") -> str:
    if one.mean is None or one.spread is None:
        return "-"
    return f"{one.mean:.1%} ± {100 * one.spread:.1f}"


def size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
