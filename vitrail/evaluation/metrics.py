"""Accuracy with its confidence interval, confusion matrix and calibration, as pure functions.

They take `logits` (N, K) and `labels` (N) on the CPU: N images, K classes. Rates are fractions
from 0 to 1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.evaluation.interval import wilson_interval as wilson_interval

ECE_BINS = 15  # Guo et al., 2017
CONFIDENT_ERRORS = 20  # misclassified images that `vitrail evaluate` lists
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3  # the range that `fit_temperature` searches
BISECTIONS = 60  # halvings of that range, after which it is narrower than float64 resolves


def accuracy(logits: Tensor, labels: Tensor, top: int = 1) -> float:
    """Top-k accuracy; of equal logits, the lower class index ranks first."""
    target = logits.gather(1, labels[:, None])
    earlier = torch.arange(logits.shape[1]) < labels[:, None]
    ahead = (logits > target) | ((logits == target) & earlier)
    return float((ahead.sum(dim=1) < top).double().mean())


def confusion_matrix(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Counts of each true class (row) predicted as each class (column), as in scikit-learn."""
    return torch.bincount(labels * classes + predicted, minlength=classes**2).view(classes, classes)


@dataclass(frozen=True, kw_only=True)
class ClassScore:
    """Precision, recall and F1 of one class."""

    precision: float  # true positives / predicted positives
    recall: float  # true positives / images of the class
    f1: float  # harmonic mean of precision and recall
    count: int  # images of the class


def score_classes(confusion: Tensor) -> list[ClassScore]:
    """Scores of each class from a confusion matrix; 0 where a denominator is 0."""
    scores = []
    for correct, predicted, count in zip(
        confusion.diag().tolist(),
        confusion.sum(dim=0).tolist(),
        confusion.sum(dim=1).tolist(),
        strict=True,
    ):
        scores.append(
            ClassScore(
                precision=correct / max(1, predicted),
                recall=correct / max(1, count),
                f1=2 * correct / max(1, predicted + count),
                count=count,
            )
        )
    return scores


def calibrated_softmax(logits: Tensor, temperature: float | None = None) -> Tensor:
    """Probabilities softmax(logits / temperature) in float64; None means temperature 1."""
    return (logits.double() / (temperature or 1.0)).softmax(dim=1)


def log_loss(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> float:
    """Mean negative log-likelihood, in nats."""
    return float(F.cross_entropy(logits.double() / temperature, labels))


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Images whose confidence falls into one range of a reliability diagram."""

    confidence: float  # mean probability of the predicted class
    accuracy: float
    count: int  # images


def reliability_diagram(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, bins: int = ECE_BINS
) -> list[Bin]:
    """Accuracy against confidence in `bins` ranges of equal width, without the empty ones."""
    confidence, predicted = calibrated_softmax(logits, temperature).max(dim=1)
    return bin_confidences(confidence, predicted == labels, bins)


def bin_confidences(confidence: Tensor, correct: Tensor, bins: int = ECE_BINS) -> list[Bin]:
    """A reliability diagram from confidences (N) and whether each prediction is correct (N)."""
    confidence, correct = confidence.double(), correct.double()
    index = (confidence * bins).ceil().clamp(1, bins) - 1  # ranges include their upper end
    diagram = []
    for inside in (index == n for n in range(bins)):
        if count := int(inside.sum()):
            diagram.append(
                Bin(
                    confidence=float(confidence[inside].mean()),
                    accuracy=float(correct[inside].mean()),
                    count=count,
                )
            )
    return diagram


def calibration_error(diagram: list[Bin]) -> float:
    """Expected calibration error: mean |confidence - accuracy| (Naeini et al., 2015)."""
    total = sum(bin.count for bin in diagram)
    return sum(bin.count * abs(bin.confidence - bin.accuracy) for bin in diagram) / total


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature that minimises the log-loss (Guo et al., 2017), from validation data.

    A pseudo-image with the mean sorted logits and a uniform label regularises the fit: otherwise
    the log-loss of a validation set without errors has no minimum.
    """
    scores = logits.double()
    pseudo = scores.sort(dim=1).values.mean(dim=0, keepdim=True)
    observed = scores.gather(1, labels[:, None]).sum() + pseudo.mean()
    scores = torch.cat([scores, pseudo])

    def slope(inverse: float) -> float:  # of the log-loss, which is convex in 1 / temperature
        expected = ((scores * inverse).softmax(dim=1) * scores).sum()
        return float(expected - observed)

    low, high = math.log(1 / MAX_TEMPERATURE), math.log(1 / MIN_TEMPERATURE)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        value = slope(math.exp(middle))
        low, high = (middle if value <= 0 else low), (middle if value >= 0 else high)
    return math.exp(-(low + high) / 2)


def two_proportion_test(first: float, second: float, images: int) -> float:
    """P-value of a two-sided z-test of two accuracies, each measured on `images` images.

    It treats the samples as independent; on the same images, McNemar's test detects
    smaller differences.
    """
    pooled = (first + second) / 2
    error = math.sqrt(2 * pooled * (1 - pooled) / images)
    return math.erfc(abs(first - second) / error / math.sqrt(2)) if error else 1.0


@dataclass(frozen=True, kw_only=True)
class Misclassification:
    """One image that the model gets wrong."""

    index: int  # position of the image among those evaluated
    label: int
    predicted: int
    probability: float  # confidence of the prediction


def most_confident_errors(
    confidence: Tensor, predicted: Tensor, labels: Tensor, limit: int = CONFIDENT_ERRORS
) -> list[Misclassification]:
    """The misclassified images, sorted by the confidence of their predictions, highest first.

    `calibrated_softmax(logits, temperature).max(dim=1)` gives confidence and prediction.
    """
    wrong = (predicted != labels).nonzero()[:, 0]
    order = wrong[confidence[wrong].argsort(descending=True, stable=True)][:limit]
    return [
        Misclassification(
            index=int(i),
            label=int(labels[i]),
            predicted=int(predicted[i]),
            probability=float(confidence[i]),
        )
        for i in order
    ]


def mcnemar(first: Tensor, second: Tensor, labels: Tensor) -> float:
    """P-value of McNemar's exact two-sided test (McNemar, 1947) for two models on the same images.

    It depends only on the discordant images, which exactly one of the models classifies correctly.
    """
    a, b = first == labels, second == labels
    only_first, only_second = int((a & ~b).sum()), int((~a & b).sum())
    discordant = only_first + only_second
    term = tail = 1  # binomial coefficient (discordant, k), and its sum up to the smaller count
    for k in range(min(only_first, only_second)):
        term = term * (discordant - k) // (k + 1)
        tail += term
    return min(1.0, tail / (1 << discordant) * 2)
