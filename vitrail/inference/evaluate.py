"""Accuracy and calibration of a classifier on a labelled data set."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.data.config import CorruptionScope, DataConfig
from vitrail.data.loader import Loader
from vitrail.data.open import open_data
from vitrail.data.source import SPLITS, EvaluationSplit, Source, split_indices
from vitrail.display.progress import progress_bar
from vitrail.display.text import format_accuracy, format_count, format_percent, truncate
from vitrail.errors import UserError
from vitrail.evaluation import metrics
from vitrail.evaluation.calibration import (
    DEFAULT_COVERAGE,
    TrustQuality,
    default_promise,
    measure_trust,
    softmax,
)
from vitrail.evaluation.conformal import SetQuality, in_label_sets, measure_label_sets
from vitrail.evaluation.loop import compute_logits
from vitrail.evaluation.odd import ODD, auroc
from vitrail.inference.labelled_data import open_with_classes
from vitrail.inference.multi_label_evaluation import MultiLabelEvaluation, score_multi_label
from vitrail.inference.predictor import Predictor
from vitrail.inference.robustness import Robustness, measure_robustness
from vitrail.inference.torch_predictor import TorchPredictor
from vitrail.inference.views import ViewsPredictor
from vitrail.training.learner import compute_dtype

WORST_CLASSES = 10  # in the repr and in notebooks
NAME_LENGTH = 24  # characters of a class name in the repr


@dataclass(frozen=True, kw_only=True)
class MisclassifiedImage:
    """An image whose predicted class is wrong."""

    path: str  # of the image in its data set
    label: str  # the true class
    predicted: str
    probability: float  # of the predicted class


@dataclass(frozen=True, kw_only=True)
class ForeignImages:
    """How well foreign images are distinguished from the evaluated ones."""

    data: str  # name of the foreign data set
    images: int  # of it
    auroc: float  # of the distance to the training images
    baseline: float  # AUROC of the maximum probability
    flagged: float  # fraction of the foreign images that are flagged as odd


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Evaluation:
    """Accuracy and calibration of a classifier on labelled images.

    `log_loss`, `ece` and the probabilities of `mistakes` are calibrated by the temperature of the
    model, unless `raw=True` asked for the plain softmax. Rates are fractions from 0 to 1.

    >>> evaluation = vitrail.load("runs/digits-1").evaluate("digits")
    >>> evaluation.split, evaluation.images == evaluation.confusion.sum().item()
    ('test', True)
    """

    images: int
    split: EvaluationSplit
    accuracy: float
    interval: tuple[float, float]  # 95 % confidence interval of the accuracy (Wilson)
    top5: float  # top-5 accuracy
    log_loss: float  # mean negative log-likelihood, in nats
    ece: float  # expected calibration error
    temperature: float | None  # of the model; None: not fitted
    views: int  # of each image, over which the logits were averaged
    per_class: dict[str, metrics.ClassScore]
    classes: tuple[str, ...]
    confusion: NDArray[np.int64]  # true classes are rows, predicted classes columns
    mistakes: tuple[MisclassifiedImage, ...]  # the most confident ones, in descending order
    trust: TrustQuality  # prediction sets, abstention and odd images
    corruptions: Robustness | None = None  # accuracy under corruptions, if it was asked for
    foreign: ForeignImages | None = None  # how well foreign images are detected, if requested

    def to_dict(self) -> dict[str, Any]:
        """The document that `vitrail evaluate --json` prints.

        >>> vitrail.load("runs/digits-1").evaluate("digits").to_dict()["split"]
        'test'
        """
        return {
            "images": self.images,
            "split": self.split,
            "accuracy": self.accuracy,
            "interval": list(self.interval),
            "top5": self.top5,
            "log_loss": self.log_loss,
            "ece": self.ece,
            "temperature": self.temperature,
            "views": self.views,
            "per_class": {name: asdict(score) for name, score in self.per_class.items()},
            "classes": list(self.classes),
            "confusion": self.confusion.tolist(),
            "mistakes": [asdict(mistake) for mistake in self.mistakes],
            "trust": self.trust.to_dict(),
            **({"corruptions": self.corruptions.to_dict()} if self.corruptions else {}),
            **({"foreign": asdict(self.foreign)} if self.foreign else {}),
        }

    @property
    def worst_classes(self) -> list[tuple[str, metrics.ClassScore]]:
        """The classes that have images, sorted by F1, lowest first.

        >>> name, score = vitrail.load("runs/digits-1").evaluate("digits").worst_classes[0]
        >>> score.f1 < 1
        True
        """
        present = [(name, score) for name, score in self.per_class.items() if score.count]
        return sorted(present, key=lambda pair: pair[1].f1)

    def _summary(self) -> list[tuple[str, str]]:
        temperature = "not fitted" if self.temperature is None else f"{self.temperature:.3g}"
        return [
            ("accuracy", format_accuracy(self.accuracy, self.interval)),
            ("top-5 accuracy", format_percent(self.top5)),
            ("log-loss", f"{self.log_loss:.3f}"),
            ("calibration error (ECE)", f"{self.ece:.3f}"),
            ("temperature", temperature),
            *describe_trust(self.trust),
        ]

    def _title(self) -> str:
        views = "" if self.views == 1 else f", {self.views} views of each"
        return f"Evaluation on {format_count(self.images, 'image')} ({self.split}{views})"

    def __repr__(self) -> str:
        lines = [self._title()]
        lines += [f"  {name:<24} {value}" for name, value in self._summary()]
        lines.append(f"  {'lowest F1':<24} precision  recall     F1  images")
        for name, one in self.worst_classes[:WORST_CLASSES]:
            scores = f"{one.precision:9.3f}  {one.recall:6.3f}  {one.f1:5.3f}  {one.count:6}"
            lines.append(f"    {truncate(name, NAME_LENGTH - 2):<22} {scores}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        summary = "".join(
            f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in self._summary()
        )
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{one.precision:.3f}</td><td>{one.recall:.3f}</td>"
            f"<td>{one.f1:.3f}</td><td>{one.count:,}</td></tr>"
            for name, one in self.worst_classes[:WORST_CLASSES]
        )
        header = "<th>class</th><th>precision</th><th>recall</th><th>F1</th><th>images</th>"
        return (
            f"<p>{self._title()}</p><table>{summary}</table><table><tr>{header}</tr>{rows}</table>"
        )


def describe_trust(trust: TrustQuality) -> list[tuple[str, str]]:
    """Prediction sets, abstention and odd images in words, as far as they were measured."""
    lines = []
    if (sets := trust.sets) is not None:
        lines.append(
            (
                f"sets, coverage {sets.promised:g}",
                f"{format_accuracy(sets.coverage, sets.interval)}, mean size {sets.mean_size:.2f}",
            )
        )
    if (answers := trust.abstention) is not None:
        error = "none" if answers.error is None else format_percent(answers.error)
        lines.append(
            (
                f"answers, error {answers.promised:g}",
                f"{format_percent(answers.answered)} answered, error {error}",
            )
        )
    if trust.odd is not None:
        lines.append(("odd images", format_percent(trust.odd)))
    return lines


def evaluate(
    predictor: Predictor,
    source: Source,
    split: EvaluationSplit,
    *,
    batch: int = 64,
    skip_broken: bool = False,
    raw: bool = False,
    coverage: float | None = None,
    abstain: float | None = None,
    corruptions: CorruptionScope | None = None,
    foreign: str | Path | Source | None = None,
) -> Evaluation | MultiLabelEvaluation:
    """Measures a predictor on one split of a data set with the predictor's classes."""
    check_scope(corruptions)
    predictor.promise(coverage, abstain)  # raises before any image is read
    if predictor.multi_label is not None and (corruptions or foreign is not None):
        name = "corruptions" if corruptions else "foreign"
        raise UserError(f"`{name}` is for models with one class per image; leave it out")
    if isinstance(predictor, ViewsPredictor) and foreign is not None:
        raise UserError("`foreign` is measured on single images; omit `views` or `foreign`")
    with progress_bar("evaluating", len(split_indices(source, split))) as advance:
        outputs, labels, ids = compute_split_outputs(
            predictor, source, split, batch, skip_broken, advance
        )
    classes = predictor.classes
    logits = outputs[:, : len(classes)]
    if predictor.multi_label is not None:
        result = score_multi_label(logits, labels, classes, predictor.multi_label, split, raw)
        return replace(result, sets=measure_label_promise(predictor, logits, labels, coverage))
    temperature = 1.0 if raw or predictor.temperature is None else predictor.temperature
    predicted = logits.argmax(dim=1)
    confidence = metrics.calibrated_softmax(logits, temperature).amax(dim=1)
    confusion = metrics.confusion_matrix(predicted, labels, len(classes))
    accuracy = metrics.accuracy(logits, labels)
    return Evaluation(
        images=len(labels),
        split=split,
        accuracy=accuracy,
        interval=metrics.wilson_interval(accuracy, len(labels)),
        top5=metrics.accuracy(logits, labels, top=5),
        log_loss=metrics.log_loss(logits, labels, temperature),
        ece=metrics.calibration_error(metrics.reliability_diagram(logits, labels, temperature)),
        temperature=predictor.temperature,
        views=predictor.views if isinstance(predictor, ViewsPredictor) else 1,
        per_class=dict(zip(classes, metrics.score_classes(confusion), strict=True)),
        classes=classes,
        confusion=confusion.numpy(),
        mistakes=tuple(
            MisclassifiedImage(
                path=ids[error.index],
                label=classes[error.label],
                predicted=classes[error.predicted],
                probability=error.probability,
            )
            for error in metrics.most_confident_errors(confidence, predicted, labels)
        ),
        trust=measure_trust(
            predictor.calibration,
            outputs.numpy(),
            labels.numpy(),
            predictor.temperature,
            classes,
            coverage,
            abstain,
        ),
        corruptions=measure_robustness(predictor, source, split, corruptions)
        if corruptions
        else None,
        foreign=None
        if foreign is None
        else tell_foreign(predictor, outputs.numpy(), foreign, batch),
    )


