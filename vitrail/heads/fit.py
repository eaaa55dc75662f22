"""Fits a head, with hyper-parameters chosen by cross-validation on the training images."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.display.text import format_count
from vitrail.errors import UserError
from vitrail.heads.kinds import HeadKind, TrainingSize, find_kind, require_sklearn
from vitrail.heads.knn import Metric, NearestNeighbours, NeighbourSearch, count_votes

FOLDS = 3  # of cross-validation
CV_IMAGES = 2000  # training images that cross-validation uses, at most; the final fit uses all
NEIGHBOUR_COUNTS = (5, 1, 10, 20)  # values of k to choose from; the first wins ties
METRICS: tuple[Metric, ...] = ("cosine", "euclidean")


@dataclass(frozen=True, kw_only=True)
class FittedEstimator:
    """A fitted estimator, how its parameters were chosen, and how long that took."""

    estimator: Any
    parameters: dict[str, Any]  # chosen values; `images` if it was fitted on a sample
    cross_validation: float | None  # their accuracy; None if there was nothing to choose
    search_seconds: float  # of cross-validation
    fit_seconds: float  # of the final fit


def fit_kind(
    name: str, x: NDArray[np.float32], y: NDArray[np.int64], classes: Sequence[str]
) -> FittedEstimator:
    """Chooses parameters by cross-validation, then fits on all training images.

    A kind with `max_images` is fitted on a stratified sample of a larger training set; its
    parameters then include the number of `images`.
    """
    kind = find_kind(name)
    require_sklearn()
    smallest = int(np.bincount(y, minlength=len(classes)).min())
    size = TrainingSize(
        images=len(y), width=x.shape[1], classes=len(classes), smallest_class=smallest
    )
    start = time.perf_counter()
    subset = stratified_sample(y, CV_IMAGES)
    score: float | None
    with ignore_convergence_warnings():
        if name == "knn":
            parameters, score = choose_neighbours(x[subset], y[subset], len(classes))
            estimator: Any = NearestNeighbours(**parameters)
        else:
            parameters, score = choose_parameters(kind, size, x[subset], y[subset], classes)
            estimator = kind.build(size).set_params(**parameters)
        searched = time.perf_counter()
        reported = {key.split("__")[-1]: value for key, value in parameters.items()}
        if kind.max_images is not None and len(y) > kind.max_images:
            sample = stratified_sample(y, kind.max_images)
            x, y = x[sample], y[sample]
            reported["images"] = len(y)
        estimator.fit(x, y)
    return FittedEstimator(
        estimator=estimator,
        parameters=reported,
        cross_validation=score,
        search_seconds=searched - start,
        fit_seconds=time.perf_counter() - searched,
    )


def fit_labels(
    name: str, x: NDArray[np.float32], y: NDArray[np.uint8], classes: Sequence[str]
) -> FittedEstimator:
    """Fits one estimator for each label of images with any number of them (one versus rest)."""
    fitted = [
        fit_kind(name, x, y[:, k].astype(np.int64), (f"not {label}", label))
        for k, label in enumerate(classes)
    ]
    scores = [one.cross_validation for one in fitted if one.cross_validation is not None]
    return FittedEstimator(
        estimator=[one.estimator for one in fitted],
        parameters={"labels": len(classes)},
        cross_validation=float(np.mean(scores)) if scores else None,
        search_seconds=sum(one.search_seconds for one in fitted),
        fit_seconds=sum(one.fit_seconds for one in fitted),
    )


def ignore_convergence_warnings() -> "warnings.catch_warnings[None]":
    """Ignores ConvergenceWarning: the solvers' iterations are limited on purpose."""
    from sklearn.exceptions import ConvergenceWarning

    return warnings.catch_warnings(action="ignore", category=ConvergenceWarning)


def choose_parameters(
    kind: HeadKind,
    size: TrainingSize,
    x: NDArray[np.float32],
    y: NDArray[np.int64],
    classes: Sequence[str],
) -> tuple[dict[str, Any], float | None]:
    """The best point of the kind's grid and its cross-validation accuracy."""
    from sklearn.model_selection import GridSearchCV, StratifiedKFold

    if not kind.grid:
        return {}, None
    check_folds(y, classes)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    search = GridSearchCV(
        kind.build(size), dict(kind.grid), cv=folds, refit=False, error_score="raise"
    )
    search.fit(x, y)
    return search.best_params_, float(search.best_score_)


def check_folds(y: NDArray[np.int64], classes: Sequence[str]) -> None:
    counts = np.bincount(y, minlength=len(classes))
    if (fewest := int(counts.min())) < FOLDS:
        name = classes[int(counts.argmin())]
        raise UserError(
            f"class {name!r} has {format_count(fewest, 'training image')}, fewer than the {FOLDS} "
            f"folds of cross-validation; add images, or remove the class"
        )


def choose_neighbours(
    x: NDArray[np.float32], y: NDArray[np.int64], classes: int
) -> tuple[dict[str, Any], float]:
    """The best k and metric by leave-one-out validation: one search serves every k."""
    counts = [k for k in NEIGHBOUR_COUNTS if k < len(x)] or [1]
    scores: dict[tuple[Metric, int], float] = {}
    for metric in METRICS:
        _, neighbours = NeighbourSearch(x, metric).kneighbors(x, min(max(counts) + 1, len(x)))
        others = drop_self(neighbours)
        for k in counts:
            predicted = count_votes(y[others[:, :k]], classes).argmax(axis=1)
            scores[metric, k] = float((predicted == y).mean())
    metric, k = max(scores, key=lambda pair: scores[pair])
    return {"k": k, "metric": metric}, scores[metric, k]


def drop_self(neighbours: NDArray[np.int64]) -> NDArray[np.int64]:
    """Removes each row from its own neighbours, or the last one if duplicates displaced it."""
    own = neighbours == np.arange(len(neighbours))[:, None]
    own[~own.any(axis=1), -1] = True
    others: NDArray[np.int64] = neighbours[~own].reshape(len(neighbours), -1)
    return others


def stratified_sample(y: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Indices of a stratified sample of about `limit` images.

    Classes keep their proportions, but each has at least `FOLDS` images, or all that it has.
    """
    if len(y) <= limit:
        return np.arange(len(y))
    rng = np.random.default_rng(0)
    chosen = []
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        chosen.append(members[: max(FOLDS, round(limit * len(members) / len(y)))])
    return np.sort(np.concatenate(chosen))
