"""A classifier on top of features: what it says of them, and all that it needs to be used again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.errors import UserError
from vitrail.evaluation.metrics import fit_temperature
from vitrail.heads.features import Examples, Features

LEAST = 1e-12  # a probability of 0 would have no logarithm


@dataclass(frozen=True, kw_only=True)
class Head:
    kind: str
    estimator: Any  # fitted, as scikit-learn has them
    classes: tuple[str, ...]
    features: Features
    width: int  # of a row of features
    weights: str  # checksum of the model whose features it knows
    view: Mapping[str, Any]  # and how that model saw images
    data: Mapping[str, Any] = field(default_factory=dict)  # name, source, columns, fingerprint
    temperature: float | None = None  # fitted on validation images; None without any

    def scores(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits, one column for each class: their softmax is the estimator's own probability.

        Where it has none, margins take its place, at the temperature of the validation images.
        """
        if x.ndim != 2 or x.shape[1] != self.width:
            raise UserError(f"features of shape {x.shape} came; this head reads {self.width}")
        found = spread(self.estimator, raw(self.estimator, x), len(self.classes))
        if not has_probabilities(self.estimator):
            found = found / (self.temperature or 1.0)
        return found.astype(np.float32)

    def accuracy(self, examples: Examples) -> float:
        return float((self.scores(examples.x).argmax(axis=1) == examples.y).mean())


def has_probabilities(estimator: Any) -> bool:
    return hasattr(estimator, "predict_proba")


def raw(estimator: Any, x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities, margins, or the bare answer: the best that the estimator can say."""
    if has_probabilities(estimator):
        found: NDArray[np.float64] = np.log(np.maximum(estimator.predict_proba(x), LEAST))
        return found
    if hasattr(estimator, "decision_function"):
        margins = np.asarray(estimator.decision_function(x), np.float64)
        if margins.ndim == 1:  # of two classes the second one's
            margins = np.stack([-margins / 2, margins / 2], axis=1)
        if margins.shape[1] == len(estimator.classes_) and not in_pairs(estimator):
            return margins
    said = np.asarray(estimator.predict(x))[:, None] == estimator.classes_[None]
    return np.log(np.where(said, 1.0, LEAST))


def in_pairs(estimator: Any) -> bool:
    """Whether margins are between two classes each, as those of SVC may be, here or deep inside."""
    settings = estimator.get_params().items()
    asked = [value for name, value in settings if name.endswith("decision_function_shape")]
    return "ovo" in asked and len(estimator.classes_) > 2


def spread(estimator: Any, scores: NDArray[np.float64], classes: int) -> NDArray[np.float64]:
    """Columns for all classes; those that the estimator never saw are the least likely."""
    known = np.asarray(estimator.classes_, np.int64)
    if len(known) == classes:
        return scores
    low = min(np.log(LEAST), float(scores.min(initial=0.0)) - 1)
    found = np.full((len(scores), classes), low)
    found[:, known] = scores
    return found


def heat(estimator: Any, classes: int, held_out: Examples) -> float | None:
    """The temperature that suits images which the head did not learn from."""
    if not len(held_out):
        return None
    scores = spread(estimator, raw(estimator, held_out.x), classes)
    return fit_temperature(torch.from_numpy(scores), torch.from_numpy(held_out.y))
