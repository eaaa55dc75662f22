"""The metadata of a model file, decoded with every type checked, without torch."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vitrail.data.config import Preprocess
from vitrail.decoding import decode_table, parse_json
from vitrail.errors import UserError
from vitrail.evaluation.calibration import Calibration
from vitrail.model.config import ViTConfig

FORMAT_VERSION = 1
METADATA_KEY = "vitrail"  # the only key of the safetensors metadata; its value is JSON


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data that a model was trained on."""

    name: str = ""
    source: str | None = None  # path or built-in name
    columns: dict[str, str] = field(default_factory=dict)  # of a table
    fingerprint: str | None = None  # checksum of the data


@dataclass(frozen=True, kw_only=True)
class Best:
    """The evaluation whose weights are the best so far."""

    val_accuracy: float
    val_loss: float
    epoch: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Checksums:
    """The sha256 of everything in a model file, as hexadecimal numbers."""

    tensors: dict[str, str]  # of the bytes of each tensor
    document: str  # of all other entries of the metadata

    @property
    def model(self) -> str:
        """One sha256 that identifies weights and metadata."""
        lines = [f"{name} {value}\n" for name, value in sorted(self.tensors.items())]
        return hashlib.sha256("".join([*lines, self.document]).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The logits of generated images, which any machine can compute again."""

    logits: tuple[tuple[float, ...], ...]  # of each image in `zoo/reference.py`


@dataclass(frozen=True, kw_only=True)
class MultiLabel:
    """How the logits of a multi-label model become labels, class by class."""

    thresholds: tuple[float, ...]  # probability from which a label is predicted
    slopes: tuple[float, ...]  # the probability is sigmoid(slope * logit + intercept)
    intercepts: tuple[float, ...]

    def __post_init__(self) -> None:
        counts = {len(self.thresholds), len(self.slopes), len(self.intercepts)}
        numbers = (*self.thresholds, *self.slopes, *self.intercepts)
        if len(counts) > 1 or not all(map(math.isfinite, numbers)):
            raise UserError("multi_label needs a threshold, slope and intercept for each class")

    def rule(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Slope and offset of each class: its label is predicted if slope * logit + offset >= 0."""
        inside = [min(max(threshold, 1e-12), 1 - 1e-12) for threshold in self.thresholds]
        limits = [math.log(p / (1 - p)) for p in inside]
        return self.slopes, tuple(b - c for b, c in zip(self.intercepts, limits, strict=True))

    @classmethod
    def plain(cls, classes: int) -> "MultiLabel":
        """Plain sigmoids, and labels from a probability of 0.5."""
        ones = (1.0,) * classes
        return cls(thresholds=(0.5,) * classes, slopes=ones, intercepts=(0.0,) * classes)


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """What a model file says about its model.

    `document` is the JSON object in the file, with keys of other versions too. `drop` removes
    entries from both.
    """

    vit: ViTConfig | None = None  # None only for a model without a file
    name: str | None = None  # of the architecture
    classes: tuple[str, ...] | None = None  # None: unknown
    preprocess: Preprocess | None = None  # None: unknown
    data: TrainingData = field(default_factory=TrainingData)
    temperature: float | None = None  # divides logits; None: not fitted
    labels: str = "single"  # labels per image: single, or multi, any number of them
    multi_label: MultiLabel | None = None  # None: single-label, or not fitted
    best: Best | None = None
    pretraining: str | None = None  # how a backbone has learned without labels: masked or views
    environment: dict[str, Any] = field(default_factory=dict)  # versions and machine of the run
    checksums: Checksums | None = None  # None: an older version wrote the file
    reference: Reference | None = None  # None: not computed
    calibration: Calibration | None = None  # None: no validation images were at hand
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.temperature is not None and not self.temperature > 0:
            raise UserError(f"temperature is {self.temperature}; wanted a positive number or null")

    def labelling(self, classes: int) -> MultiLabel | None:
        """How logits become labels; None for a model that predicts one class per image."""
        if self.labels != "multi":
            return None
        if self.multi_label is None:
            return MultiLabel.plain(classes)
        if len(self.multi_label.thresholds) != classes:
            raise UserError(
                f"multi_label has {len(self.multi_label.thresholds)} thresholds for {classes} "
                f"classes; the file is damaged"
            )
        return self.multi_label

    def drop(self, *names: str) -> "Metadata":
        """The metadata without some entries of the document."""
        entries = {name: value for name, value in self.document.items() if name not in names}
        return decode_metadata(entries)


def parse_metadata(text: str, source: str) -> Metadata:
    """The metadata of a model file; `source` names the file in errors."""
    try:
        document = parse_json(text)
        check_version(document)
        return decode_metadata(document)
    except UserError as error:
        raise UserError(f"cannot read the metadata of {source}: {error!s:.300}") from error


def hash_document(document: Mapping[str, Any]) -> str:
    """The sha256 of all entries of the metadata except the checksums themselves."""
    entries = {name: value for name, value in document.items() if name != "checksums"}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def check_document(metadata: Metadata, source: str) -> None:
    """Raises if an entry of the metadata has changed since the file was written."""
    sums = metadata.checksums
    if sums is not None and hash_document(metadata.document) != sums.document:
        raise UserError(
            f"{source} is damaged: its metadata does not have the sha256 that was stored with it; "
            f"copy or download it again"
        )


def check_version(document: Any) -> None:
    """Raises unless this version of Vitrail can read the metadata."""
    found = document.get("format") if isinstance(document, dict) else document
    if found != FORMAT_VERSION:
        raise UserError(
            f"it has format {found!r:.60}, this version reads {FORMAT_VERSION}; "
            f"use the version of Vitrail that wrote it"
        )


def decode_metadata(document: Mapping[str, Any]) -> Metadata:
    """The metadata in a JSON object; keys that this version does not know stay in `document`."""
    entries = {name: value for name, value in document.items() if name != "document"}
    metadata = decode_table(Metadata, entries, strict=(ViTConfig, Preprocess))
    return replace(metadata, document=dict(document))