def compute_validation_logits(predictor: Predictor) -> tuple[Tensor, Tensor]:
    """Logits and labels of the validation images of the data that the predictor was trained on.

    Images that cannot be read are skipped, and logged.
    """
    trained = predictor.training_data
    if trained.source is None:
        raise UserError("the model does not name the data it was trained on")
    source, is_training_data = open_with_classes(predictor, trained.source, None)
    if not is_training_data or not len(split_indices(source, "val")):
        raise UserError(f"{trained.source} has no validation images")
    with progress_bar("calibrating", len(split_indices(source, "val"))) as advance:
        outputs, labels, _ = compute_split_outputs(predictor, source, "val", 64, True, advance)
    return outputs[:, : len(predictor.classes)], labels


def measure_label_promise(
    predictor: Predictor, logits: Tensor, labels: Tensor, coverage: float | None
) -> SetQuality | None:
    """The coverage of prediction sets of images with any number of labels."""
    count = len(predictor.classes)
    if coverage is None:
        promise = default_promise(predictor.calibration, count, DEFAULT_COVERAGE, None)
    else:
        promise = predictor.promise(coverage)
    if promise.sets is None or promise.coverage is None:
        return None
    members = in_label_sets(predictor.softmax(logits.numpy(), raw=False), promise.sets)
    return measure_label_sets(members, labels.numpy(), promise.coverage, predictor.classes)


