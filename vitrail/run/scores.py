"""A classifier judged on a data set: every number that `vitrail evaluate` tells."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from vitrail.data.config import Columns, DataConfig
from vitrail.data.loader import Loader
from vitrail.data.open import TABLES, USUAL, address, open_data
from vitrail.data.source import Source, Split, fingerprint, indices
from vitrail.errors import UserError
from vitrail.evaluation import metrics
from vitrail.evaluation.loop import logits
from vitrail.run.classifier import Classifier
from vitrail.run.recipe import build
from vitrail.training.learner import computed_in

log = logging.getLogger(__name__)

Part = Literal["train", "val", "test", "all"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


def open_for(
    classifier: Classifier,
    data: str | Path,
    part: Part | None,
    columns: Mapping[str, str] | None = None,
) -> tuple[Source, Part]:
    """The data with the model's classes, and the part of it to judge.

    Of the data a run was trained on, wherever it lies now, that is its test split. Of other data
    it is the test split where one is given, else all; if these may be images that the model was
    trained on, a line says so. The columns of a table are called as they were in training, but for
    those that `columns` names.
    """
    own = classifier.facts.get("data", {})
    called = USUAL
    if columns or Path(data).suffix.lower() in TABLES:
        called = build(Columns, {**own.get("columns", {}), **(columns or {})}, "data.columns.")
    known = own.get("source") == address(data)
    source = open_data(data, columns=called, classes=classifier.classes, split=known)
    checksum = own.get("fingerprint")
    if not known and (moved := moved_here(source, data, called, checksum)):
        known, source = True, moved
    if part is None:
        held_out = len(indices(source, "test"))
        part = "test" if 0 < held_out < len(source) or known else "all"
        changed = fingerprint(source) != checksum if known else part == "all"
        if checksum and changed and len(np.unique(source.labels)) == len(source.classes):
            log.warning(
                f"{source.name} has the classes that the model was trained on, but is not that "
                f"data, or was changed since: images it learned from may be among these"
            )
    if not len(indices(source, part)):
        raise UserError(f"{source.name} has no {part} images; choose another --split")
    return source, part


def moved_here(
    source: Source, data: str | Path, columns: Columns, checksum: str | None
) -> Source | None:
    """The data of this checksum with its splits, if that is what the source holds."""
    if checksum is None or len(np.unique(source.labels)) < len(source.classes):
        return None
    try:
        found = open_data(data, columns=columns)
    except UserError:  # too few images to be split
        return None
    return found if fingerprint(found) == checksum else None


def evaluate(
    classifier: Classifier,
    source: Source,
    part: Part,
    *,
    batch: int = 64,
    skip_broken: bool = False,
    progress: Callable[[int], None] = lambda images: None,
) -> dict[str, Any]:
    """The numbers and the most confident mistakes, as `--json` prints them."""
    outputs, labels, ids = outputs_of(classifier, source, part, batch, skip_broken, progress)
    rate = metrics.accuracy(outputs, labels)
    confusion = metrics.confusion(outputs.argmax(dim=1), labels, len(classifier.classes))
    scores = metrics.per_class(confusion)
    return {
        "images": len(labels),
        "split": part,
        "accuracy": rate,
        "interval": list(metrics.interval(rate, len(labels))),
        "top5": metrics.accuracy(outputs, labels, top=5),
        "log_loss": metrics.log_loss(outputs, labels),
        "ece": metrics.calibration_error(metrics.reliability(outputs, labels)),
        "temperature": classifier.temperature,
        "per_class": {
            name: asdict(score) for name, score in zip(classifier.classes, scores, strict=True)
        },
        "classes": list(classifier.classes),
        "confusion": confusion.tolist(),
        "mistakes": [
            {
                "path": ids[mistake.index],
                "label": classifier.classes[mistake.label],
                "predicted": classifier.classes[mistake.predicted],
                "probability": mistake.probability,
            }
            for mistake in metrics.mistakes(outputs, labels)
        ],
    }


def outputs_of(
    classifier: Classifier,
    source: Source,
    part: Part,
    batch: int,
    skip_broken: bool,
    progress: Callable[[int], None],
) -> tuple[Tensor, Tensor, list[str]]:
    """Logits, labels and names of all images of a part, each once."""
    config = DataConfig(skip_broken=skip_broken, disk_gb=0)
    loader = Loader(source, classifier.view, config, batch=batch, device=classifier.device)
    wanted = [split for split in SPLITS if part in ("all", split) and len(indices(source, split))]
    loader.prepare(*wanted, training=False)
    ids: list[str] = []

    def pairs() -> Any:
        for split in wanted:
            for each in loader.evaluation(split, batch):
                ids.extend(source.ids[item] for item in each.items.tolist())
                yield each.images, each.labels

    dtype = computed_in("auto", classifier.device)
    outputs, labels = logits(classifier.answers, pairs(), dtype, progress)
    return outputs, labels, ids
