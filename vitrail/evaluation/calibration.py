"""What a model file holds about how far its answers can be trusted, from validation images."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.evaluation.conformal import (
    Conformal,
    fit_conformal,
)
from vitrail.evaluation.odd import Neighbours, fit_neighbours
from vitrail.evaluation.selective import (
    RiskCurve,
    fit_risk_curve,
    log_odds,
)

DEFAULT_COVERAGE = 0.95
DEFAULT_ABSTAIN = 0.01


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Prediction sets, abstention and odd images; each None if it could not be calibrated."""

    images: int  # validation images
    data: str  # name of the data set
    sets: Conformal | None = None
    risk: RiskCurve | None = None
    neighbours: Neighbours | None = None

    def to_dict(self) -> dict[str, Any]:
        """The entry `calibration` of the metadata."""
        return asdict(self)


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
    train_features: NDArray[Any] | None,
    val_features: NDArray[Any] | None,
) -> Calibration:
    """Calibrates on validation images; features are those of training and validation images."""
    neighbours = None
    if train_features is not None and val_features is not None:
        neighbours = fit_neighbours(train_features, val_features)
    confidence = log_odds(logits / (temperature or 1.0))
    return Calibration(
        images=len(labels),
        data=data,
        sets=fit_conformal(softmax(logits, temperature), labels),
        risk=fit_risk_curve(confidence, logits.argmax(axis=1) == labels),
        neighbours=neighbours,
    )