def tell_foreign(
    predictor: Predictor, known: NDArray[Any], foreign: str | Path | Source, batch: int
) -> ForeignImages:
    """Measures how well foreign images are distinguished from the evaluated ones."""
    neighbours = predictor.calibration.neighbours if predictor.calibration else None
    if neighbours is None:
        raise UserError(
            "this model file holds no features of training images to tell odd ones by; "
            "add them with `vitrail calibrate MODEL DATA`"
        )
    source = foreign
    if isinstance(source, str | Path):
        source = open_data(source, split=False, labels="none")
    split: EvaluationSplit = "test" if len(split_indices(source, "test")) else "all"
    with progress_bar("foreign images", len(split_indices(source, split))) as advance:
        outputs, _, _ = compute_split_outputs(predictor, source, split, batch, True, advance)
    rows, count = outputs.numpy(), len(predictor.classes)
    oddness = [neighbours.measure(one) for one in (known, rows)]
    doubts = [-softmax(one[:, :count], predictor.temperature).max(axis=1) for one in (known, rows)]
    return ForeignImages(
        data=source.name,
        images=len(rows),
        auroc=auroc(oddness[0], oddness[1]),
        baseline=auroc(doubts[0], doubts[1]),
        flagged=float((neighbours.p_values(rows) < ODD).mean()),
    )


def check_scope(corruptions: object) -> None:
    """Raises unless this is a scope of `measure_robustness`, or None."""
    if corruptions not in (None, *get_args(CorruptionScope)):
        raise UserError(f"`corruptions` is {corruptions!r}; give 'quick' or 'full'")


def compute_split_outputs(
    predictor: Predictor,
    source: Source,
    split: EvaluationSplit,
    batch: int,
    skip_broken: bool,
    progress: Callable[[int], None],
) -> tuple[Tensor, Tensor, list[str]]:
    """Logits with features, if any, labels and ids of all images of a split."""
    config = DataConfig(skip_broken=skip_broken, disk_gb=0)
    network, device = module_of(predictor)
    loader = Loader(source, predictor.preprocess, config, batch=batch, device=device)
    splits = [one for one in SPLITS if split in ("all", one) and len(split_indices(source, one))]
    loader.prepare(*splits, training=False)
    ids: list[str] = []

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for one in splits:
            for loaded in loader.evaluation(one, batch):
                ids.extend(source.ids[item] for item in loaded.items.tolist())
                yield loaded.images, loaded.labels

    dtype = compute_dtype("auto", device)
    logits, labels = compute_logits(network, pairs(), dtype, progress)
    return logits, labels, ids


class EngineModule(nn.Module):
    """Another engine as a module: preprocessed images in, logits out."""

    def __init__(self, predictor: Predictor):
        super().__init__()
        self.predictor = predictor

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.predictor.outputs(x.numpy()))


def module_of(predictor: Predictor) -> tuple[nn.Module, torch.device]:
    """The module that computes the logits, and its device."""
    if isinstance(predictor, TorchPredictor):
        known = predictor.calibration is not None and predictor.calibration.neighbours is not None
        network = predictor.network_with_features if known else predictor.network
        return network, predictor.device
    return EngineModule(predictor), torch.device("cpu")
