"""Several kinds of heads on the same frozen features: fitted, evaluated, and the best one saved."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from vitrail import files
from vitrail.arguments import check_arguments
from vitrail.data.config import LabelKind
from vitrail.data.source import SPLITS, Split, is_multi_label
from vitrail.data.sources.places import check_output_path
from vitrail.display.progress import progress_bar
from vitrail.display.text import format_accuracy, format_percent
from vitrail.errors import UserError
from vitrail.evaluation.metrics import wilson_interval
from vitrail.heads import few_shot
from vitrail.heads.features import Examples, FeatureKind, hash_weights
from vitrail.heads.file import HEAD_FILE, read_head_file, serialise_head, write_head_file
from vitrail.heads.fit import FittedEstimator, fit_kind, fit_labels
from vitrail.heads.head import Head
from vitrail.heads.kinds import find_kind, require_sklearn
from vitrail.inference.classifier import Classifier
from vitrail.inference.head import (
    FeatureClassifier,
    describe_head_data,
    make_extractor,
    make_head,
    open_training_data,
)
from vitrail.model.vit import ViT
from vitrail.zoo.weights import Normalisation

DEFAULT_KINDS = ("logistic",)


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadResult:
    """One kind of head, fitted and evaluated."""

    head: Head
    fitted: FittedEstimator
    accuracy: float  # on `HeadComparison.split`
    interval: tuple[float, float]  # 95 % confidence interval of the accuracy (Wilson)
    validation: float | None  # accuracy on the validation split; None if it is empty
    predict_seconds: float  # for all images of `HeadComparison.split`
    size: int  # bytes of its file
    shots: tuple[few_shot.FewShotScore, ...]

    @property
    def selection_score(self) -> float:
        """Validation or cross-validation accuracy, which selects the best head; never test."""
        score = self.validation
        if score is None:
            score = self.fitted.cross_validation
        return -1.0 if score is None else score


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class HeadComparison:
    """Several kinds of heads on the same features.

    >>> comparison = vitrail.compare_heads("runs/digits-1", "digits", kinds=["knn", "lda"])
    >>> comparison.best.head.kind in ("knn", "lda")
    True
    """

    results: tuple[HeadResult, ...]
    best: HeadResult  # highest validation accuracy
    images: dict[Split, int]  # in each split
    split: Split  # that the accuracies are of
    classifier: FeatureClassifier  # with the best head
    file: Path | None = None  # with the best head; None if it was not saved

    def to_list(self) -> list[dict[str, Any]]:
        """The document that `vitrail head --json` prints.

        >>> comparison = vitrail.compare_heads("runs/digits-1", "digits", kinds=["nearest-mean"])
        >>> [row["kind"] for row in comparison.to_list()]
        ['nearest-mean']
        """
        return [
            {
                "kind": result.head.kind,
                "accuracy": result.accuracy,
                "interval": list(result.interval),
                "fit_seconds": round(result.fitted.fit_seconds, 4),
                "predict_seconds": round(result.predict_seconds, 4),
                "split": self.split,
                "validation": result.validation,
                "cross_validation": result.fitted.cross_validation,
                "parameters": result.fitted.parameters,
                "search_seconds": round(result.fitted.search_seconds, 4),
                "bytes": result.size,
                "shots": [
                    {
                        "shots": score.shots,
                        "draws": score.draws,
                        "mean": score.mean,
                        "spread": score.std,
                    }
                    for score in result.shots
                ],
                "best": result is self.best,
                "file": str(self.file) if result is self.best and self.file else None,
            }
            for result in self.results
        ]

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        for result in self.results:
            yield (
                "*" if result is self.best else "",
                result.head.kind,
                format_accuracy(result.accuracy, result.interval),
                "-" if result.validation is None else format_percent(result.validation),
            )

    def __repr__(self) -> str:
        lines = [f"HeadComparison on {self.images[self.split]:,} images ({self.split})"]
        lines += [
            f"{mark:>2} {kind:<14} {accuracy:<24} validation {validation}"
            for mark, kind, accuracy, validation in self._rows()
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
            for row in self._rows()
        )
        header = f"<th></th><th>head</th><th>{self.split} accuracy</th><th>validation</th>"
        return f"<table><tr>{header}</tr>{rows}</table>"


@check_arguments
def compare_heads(
    model: str | Path | Classifier,
    data: str | Path,
    *,
    kinds: Sequence[str] = DEFAULT_KINDS,
    features: FeatureKind = "pooled",
    layers: Sequence[int] = (),
    shots: Sequence[int] = (),
    out: str | Path | None = None,
    batch: int = 64,
    device: str = "auto",
    skip_broken: bool = False,
    preprocess: Normalisation | None = None,
    vit: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    labels: LabelKind | None = None,
) -> HeadComparison:
    """Fits several kinds of heads on frozen features, and evaluates them on test images.

    Each kind is fitted on the training split, with parameters chosen by cross-validation. The best
    one has the highest validation accuracy; test images are for the final numbers only.

    Args:
        model: run folder, model file, weights with or without a head, or a `Classifier`
        data: folder, table, shards or built-in name
        kinds: of logistic, linear-svm, rbf-svm, knn, random-forest, extra-trees, boosting, lda,
            nearest-mean, mlp
        features: input of the model's own head (pooled), its [CLS] token, or the average of the
            patch tokens
        layers: blocks whose features are concatenated, from 0, or from -1 down; by default the
            last one
        shots: also fit on this many images of each class, such as (1, 5, 10)
        out: file for the best head; by default it is not saved
        batch: images in each forward pass
        device: "cpu", "cuda", "cuda:1", "mps"; "auto" picks a GPU if there is one
        skip_broken: ignore images that cannot be read instead of raising
        preprocess: mean and standard deviation that foreign weights expect, if their file does
            not say
        vit: settings that the file does not contain, or to adapt the model to, such as
            {"image": 384}
        columns: the columns of a table, such as {"label": "species"}
        labels: "multi" if an image may have any number of labels: a head has one estimator for
            each, and its accuracy counts images all of whose labels are right

    >>> vitrail.compare_heads("runs/digits-1", "digits", kinds=["nearest-mean"])
    HeadComparison on ... images (test)
     * nearest-mean   ... validation ...
    """
    _check_kinds(kinds, shots)
    extractor, chosen = make_extractor(
        model, features, layers, batch, device, skip_broken, preprocess, vit
    )
    source, names = open_training_data(data, columns, labels)
    if is_multi_label(source) and shots:
        raise UserError("`shots` needs one label per image; omit it")
    path = None if out is None else files.expand_user(out)
    if path is not None:
        check_output_path(source, path, "out")
        check_head_path(path, extractor.model)
    train, val, test = (extractor.extract_split(source, split) for split in SPLITS)
    split: Split = "test" if len(test) else "val"
    held_out = test if len(test) else val
    if not len(held_out):
        raise UserError(f"{source.name} has neither test nor validation images; add some")
    for count in shots:
        few_shot.sample_shots(train.y, count, source.classes, 0)  # raises if there are too few
    origin = describe_head_data(source, data, names)
    results = []
    with progress_bar("fitting heads", len(kinds)) as advance:
        for kind in kinds:
            fit = fit_labels if is_multi_label(source) else fit_kind
            fitted = fit(kind, train.x, train.y, source.classes)
            one = make_head(extractor, kind, fitted.estimator, source, origin, val)
            scores = tuple(
                few_shot.evaluate_few_shot(kind, train, held_out, count, source.classes)
                for count in shots
            )
            results.append(_evaluate_head(one, fitted, val, held_out, scores))
            advance(1)
    best = max(results, key=lambda result: result.selection_score)
    if path is not None:
        write_head_file(path, best.head)
    return HeadComparison(
        results=tuple(results),
        best=best,
        images={"train": len(train), "val": len(val), "test": len(test)},
        split=split,
        classifier=FeatureClassifier(extractor, chosen, head=best.head),
        file=path,
    )


def _check_kinds(names: Sequence[str], shots: Sequence[int]) -> None:
    """Raises for unknown kinds before any weights are loaded."""
    if not names:
        raise UserError("`kinds` is empty; give at least one kind of head, such as logistic")
    for name in names:
        find_kind(name)
    few_shot.check_shots(shots)
    require_sklearn()


def _evaluate_head(
    head: Head,
    fitted: FittedEstimator,
    val: Examples,
    held_out: Examples,
    scores: tuple[few_shot.FewShotScore, ...],
) -> HeadResult:
    start = time.perf_counter()
    accuracy = head.accuracy(held_out)
    seconds = time.perf_counter() - start
    return HeadResult(
        head=head,
        fitted=fitted,
        accuracy=accuracy,
        interval=wilson_interval(accuracy, len(held_out)),
        validation=head.accuracy(val) if len(val) else None,
        predict_seconds=seconds,
        size=len(serialise_head(head)),
        shots=scores,
    )


def default_head_path(model: str | Path) -> Path:
    """head.skops in the folder of the model, or in the current folder if that is not writable."""
    path = files.expand_user(model)
    folder = path if path.is_dir() else path.parent
    writable = path.exists() and os.access(folder, os.W_OK)
    return folder / HEAD_FILE if writable else Path(HEAD_FILE)


def check_head_path(path: Path, model: ViT) -> None:
    """Refuses to overwrite anything except an earlier head of the same weights."""
    if not path.exists():
        return
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a file as `out`")
    try:
        weights_hash = read_head_file(path).weights_hash
    except UserError as error:
        raise UserError(
            f"{path} already exists and is not a readable head; remove it, or choose another `out`"
        ) from error
    if weights_hash != hash_weights(model):
        raise UserError(f"{path} is a head of other weights; remove it, or choose another `out`")
