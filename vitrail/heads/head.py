"""A fitted head: logits from features, and everything needed to use it again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.errors import UserError
from vitrail.evaluation.metrics import fit_temperature
from vitrail.evaluation.multi_label import PlattScaling, exact_match, predict_labels
from vitrail.heads.features import Examples, Features

MIN_PROBABILITY = 1e-12  # probabilities are clipped here before their logarithm


@dataclass(frozen=True, kw_only=True)
class Head:
    """A fitted scikit-learn classifier on the features of one model.

    >>> from sklearn.linear_model import LogisticRegression
    >>> x = np.float32([[0, 0], [0, 1], [4, 4], [4, 5]])
    >>> fitted = LogisticRegression().fit(x, [0, 0, 1, 1])
    >>> head = Head(kind="logistic", estimator=fitted, classes=("cat", "dog"),
    ...             features=Features(), width=2, weights_hash="", preprocess={})
    >>> head.logits(x).argmax(axis=1)
    array([0, 0, 1, 1])
    """

    kind: str
    estimator: Any  # fitted, with scikit-learn's interface; multi-label: a list, one per label
    classes: tuple[str, ...]
    features: Features
    width: int  # number of features
    weights_hash: str  # of the model that extracts the features; see `hash_weights`
    preprocess: Mapping[str, Any]  # preprocessing of that model
    data: Mapping[str, Any] = field(default_factory=dict)  # name, source, columns, fingerprint
    temperature: float | None = None  # fitted on validation images; None if there are none
    labelling: Mapping[str, Any] | None = None  # multi-label: thresholds, slopes and intercepts

    def __repr__(self) -> str:
        names = ", ".join(self.classes[:3]) + (", ..." if len(self.classes) > 3 else "")
        return (
            f"Head(kind={self.kind!r}, classes={len(self.classes)} ({names}), "
            f"features={self.features.kind!r}, width={self.width}, "
            f"temperature={self.temperature})"
        )

    def logits(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits (images, classes) of features (images, width).

        Their softmax is the estimator's `predict_proba`, multi-label their sigmoids. An estimator
        without probabilities gives its decision function, divided by the temperature.
        """
        if x.ndim != 2 or x.shape[1] != self.width:
            raise UserError(
                f"the features have shape {x.shape}; this head expects (images, {self.width})"
            )
        if isinstance(self.estimator, list):
            pairs = [score_all_classes(one, x, 2) for one in self.estimator]
            return np.stack([pair[:, 1] - pair[:, 0] for pair in pairs], axis=1).astype(np.float32)
        scores = score_all_classes(self.estimator, x, len(self.classes))
        if not has_probabilities(self.estimator):
            scores = scores / (self.temperature or 1.0)
        return scores.astype(np.float32)

    def accuracy(self, examples: Examples) -> float:
        """Multi-label: the fraction of images all of whose labels are right."""
        logits = self.logits(examples.x)
        if self.labelling is None:
            return float((logits.argmax(axis=1) == examples.y).mean())
        scaling = PlattScaling(
            slopes=tuple(self.labelling["slopes"]), intercepts=tuple(self.labelling["intercepts"])
        )
        probabilities = scaling.probabilities(torch.from_numpy(logits))
        predicted = predict_labels(probabilities, tuple(self.labelling["thresholds"]))
        return exact_match(predicted, torch.from_numpy(examples.y))


def has_probabilities(estimator: Any) -> bool:
    return hasattr(estimator, "predict_proba")


def score_known_classes(estimator: Any, x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities, else the decision function, else one-hot predictions as logarithms.

    The columns are those of `estimator.classes_`.
    """
    if has_probabilities(estimator):
        logs: NDArray[np.float64] = np.log(np.maximum(estimator.predict_proba(x), MIN_PROBABILITY))
        return logs
    if hasattr(estimator, "decision_function"):
        margins = np.asarray(estimator.decision_function(x), np.float64)
        if margins.ndim == 1:  # with two classes, scikit-learn gives the margin of the second
            margins = np.stack([-margins / 2, margins / 2], axis=1)
        if margins.shape[1] == len(estimator.classes_) and not is_one_vs_one(estimator):
            return margins
    predicted = np.asarray(estimator.predict(x))[:, None] == estimator.classes_[None]
    return np.log(np.where(predicted, 1.0, MIN_PROBABILITY))


def is_one_vs_one(estimator: Any) -> bool:
    """Whether the margins separate pairs of classes: SVC with "ovo", also inside a pipeline."""
    settings = estimator.get_params().items()
    shapes = [value for name, value in settings if name.endswith("decision_function_shape")]
    return "ovo" in shapes and len(estimator.classes_) > 2


def score_all_classes(estimator: Any, x: NDArray[np.float32], classes: int) -> NDArray[np.float64]:
    """Scores with a column for every class; classes without training images score lowest."""
    scores = score_known_classes(estimator, x)
    known = np.asarray(estimator.classes_, np.int64)
    if len(known) == classes:
        return scores
    lowest = min(np.log(MIN_PROBABILITY), float(scores.min(initial=0.0)) - 1)
    expanded = np.full((len(scores), classes), lowest)
    expanded[:, known] = scores
    return expanded


def fit_head_temperature(estimator: Any, classes: int, held_out: Examples) -> float | None:
    """The temperature of an estimator, from images it was not fitted on; None if there are none."""
    if not len(held_out):
        return None
    scores = score_all_classes(estimator, held_out.x, classes)
    return fit_temperature(torch.from_numpy(scores), torch.from_numpy(held_out.y))
