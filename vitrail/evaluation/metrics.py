"""Accuracy with its interval, confusion matrix, calibration: pure functions.

Of `logits` (N, K) and `labels` (N) on the CPU: N images, K classes. Rates lie between 0 and 1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Z = 1.959963984540054  # 95 % of a normal distribution lie within so many standard deviations


def accuracy(logits: Tensor, labels: Tensor, top: int = 1) -> float:
    """Share of images whose label is among the `top` highest logits; ties go to the lower class."""
    own = logits.gather(1, labels[:, None])
    earlier = torch.arange(logits.shape[1]) < labels[:, None]
    ahead = (logits > own) | ((logits == own) & earlier)
    return float((ahead.sum(dim=1) < top).double().mean())


def interval(rate: float, count: int) -> tuple[float, float]:
    """95 % confidence for the true rate, if `count` images show `rate` (Wilson, 1927)."""
    weight = Z**2 / count
    middle = (rate + weight / 2) / (1 + weight)
    reach = Z / (1 + weight) * math.sqrt(rate * (1 - rate) / count + weight / (4 * count))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def confusion(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """How often each class (row) was taken for each class (column)."""
    return torch.bincount(labels * classes + predicted, minlength=classes**2).view(classes, classes)


@dataclass(frozen=True, kw_only=True)
class ClassScore:
    precision: float  # of the images called so, the share that is so
    recall: float  # of the images that are so, the share called so
    f1: float  # harmonic mean of the two
    count: int  # images of the class


def per_class(confusion: Tensor) -> list[ClassScore]:
    """Scores of each class; what has nothing to be a share of is 0."""
    scores = []
    for right, called, count in zip(
        confusion.diag().tolist(),
        confusion.sum(dim=0).tolist(),
        confusion.sum(dim=1).tolist(),
        strict=True,
    ):
        scores.append(
            ClassScore(
                precision=right / max(1, called),
                recall=right / max(1, count),
                f1=2 * right / max(1, called + count),
                count=count,
            )
        )
    return scores


def log_loss(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> float:
    """Mean of -ln(probability of the label)."""
    return float(F.cross_entropy(logits.double() / temperature, labels))


@dataclass(frozen=True, kw_only=True)
class Bin:
    confidence: float  # mean probability of the predicted class
    accuracy: float
    count: int  # images


def reliability(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, bins: int = 15
) -> list[Bin]:
    """Confidence against accuracy in `bins` equal ranges of confidence, leaving out empty ones."""
    sure, predicted = (logits.double() / temperature).softmax(dim=1).max(dim=1)
    return binned(sure, predicted == labels, bins)


def binned(sure: Tensor, right: Tensor, bins: int = 15) -> list[Bin]:
    """The same from the probability of each prediction (N), and whether it was right (N)."""
    sure, right = sure.double(), right.double()
    number = (sure * bins).ceil().clamp(1, bins) - 1  # each range holds its upper end
    found = []
    for inside in (number == n for n in range(bins)):
        if count := int(inside.sum()):
            found.append(
                Bin(
                    confidence=float(sure[inside].mean()),
                    accuracy=float(right[inside].mean()),
                    count=count,
                )
            )
    return found


def calibration_error(curve: list[Bin]) -> float:
    """How far confidence and accuracy lie apart on average: ECE (Naeini et al., 2015)."""
    total = sum(bin.count for bin in curve)
    return sum(bin.count * abs(bin.confidence - bin.accuracy) for bin in curve) / total


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """What to divide logits by for the least log-loss (Guo et al., 2017); from validation data.

    One imagined image more, of any class alike, keeps a faultless validation from certainty.
    """
    scores = logits.double()
    imagined = scores.sort(dim=1).values.mean(dim=0, keepdim=True)
    wanted = scores.gather(1, labels[:, None]).sum() + imagined.mean()
    scores = torch.cat([scores, imagined])

    def slope(sharpness: float) -> float:  # of the log-loss, which is convex in 1 / temperature
        expected = ((scores * sharpness).softmax(dim=1) * scores).sum()
        return float(expected - wanted)

    low, high = math.log(1e-3), math.log(1e3)
    for _ in range(60):
        middle = (low + high) / 2
        steep = slope(math.exp(middle))
        low, high = (middle if steep <= 0 else low), (middle if steep >= 0 else high)
    return math.exp(-(low + high) / 2)


@dataclass(frozen=True, kw_only=True)
class Mistake:
    index: int  # of the image
    label: int
    predicted: int
    probability: float  # that the model gave to its prediction


def mistakes(logits: Tensor, labels: Tensor, most: int = 20) -> list[Mistake]:
    """The wrong predictions, the most confident first."""
    sure, predicted = logits.double().softmax(dim=1).max(dim=1)
    return surest_mistakes(sure, predicted, labels, most)


def surest_mistakes(
    sure: Tensor, predicted: Tensor, labels: Tensor, most: int = 20
) -> list[Mistake]:
    """The same from the probability of each prediction."""
    wrong = (predicted != labels).nonzero()[:, 0]
    order = wrong[sure[wrong].argsort(descending=True, stable=True)][:most]
    return [
        Mistake(
            index=int(i),
            label=int(labels[i]),
            predicted=int(predicted[i]),
            probability=float(sure[i]),
        )
        for i in order
    ]


def mcnemar(one: Tensor, other: Tensor, labels: Tensor) -> float:
    """Chance that two equally good models differ so much on the same images (McNemar, 1947).

    Exact and two-sided, from the predictions of both; only images that one of them gets right tell.
    """
    right, also = one == labels, other == labels
    first, second = int((right & ~also).sum()), int((~right & also).sum())
    told = first + second
    term = tail = 1  # `told` over k, and its sum up to the smaller count
    for k in range(min(first, second)):
        term = term * (told - k) // (k + 1)
        tail += term
    return min(1.0, tail / (1 << told) * 2)
