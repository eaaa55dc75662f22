"""Abstention: answer only where the model is confident enough for a promised error rate.

The confidence is the log-odds of the predicted class, which orders images as its probability does
but stays apart where probabilities round to 1.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import UserError
from vitrail.evaluation.interval import wilson_interval

MAX_POINTS = 512  # of a stored curve


@dataclass(frozen=True, kw_only=True)
class RiskCurve:
    """Errors among the most confident images, for every number of them (a risk-coverage curve)."""

    images: int
    thresholds: tuple[float, ...]  # descending: the least confidence among those answered
    answered: tuple[int, ...]  # images at or above the threshold
    errors: tuple[int, ...]  # wrong ones among them

    def __post_init__(self) -> None:
        if not len(self.thresholds) == len(self.answered) == len(self.errors):
            raise UserError(
                "a risk curve has lists of different lengths; calibrate the model again"
            )

    def threshold(self, error: float) -> float:
        """The lowest confidence for which at most this fraction of the answers is wrong.

        One more wrong answer than was seen is assumed, because a threshold chosen for few errors
        on these images makes a few more on others.
        """
        check_error_rate(error)
        counts = zip(self.thresholds, self.answered, self.errors, strict=True)
        kept = [t for t, answered, wrong in counts if wrong + 1 <= error * (answered + 1)]
        if not kept:
            raise UserError(
                f"no threshold keeps errors below {error:.3g} on the {self.images:,} validation "
                f"images of this model; give a higher `abstain`"
            )
        return kept[-1]


def check_error_rate(error: object) -> None:
    """Raises unless this is an error rate that can be promised."""
    number = isinstance(error, int | float) and not isinstance(error, bool)
    if not number or not 0 < error < 1:  # type: ignore[operator]
        raise UserError(
            f"`abstain` is {error!r}; give the highest error rate of the answers, such as 0.01"
        )


def log_odds(logits: NDArray[Any]) -> NDArray[np.float64]:
    """The log-odds of the predicted class, (N)."""
    ordered = np.sort(np.asarray(logits, np.float64), axis=1)[:, ::-1]
    if ordered.shape[1] == 1:
        return ordered[:, 0]
    second = ordered[:, 1]
    others = second + np.log(np.exp(ordered[:, 1:] - second[:, None]).sum(axis=1))
    odds: NDArray[np.float64] = ordered[:, 0] - others
    return odds


def fit_risk_curve(
    confidence: NDArray[Any], correct: NDArray[np.bool_], points: int = MAX_POINTS
) -> RiskCurve:
    """The risk-coverage curve of validation images: of confidence (N) and correctness (N)."""
    order = np.argsort(-confidence, kind="stable")
    values, errors = confidence[order], (~correct[order]).cumsum()
    last = np.append(values[:-1] != values[1:], True)  # of equally confident images, all or none
    places = last.nonzero()[0]
    count = min(points, len(places))
    places = places[np.linspace(0, len(places) - 1, count).round().astype(int)]
    return RiskCurve(
        images=len(values),
        thresholds=tuple(float(f"{value:.7g}") for value in values[places].tolist()),
        answered=tuple((places + 1).tolist()),
        errors=tuple(errors[places].tolist()),
    )


@dataclass(frozen=True, kw_only=True)
class SelectiveQuality:
    """Abstention measured on labelled images."""

    promised: float  # the error rate that was asked for
    answered: float  # fraction of the images that get an answer
    error: float | None  # fraction of wrong ones among them; None if nothing is answered
    interval: tuple[float, float] | None  # 95 % confidence interval of the error (Wilson)


def measure_abstention(
    confidence: NDArray[Any], correct: NDArray[np.bool_], threshold: float, promised: float
) -> SelectiveQuality:
    """How many images are answered at a threshold, and how many of the answers are wrong."""
    answered = confidence >= threshold
    count = int(answered.sum())
    error = float((~correct[answered]).mean()) if count else None
    return SelectiveQuality(
        promised=promised,
        answered=count / len(confidence),
        error=error,
        interval=wilson_interval(error, count) if error is not None else None,
    )
