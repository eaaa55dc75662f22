"""Scores of images with any number of labels: average precision, F1, thresholds, calibration.

The functions take `logits` or probabilities (N, K) and `labels` (N, K) of 0 and 1 on the CPU.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.evaluation.metrics import bin_confidences, calibration_error

LBFGS_STEPS = 100  # of Platt scaling; it converges in about ten
PLATT_PRIOR = 0.01  # pulls towards plain sigmoids where a class has few validation images
DEFAULT_THRESHOLD = 0.5


def average_precision(scores: Tensor, positive: Tensor) -> float:
    """The area under the precision-recall curve of one class, as scikit-learn computes it.

    Equal scores count as one point. NaN for a class without a positive.
    """
    order = scores.double().argsort(descending=True, stable=True)
    ranked, hits = scores.double()[order], positive[order].double()
    if not hits.sum():
        return math.nan
    found = hits.cumsum(0)
    last = torch.ones(len(hits), dtype=torch.bool)
    last[:-1] = ranked[1:] != ranked[:-1]  # the end of each group of equal scores
    precision = (found / torch.arange(1, len(hits) + 1))[last]
    recall = (found / found[-1])[last]
    steps = torch.diff(recall, prepend=recall.new_zeros(1))
    return float((steps * precision).sum())


def mean_average_precision(scores: Tensor, labels: Tensor) -> float:
    """Mean of the average precision of all classes that have a positive (mAP)."""
    values = [average_precision(scores[:, k], labels[:, k]) for k in range(labels.shape[1])]
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def binary_log_loss(logits: Tensor, labels: Tensor) -> float:
    """Mean binary cross-entropy over images and classes, in nats."""
    return float(F.binary_cross_entropy_with_logits(logits.double(), labels.double()))


def exact_match(predicted: Tensor, labels: Tensor) -> float:
    """The fraction of images all of whose labels are predicted, and no other."""
    return float((predicted.bool() == labels.bool()).all(dim=1).double().mean())


@dataclass(frozen=True, kw_only=True)
class LabelScore:
    """Scores of one label."""

    average_precision: float | None  # None: no image has the label
    precision: float
    recall: float
    f1: float
    threshold: float  # probability from which the label is predicted
    count: int  # images that have the label


def score_labels(
    probabilities: Tensor, labels: Tensor, thresholds: tuple[float, ...]
) -> list[LabelScore]:
    """Scores of each class; 0 where a denominator is 0."""
    predicted = predict_labels(probabilities, thresholds)
    scores = []
    for k, threshold in enumerate(thresholds):
        hits = int((predicted[:, k] & labels[:, k].bool()).sum())
        found, count = int(predicted[:, k].sum()), int(labels[:, k].sum())
        ap = average_precision(probabilities[:, k], labels[:, k])
        scores.append(
            LabelScore(
                average_precision=None if math.isnan(ap) else ap,
                precision=hits / max(1, found),
                recall=hits / max(1, count),
                f1=2 * hits / max(1, found + count),
                threshold=threshold,
                count=count,
            )
        )
    return scores


def predict_labels(probabilities: Tensor, thresholds: tuple[float, ...]) -> Tensor:
    """Which labels each image gets: those whose probability reaches their threshold."""
    return probabilities.double() >= torch.tensor(thresholds, dtype=torch.float64)


def micro_f1(predicted: Tensor, labels: Tensor) -> float:
    """F1 over all pairs of an image and a label."""
    hits = int((predicted & labels.bool()).sum())
    return 2 * hits / max(1, int(predicted.sum()) + int(labels.sum()))


def macro_f1(scores: list[LabelScore]) -> float:
    """Mean F1 of the classes that have an image."""
    present = [score.f1 for score in scores if score.count]
    return sum(present) / max(1, len(present))


def choose_thresholds(probabilities: Tensor, labels: Tensor) -> tuple[float, ...]:
    """For each class the probability with the highest F1 on validation data.

    Halfway to the next lower probability; 0.5 for a class without a positive.
    """
    thresholds = []
    for k in range(labels.shape[1]):
        ranked, order = probabilities[:, k].double().sort(descending=True, stable=True)
        hits = labels[order, k].double().cumsum(0)
        if not hits[-1]:
            thresholds.append(DEFAULT_THRESHOLD)
            continue
        f1 = 2 * hits / (torch.arange(1, len(hits) + 1) + hits[-1])
        f1[:-1][ranked[1:] == ranked[:-1]] = -1  # no threshold separates equal probabilities
        best = int(f1.argmax())
        below = float(ranked[best + 1]) if best + 1 < len(ranked) else 0.0
        thresholds.append((float(ranked[best]) + below) / 2)
    return tuple(thresholds)


@dataclass(frozen=True, kw_only=True)
class PlattScaling:
    """Calibrated probabilities sigmoid(slope * logit + intercept), for each class its own."""

    slopes: tuple[float, ...]
    intercepts: tuple[float, ...]

    def probabilities(self, logits: Tensor) -> Tensor:
        slopes, intercepts = torch.tensor([self.slopes, self.intercepts], dtype=torch.float64)
        scaled: Tensor = logits.double() * slopes + intercepts
        return scaled.sigmoid()


def fit_platt(logits: Tensor, labels: Tensor) -> PlattScaling:
    """Fits each class on validation data, with Platt's smoothed targets (Platt, 1999).

    The smoothing keeps the fit finite for a class whose scores separate its positives.
    """
    slopes, intercepts = [], []
    for k in range(labels.shape[1]):
        slope, intercept = fit_platt_class(logits[:, k].double(), labels[:, k].double())
        slopes.append(slope)
        intercepts.append(intercept)
    return PlattScaling(slopes=tuple(slopes), intercepts=tuple(intercepts))


def fit_platt_class(scores: Tensor, positive: Tensor) -> tuple[float, float]:
    """Logistic regression on one score; (1, 0) if the score says nothing about the class."""
    count, total = float(positive.sum()), len(positive)
    targets = torch.where(positive > 0, (count + 1) / (count + 2), 1 / (total - count + 2))
    weights = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=LBFGS_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        slope, intercept = weights
        fit: Tensor = F.binary_cross_entropy_with_logits(
            slope * scores + intercept, targets, reduction="sum"
        )
        fit = fit + PLATT_PRIOR * ((slope - 1) ** 2 + intercept**2)
        fit.backward()
        return fit

    with torch.enable_grad():
        optimizer.step(loss)
    slope, intercept = weights.tolist()
    if not (math.isfinite(slope) and math.isfinite(intercept) and slope > 0):
        return 1.0, 0.0
    return slope, intercept


def expected_calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """Mean |probability - frequency| over all pairs of an image and a label, in 15 bins."""
    pairs = bin_confidences(probabilities.flatten(), labels.flatten() > 0)
    return calibration_error(pairs)


def cooccurrence(labels: Tensor, predicted: Tensor) -> Tensor:
    """How many images that have each label (row) are predicted to have each label (column)."""
    return labels.double().T @ predicted.double()
