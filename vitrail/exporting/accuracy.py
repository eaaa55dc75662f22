"""Accuracy before and after an export, on the same labelled images."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.evaluation.interval import Z_95

Labels = NDArray[np.int64]  # class indices; multi-label: (images, classes) of 0 and 1


@dataclass(frozen=True, kw_only=True)
class AccuracyChange:
    """How many labelled images each of two models classifies correctly, multi-label: exactly."""

    before: float  # accuracy in PyTorch, from 0 to 1
    after: float  # accuracy of the exported model
    interval: tuple[float, float]  # 95 % confidence interval of after - before, paired
    images: int

    @property
    def loss(self) -> float:
        """Accuracy lost, in percentage points; negative for a gain."""
        return 100 * (self.before - self.after)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"interval": list(self.interval)}


def compare_accuracy(before: Labels, after: Labels, labels: Labels) -> AccuracyChange:
    """Compares two models by their predicted classes or labels on the same images."""
    correct_before, correct_after = matches(before, labels), matches(after, labels)
    return AccuracyChange(
        before=float(correct_before.mean()),
        after=float(correct_after.mean()),
        interval=paired_interval(correct_before, correct_after),
        images=len(labels),
    )


def matches(one: Labels, other: Labels) -> NDArray[np.bool_]:
    """Whether each image has the same class, or exactly the same labels."""
    equal: NDArray[np.bool_] = (one == other).reshape(len(one), -1).all(axis=1)
    return equal


def paired_interval(before: NDArray[np.bool_], after: NDArray[np.bool_]) -> tuple[float, float]:
    """95 % confidence interval of the change of a rate measured twice on the same images.

    Wald's interval with half an image added to each of the four outcomes (Agresti and Min, 2005),
    so that it does not vanish where both models agree on every image.
    """
    total = len(before) + 2
    gained = float((~before & after).sum()) + 0.5
    lost = float((before & ~after).sum()) + 0.5
    change = (gained - lost) / total
    margin = Z_95 * math.sqrt((gained + lost) / total - change**2) / math.sqrt(total)
    return max(-1.0, change - margin), min(1.0, change + margin)
