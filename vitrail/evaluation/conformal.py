"""Prediction sets that contain the true class with a promised probability (split conformal).

A class is scored by its tail mass: the probability of the class and of all less likely ones.
The most likely class has tail mass 1, so it is in every set. A set takes every class whose tail
mass reaches a threshold, so that uncertain images get large sets (adaptive prediction sets, Romano
et al., 2020). The threshold is a quantile of the tail mass of the true class on validation images,
of each class where there are enough. A class that is most likely for more of its images than was
promised cannot be covered less; the others are then covered a little less, so that all classes
together keep the promise without larger sets than it needs.
All arrays are NumPy's, so that exported models have sets without torch.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import UserError
from vitrail.evaluation.interval import wilson_interval

MIN_CLASS_IMAGES = 100  # validation images from which a class has a threshold of its own
MAX_SCORES = 4096  # scores that are stored for all classes together
MAX_CLASS_SCORES = 65_536  # scores that are stored per class, over all classes
SLACKS = [part / 1000 for part in range(1, 51)]  # of the coverage of classes, below the promise


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The sorted scores of validation images, of which any quantile can be taken."""

    images: int  # that were scored
    values: tuple[float, ...]  # ascending; evenly spaced order statistics, if not all of them

    def threshold(self, coverage: float) -> float | None:
        """The score that a new image's true class reaches with this probability, or more.

        None if there are too few images for such a coverage.
        """
        rank = math.floor((1 - coverage) * (self.images + 1) + 1e-9)  # counted from 1
        # the stored value at or below this rank: sets become larger, never too small
        place = rank * len(self.values) // self.images
        return self.values[min(place, len(self.values)) - 1] if place >= 1 else None

    def expected_coverage(self, coverage: float) -> float:
        """What the threshold of a coverage covers: more, if many of the scores are equal to it."""
        threshold = self.threshold(coverage)
        if threshold is None:
            return 1.0
        reaching = len(self.values) - bisect_left(self.values, threshold)
        return reaching / (len(self.values) + 1)


@dataclass(frozen=True, kw_only=True)
class Conformal:
    """What prediction sets need: the scores of validation images, overall and per class."""

    overall: Scores
    classes: dict[str, Scores] = field(default_factory=dict)  # by index, where there are enough

    def thresholds(self, coverage: float, classes: int) -> NDArray[np.float64]:
        """The threshold of each class for a coverage; raises if there are too few images."""
        check_coverage(coverage)
        overall = self.overall.threshold(coverage)
        if overall is None:
            needed = math.ceil(1 / (1 - coverage) - 1 - 1e-6)
            raise UserError(
                f"coverage {coverage:g} needs at least {needed:,} validation images, and this "
                f"model was calibrated with {self.overall.images:,}; give a lower `coverage`"
            )
        found = [self.classes.get(str(index)) for index in range(classes)]
        level = self.class_coverage(coverage)
        own = [one.threshold(level) if one else None for one in found]
        return np.array([overall if one is None else one for one in own])

    def class_coverage(self, coverage: float) -> float:
        """The lowest coverage of each class with which all together reach `coverage`."""
        own = list(self.classes.values())
        promised = coverage * sum(scores.images for scores in own)
        level = coverage
        for lower in [coverage - slack for slack in SLACKS if slack < coverage]:
            if sum(scores.images * scores.expected_coverage(lower) for scores in own) < promised:
                break
            level = lower
        return level


def check_coverage(coverage: object) -> None:
    """Raises unless this is a coverage that a set can have."""
    number = isinstance(coverage, int | float) and not isinstance(coverage, bool)
    if not number or not 0 < coverage < 1:  # type: ignore[operator]
        raise UserError(f"`coverage` is {coverage!r}; give a number between 0 and 1, such as 0.95")


def tail_mass(probabilities: NDArray[Any]) -> NDArray[np.float64]:  # (N, K)
    """The probability of each class and of all less likely ones."""
    values = np.asarray(probabilities, np.float64)
    order = values.argsort(axis=1, kind="stable")
    masses = np.take_along_axis(values, order, axis=1).cumsum(axis=1)
    masses[:, -1] = 1.0  # of the most likely class, whatever the sum was rounded to
    scores = np.empty_like(masses)
    np.put_along_axis(scores, order, masses, axis=1)
    return scores  # (N, K)


