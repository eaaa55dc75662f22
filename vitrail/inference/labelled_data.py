"""Opens labelled images with the classes of a model, and chooses their split. Free of torch."""

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vitrail.data.config import Columns, LabelKind
from vitrail.data.open import (
    DEFAULT_COLUMNS,
    has_columns,
    make_columns,
    open_data,
    resolve_data,
)
from vitrail.data.source import (
    EvaluationSplit,
    Source,
    count_labels,
    fingerprint,
    is_multi_label,
    split_indices,
)
from vitrail.errors import UserError
from vitrail.inference.predictor import Predictor

log = logging.getLogger(__name__)


def open_evaluation_data(
    predictor: Predictor,
    data: str | Path | Source,
    split: EvaluationSplit | None,
    columns: Mapping[str, str] | None = None,
) -> tuple[Source, EvaluationSplit]:
    """Opens data with the predictor's classes, and chooses the split to evaluate.

    For the training data, even if it was moved, the default is its test split. For other data it
    is the test split if the data has one, else all images; a warning says if these may include
    training images. A table's columns have the names used in training, except those in `columns`.
    """
    trained = predictor.training_data
    checksum = trained.fingerprint
    source, is_training_data = open_with_classes(predictor, data, columns)
    if split is None:
        held_out = len(split_indices(source, "test"))
        split = "test" if 0 < held_out < len(source) or is_training_data else "all"
        changed = fingerprint(source) != checksum if is_training_data else split == "all"
        if checksum and changed and has_all_classes(source):
            log.warning(
                f"{source.name} has the classes of the training data but differs from it: "
                f"some of these images may be training images, which would raise the accuracy"
            )
    if not len(split_indices(source, split)):
        raise UserError(f"{source.name} has no {split} images; choose another `split`")
    return source, split


def open_with_classes(
    predictor: Predictor, data: str | Path | Source, columns: Mapping[str, str] | None
) -> tuple[Source, bool]:
    """The data, and whether it is the data that the predictor was trained on."""
    trained = predictor.training_data
    checksum = trained.fingerprint
    if not isinstance(data, str | Path):
        if tuple(data.classes) != predictor.classes:
            raise UserError(
                f"the classes of {data.name} are not those of the model; "
                f"open the data with `classes=classifier.classes`, or give its path"
            )
        return data, checksum is not None and fingerprint(data) == checksum
    names = DEFAULT_COLUMNS
    wanted = make_columns({**trained.columns, **(columns or {})})
    if columns or (wanted != DEFAULT_COLUMNS and has_columns(data, wanted)):
        names = wanted
    is_training_data = trained.source == resolve_data(data)
    labels: LabelKind | None = "multi" if predictor.multi_label is not None else None
    source = open_data(
        data, columns=names, classes=predictor.classes, labels=labels, split=is_training_data
    )
    if not is_training_data and (moved := _open_moved_data(source, data, names, checksum)):
        return moved, True
    return source, is_training_data


def has_all_classes(source: Source) -> bool:
    """Whether every class has an image."""
    return bool(count_labels(source, np.arange(len(source))).all())


def _open_moved_data(
    source: Source, data: str | Path, columns: Columns, checksum: str | None
) -> Source | None:
    """The training data with its splits, if the source has its checksum; else None."""
    if checksum is None or not has_all_classes(source):
        return None
    try:
        labels: LabelKind | None = "multi" if is_multi_label(source) else None
        moved = open_data(data, columns=columns, labels=labels)
    except UserError:  # too few images to be split
        return None
    return moved if fingerprint(moved) == checksum else None
