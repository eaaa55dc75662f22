"""Logistic regression in torch, its penalty chosen by cross-validation: a head for any width."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.training.optim import LBFGS

PENALTIES = (0.3, 0.1, 0.03, 0.01, 0.003)  # on the squared weights of standardised features
FOLDS = 3
ITERATIONS = 40  # of L-BFGS for each penalty; the next one starts where this one ended
CV_IMAGES = 2000  # that cross-validation uses, at most; the final fit uses all
TINY = 1e-6  # added to standard deviations, for constant features


@dataclass(frozen=True, kw_only=True, eq=False)
class LogisticFit:
    weight: Tensor  # (classes, features), for features as they are
    bias: Tensor  # (classes,)
    penalty: float
    accuracy: float  # of cross-validation
    images: int  # in cross-validation


def fit_logistic(
    x: Tensor, labels: Tensor, classes: int, class_weights: Tensor | None = None
) -> LogisticFit:
    """Fits weights and bias to features (images, features); deterministic, no random numbers."""
    mean, deviation = x.mean(dim=0), x.std(dim=0, correction=0) + TINY
    standard = (x - mean) / deviation
    sample = torch.linspace(0, len(x) - 1, min(CV_IMAGES, len(x))).round().long()
    losses, correct = cross_validate(standard[sample], labels[sample], classes, class_weights)
    best = int(losses.argmin())
    weight, bias = torch.zeros(classes, x.shape[1]), torch.zeros(classes)
    for penalty in PENALTIES[: best + 1]:
        weight, bias = minimise(standard, labels, penalty, weight, bias, class_weights)
    weight = weight / deviation
    return LogisticFit(
        weight=weight,
        bias=bias - weight @ mean,
        penalty=PENALTIES[best],
        accuracy=float(correct[best]) / len(sample),
        images=len(sample),
    )


def estimate_fit_seconds(images: int, features: int, classes: int) -> float:
    """About how long a fit takes: times one minimisation of cross-validation, on random numbers."""
    sample = min(CV_IMAGES, images)
    x = torch.randn(sample, features, generator=torch.Generator().manual_seed(0))
    start = torch.zeros(classes, features), torch.zeros(classes)
    times = []
    for _ in range(2):  # the first one also allocates memory
        began = time.perf_counter()
        minimise(x, torch.arange(sample) % classes, PENALTIES[0], *start, None)
        times.append(time.perf_counter() - began)
    # each fold is fitted on the others, and the last fit is on all images
    return min(times) * len(PENALTIES) * (FOLDS - 1 + images / sample)


def cross_validate(
    x: Tensor, labels: Tensor, classes: int, class_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """For each penalty, the summed loss and the number of correct images, none seen by its fit."""
    losses, correct = torch.zeros(len(PENALTIES)), torch.zeros(len(PENALTIES))
    fold_of = assign_folds(labels)
    for fold in range(FOLDS):
        held = fold_of == fold
        if held.all() or not held.any():
            continue
        weight, bias = torch.zeros(classes, x.shape[1]), torch.zeros(classes)
        for number, penalty in enumerate(PENALTIES):
            weight, bias = minimise(x[~held], labels[~held], penalty, weight, bias, class_weights)
            logits = x[held] @ weight.T + bias
            losses[number] += F.cross_entropy(logits, labels[held], reduction="sum")
            correct[number] += (logits.argmax(dim=1) == labels[held]).sum()
    return losses, correct


def assign_folds(labels: Tensor) -> Tensor:
    """A fold for each image, every class in every fold if it has enough images."""
    order = labels.argsort(stable=True)
    folds = torch.empty_like(labels)
    folds[order] = torch.arange(len(labels)) % FOLDS
    return folds


def minimise(
    x: Tensor,
    labels: Tensor,
    penalty: float,
    weight: Tensor,
    bias: Tensor,
    class_weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy plus penalty / 2 times the squared weights, by L-BFGS from a start."""
    weight, bias = (tensor.clone().requires_grad_() for tensor in (weight, bias))
    optimizer: torch.optim.LBFGS = LBFGS(
        [weight, bias], max_iter=ITERATIONS, tolerance_grad=1e-5, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight.T + bias, labels, weight=class_weights)
        loss = loss + penalty / 2 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    return weight.detach(), bias.detach()
