"""What a model file holds about how far its answers can be trusted, from validation images."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import UserError
from vitrail.evaluation.conformal import (
    Conformal,
    SetQuality,
    check_coverage,
    fit_conformal,
    in_sets,
    measure_sets,
)
from vitrail.evaluation.odd import ODD, Neighbours, fit_neighbours
from vitrail.evaluation.selective import (
    RiskCurve,
    SelectiveQuality,
    check_error_rate,
    fit_risk_curve,
    log_odds,
    measure_abstention,
)

DEFAULT_COVERAGE, DEFAULT_ABSTAIN = 0.95, 0.01  # measured if nothing else is asked for
CONFIDENCE_POINTS = 501  # quantiles of the confidence that are stored
CURVE_POINTS = 100  # of a risk-coverage curve on test images


@dataclass(frozen=True, kw_only=True)
class ValidationReference:
    """What `vitrail monitor` compares new predictions with."""

    shares: tuple[float, ...]  # of each predicted class
    confidence: tuple[float, ...]  # quantiles of the probability of the predicted class


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Prediction sets, abstention and odd images; each None if it could not be calibrated."""

    images: int  # validation images
    data: str  # name of the data set
    sets: Conformal | None = None
    risk: RiskCurve | None = None
    neighbours: Neighbours | None = None
    reference: ValidationReference | None = None

    def to_dict(self) -> dict[str, Any]:
        """The entry `calibration` of the metadata."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Promise:
    """What a caller asked of predictions, as thresholds of a model."""

    coverage: float | None = None
    sets: NDArray[np.float64] | None = None  # the threshold of each class
    abstain: float | None = None
    confidence: float | None = None  # log-odds below which nothing is answered


def make_promise(
    calibration: Calibration | None, classes: int, coverage: float | None, abstain: float | None
) -> Promise:
    """The thresholds for a coverage and an error rate; raises if the model cannot promise them."""
    if coverage is not None:
        check_coverage(coverage)
    if abstain is not None:
        check_error_rate(abstain)
    sets = risk = None
    if coverage is not None or abstain is not None:
        missing = calibration is None or (coverage is not None and calibration.sets is None)
        if abstain is not None and calibration is not None and calibration.risk is None:
            raise UserError("`abstain` is for models with one class per image; use `coverage`")
        if missing or calibration is None:
            raise UserError(
                "this model file holds no results of validation images, which a promise needs; "
                "store them once with `vitrail calibrate MODEL DATA`, or give labelled images to "
                "`vitrail predict --data DATA`"
            )
        sets, risk = calibration.sets, calibration.risk
    return Promise(
        coverage=coverage,
        sets=sets.thresholds(coverage, classes) if sets and coverage is not None else None,
        abstain=abstain,
        confidence=risk.threshold(abstain) if risk and abstain is not None else None,
    )


def default_promise(
    calibration: Calibration | None, classes: int, coverage: float | None, abstain: float | None
) -> Promise:
    """The thresholds of a default, which nobody asked for: none if it cannot be promised."""
    try:
        return make_promise(calibration, classes, coverage, abstain)
    except UserError:
        return Promise()


def softmax(logits: NDArray[Any], temperature: float | None) -> NDArray[np.float64]:
    """Calibrated probabilities; None means temperature 1."""
    values = np.asarray(logits, np.float64) / (temperature or 1.0)
    exponentials = np.exp(values - values.max(axis=1, keepdims=True))
    probabilities: NDArray[np.float64] = exponentials / exponentials.sum(axis=1, keepdims=True)
    return probabilities


def fit_calibration(
    logits: NDArray[Any],
    labels: NDArray[Any],
    temperature: float | None,
    data: str,
    train: NDArray[Any] | None,
    known: NDArray[Any],
) -> Calibration:
    """Calibrates on validation images.

    `train` and `known` are logits with features: of training images, if any, and of other images
    of the same kind.
    """
    neighbours = None if train is None else fit_neighbours(train, known, logits.shape[1])
    confidence = log_odds(logits / (temperature or 1.0))
    return Calibration(
        images=len(labels),
        data=data,
        sets=fit_conformal(softmax(logits, temperature), labels),
        risk=fit_risk_curve(confidence, logits.argmax(axis=1) == labels),
        neighbours=neighbours,
        reference=describe_validation(softmax(logits, temperature)),
    )


def describe_validation(probabilities: NDArray[np.float64]) -> ValidationReference:
    """The shares of the predicted classes, and quantiles of the confidence."""
    shares = np.bincount(probabilities.argmax(axis=1), minlength=probabilities.shape[1])
    levels = np.linspace(0, 1, CONFIDENCE_POINTS)
    confidence = np.quantile(probabilities.max(axis=1), levels)
    return ValidationReference(
        shares=tuple(float(f"{one:.5g}") for one in shares / len(probabilities)),
        confidence=tuple(float(f"{one:.6g}") for one in confidence),
    )


@dataclass(frozen=True, kw_only=True)
class TrustQuality:
    """Sets, abstention and odd images measured on labelled images; None where not calibrated."""

    sets: SetQuality | None
    abstention: SelectiveQuality | None
    odd: float | None  # fraction of these images that are flagged as odd
    risk: RiskCurve  # risk-coverage curve of these images

    def to_dict(self) -> dict[str, Any]:
        """The entry `trust` of `evaluate --json` and of metrics.json."""
        return asdict(self)


def measure_trust(
    calibration: Calibration | None,
    outputs: NDArray[Any],
    labels: NDArray[Any],
    temperature: float | None,
    classes: Sequence[str],
    coverage: float | None = None,
    abstain: float | None = None,
) -> TrustQuality:
    """Measures what a model promises; the defaults are left out where they cannot be promised.

    `outputs` are logits, followed by the features that tell odd images, if any.
    """
    count = len(classes)
    logits = outputs[:, :count]
    if coverage is None:
        sets = default_promise(calibration, count, DEFAULT_COVERAGE, None)
    else:
        sets = make_promise(calibration, count, coverage, None)
    if abstain is None:
        answers = default_promise(calibration, count, None, DEFAULT_ABSTAIN)
    else:
        answers = make_promise(calibration, count, None, abstain)
    confidence = log_odds(logits / (temperature or 1.0))
    correct = logits.argmax(axis=1) == labels
    quality = selective = odd = None
    if sets.sets is not None and sets.coverage is not None:
        members = in_sets(softmax(logits, temperature), sets.sets)
        quality = measure_sets(members, labels, sets.coverage, classes)
    if answers.confidence is not None and answers.abstain is not None:
        selective = measure_abstention(confidence, correct, answers.confidence, answers.abstain)
    neighbours = calibration.neighbours if calibration is not None else None
    if neighbours is not None and outputs.shape[1] == count + neighbours.width:
        odd = float((neighbours.p_values(outputs) < ODD).mean())
    return TrustQuality(
        sets=quality,
        abstention=selective,
        odd=odd,
        risk=fit_risk_curve(confidence, correct, CURVE_POINTS),
    )
