"""Scores of a multi-label classifier on labelled images."""

from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.display.text import format_count, truncate
from vitrail.evaluation import metrics, multi_label
from vitrail.evaluation.conformal import SetQuality
from vitrail.evaluation.multi_label import LabelScore, PlattScaling
from vitrail.zoo.metadata import MultiLabel

NAME_LENGTH = 22  # characters of a class name in the repr
WORST_CLASSES = 10  # in the repr and in notebooks


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MultiLabelEvaluation:
    """mAP, F1 and calibration of a classifier on images with any number of labels.

    Probabilities are calibrated class by class, unless `raw=True` asked for plain sigmoids; labels
    are predicted from the thresholds that were chosen on validation data.
    """

    images: int
    split: str
    map: float  # mean average precision over the classes that occur
    micro_f1: float  # over all pairs of an image and a label
    macro_f1: float  # mean over the classes that occur
    accuracy: float  # exact match: fraction of images all of whose labels are right
    interval: tuple[float, float]  # 95 % confidence interval of the exact match (Wilson)
    log_loss: float  # mean binary cross-entropy, in nats
    ece: float  # expected calibration error over all pairs of an image and a label
    per_class: dict[str, LabelScore]
    classes: tuple[str, ...]
    cooccurrence: NDArray[np.int64]  # images with the row's label predicted to have the column's
    sets: SetQuality | None = None  # coverage and size of prediction sets; None: not calibrated

    def to_dict(self) -> dict[str, Any]:
        """The document that `vitrail evaluate --json` prints."""
        return {
            "images": self.images,
            "split": self.split,
            "labels": "multi",
            "map": self.map,
            "micro_f1": self.micro_f1,
            "macro_f1": self.macro_f1,
            "accuracy": self.accuracy,
            "interval": list(self.interval),
            "log_loss": self.log_loss,
            "ece": self.ece,
            "per_class": {name: asdict(score) for name, score in self.per_class.items()},
            "classes": list(self.classes),
            "cooccurrence": self.cooccurrence.tolist(),
            "trust": {"sets": asdict(self.sets) if self.sets else None},
        }

    @property
    def worst_classes(self) -> list[tuple[str, LabelScore]]:
        """The classes that have images, sorted by F1, lowest first."""
        present = [(name, score) for name, score in self.per_class.items() if score.count]
        return sorted(present, key=lambda pair: pair[1].f1)

    def summary(self) -> list[tuple[str, str]]:
        """The scores, each with its name."""
        low, high = self.interval
        return [
            ("mean average precision", f"{self.map:.3f}"),
            ("micro F1", f"{self.micro_f1:.3f}"),
            ("macro F1", f"{self.macro_f1:.3f}"),
            ("exact match", f"{self.accuracy:.1%} (95 % interval {low:.1%} to {high:.1%})"),
            ("log-loss", f"{self.log_loss:.3f}"),
            ("calibration error (ECE)", f"{self.ece:.3f}"),
        ]

    def __repr__(self) -> str:
        lines = [f"MultiLabelEvaluation on {format_count(self.images, 'image')} ({self.split})"]
        lines += [f"  {name:<24} {value}" for name, value in self.summary()]
        lines.append(f"  {'lowest F1':<24} precision  recall     F1  threshold  images")
        for name, one in self.worst_classes[:WORST_CLASSES]:
            scores = f"{one.precision:9.3f}  {one.recall:6.3f}  {one.f1:5.3f}"
            scores += f"  {one.threshold:9.3f}  {one.count:6}"
            lines.append(f"    {truncate(name, NAME_LENGTH):<22} {scores}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in self.summary()
        )
        classes = "".join(
            f"<tr><td>{escape(name)}</td><td>{one.f1:.3f}</td><td>{one.count:,}</td></tr>"
            for name, one in self.worst_classes[:WORST_CLASSES]
        )
        header = "<tr><th>class</th><th>F1</th><th>images</th></tr>"
        return f"<table>{rows}</table><table>{header}{classes}</table>"


def score_multi_label(
    logits: Tensor,
    labels: Tensor,
    classes: tuple[str, ...],
    labelling: MultiLabel,
    split: str,
    raw: bool = False,
) -> MultiLabelEvaluation:
    """All scores, from logits (N, K) and labels (N, K)."""
    scaling = PlattScaling(slopes=labelling.slopes, intercepts=labelling.intercepts)
    calibrated = scaling.probabilities(logits)
    probabilities = logits.double().sigmoid() if raw else calibrated
    predicted = multi_label.predict_labels(calibrated, labelling.thresholds)
    scores = multi_label.score_labels(calibrated, labels, labelling.thresholds)
    exact = multi_label.exact_match(predicted, labels)
    return MultiLabelEvaluation(
        images=len(labels),
        split=split,
        map=multi_label.mean_average_precision(logits, labels),
        micro_f1=multi_label.micro_f1(predicted, labels),
        macro_f1=multi_label.macro_f1(scores),
        accuracy=exact,
        interval=metrics.wilson_interval(exact, len(labels)),
        log_loss=multi_label.binary_log_loss(torch.logit(probabilities, eps=1e-12), labels),
        ece=multi_label.expected_calibration_error(probabilities, labels),
        per_class=dict(zip(classes, scores, strict=True)),
        classes=classes,
        cooccurrence=multi_label.cooccurrence(labels, predicted).long().numpy(),
    )


def fit_labelling(logits: Tensor, labels: Tensor) -> MultiLabel:
    """Calibration and thresholds of each class, from validation data."""
    scaling = multi_label.fit_platt(logits, labels)
    thresholds = multi_label.choose_thresholds(scaling.probabilities(logits), labels)
    return MultiLabel(thresholds=thresholds, slopes=scaling.slopes, intercepts=scaling.intercepts)