def fit_conformal(probabilities: NDArray[Any], labels: NDArray[Any]) -> Conformal:
    """Scores the true classes of validation images."""
    scores = tail_mass(probabilities)[np.arange(len(labels)), labels]
    classes = probabilities.shape[1]
    limit = max(MIN_CLASS_IMAGES, MAX_CLASS_SCORES // classes)
    counts = np.bincount(labels, minlength=classes)
    return Conformal(
        overall=_summarise(scores, MAX_SCORES),
        classes={
            str(index): _summarise(scores[labels == index], limit)
            for index in range(classes)
            if counts[index] >= MIN_CLASS_IMAGES
        },
    )


def fit_label_sets(probabilities: NDArray[Any], labels: NDArray[Any]) -> Conformal:
    """For images with any number of labels (N, K): scores each label that an image has.

    A set takes every label whose probability reaches a threshold, so that it contains each label
    of an image with the promised coverage.
    """
    present = np.asarray(labels) > 0.5
    limit = max(MIN_CLASS_IMAGES, MAX_CLASS_SCORES // present.shape[1])
    return Conformal(
        overall=_summarise(probabilities[present].astype(np.float64), MAX_SCORES),
        classes={
            str(index): _summarise(probabilities[present[:, index], index], limit)
            for index in range(present.shape[1])
            if present[:, index].sum() >= MIN_CLASS_IMAGES
        },
    )


def _summarise(scores: NDArray[np.float64], limit: int) -> Scores:
    """The sorted scores with five digits, rounded down; at most `limit` order statistics."""
    ordered = np.sort(scores).tolist()
    count = min(len(ordered), limit)
    chosen = [ordered[len(ordered) * (place + 1) // count - 1] for place in range(count)]
    return Scores(images=len(ordered), values=tuple(round_down(value) for value in chosen))


def round_down(value: float, digits: int = 5) -> float:
    """A number from 0 to 1 with this many significant digits, not larger than it was."""
    if value >= 1:
        return 1.0
    rounded = float(f"{value:.{digits - 1}e}")
    return rounded if rounded <= value else float(f"{value * (1 - 10**-digits * 5):.{digits - 1}e}")


def in_sets(probabilities: NDArray[Any], thresholds: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether each class is in the set of each image, (N, K)."""
    members: NDArray[np.bool_] = tail_mass(probabilities) >= thresholds
    return members


def in_label_sets(
    probabilities: NDArray[Any], thresholds: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Whether each label is in the set of each image, (N, K), for any number of labels."""
    members: NDArray[np.bool_] = np.asarray(probabilities, np.float64) >= thresholds
    return members


@dataclass(frozen=True, kw_only=True)
class SetScore:
    """How often sets contain the true class, and how large they are."""

    coverage: float  # fraction of the images whose set contains the true class
    mean_size: float  # classes per set
    images: int


@dataclass(frozen=True, kw_only=True)
class SetQuality:
    """Prediction sets measured on labelled images."""

    promised: float  # the coverage that was asked for
    coverage: float
    interval: tuple[float, float]  # 95 % confidence interval of the coverage (Wilson)
    mean_size: float
    single: float  # fraction of the sets with one class
    per_class: dict[str, SetScore]  # of the classes that have images


def measure_sets(
    members: NDArray[np.bool_], labels: NDArray[Any], promised: float, classes: Sequence[str]
) -> SetQuality:
    """The coverage and size of sets (N, K) on images with these labels."""
    covered = members[np.arange(len(labels)), labels]
    sizes = members.sum(axis=1)
    coverage = float(covered.mean())
    return SetQuality(
        promised=promised,
        coverage=coverage,
        interval=wilson_interval(coverage, len(labels)),
        mean_size=float(sizes.mean()),
        single=float((sizes == 1).mean()),
        per_class={
            name: SetScore(
                coverage=float(covered[labels == index].mean()),
                mean_size=float(sizes[labels == index].mean()),
                images=int((labels == index).sum()),
            )
            for index, name in enumerate(classes)
            if (labels == index).any()
        },
    )


def measure_label_sets(
    members: NDArray[np.bool_], labels: NDArray[Any], promised: float, classes: Sequence[str]
) -> SetQuality:
    """How many of the labels that images have are in their sets; for any number of labels."""
    present = np.asarray(labels) > 0.5
    coverage, sizes = float(members[present].mean()), members.sum(axis=1)
    return SetQuality(
        promised=promised,
        coverage=coverage,
        interval=wilson_interval(coverage, int(present.sum())),
        mean_size=float(sizes.mean()),
        single=float((sizes == 1).mean()),
        per_class={
            name: SetScore(
                coverage=float(members[present[:, index], index].mean()),
                mean_size=float(sizes[present[:, index]].mean()),
                images=int(present[:, index].sum()),
            )
            for index, name in enumerate(classes)
            if present[:, index].any()
        },
    )
