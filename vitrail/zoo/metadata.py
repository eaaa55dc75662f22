"""The metadata of a model file, decoded with every type checked, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vitrail.data.config import Preprocess
from vitrail.decoding import decode_table, parse_json
from vitrail.errors import UserError
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
class Metadata:
    """What a model file says about its model.

    `document` is the JSON object in the file, with keys of other versions too. `change` replaces
    some of its entries, so that both always agree.
    """

    vit: ViTConfig | None = None  # None only for a model without a file
    name: str | None = None  # of the architecture
    classes: tuple[str, ...] | None = None  # None: unknown
    preprocess: Preprocess | None = None  # None: unknown
    data: TrainingData = field(default_factory=TrainingData)
    temperature: float | None = None  # divides logits; None: not fitted
    best: Best | None = None
    environment: dict[str, Any] = field(default_factory=dict)  # versions and machine of the run
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.temperature is not None and not self.temperature > 0:
            raise UserError(f"temperature is {self.temperature}; wanted a positive number or null")

    def change(self, **entries: Any) -> "Metadata":
        """The metadata with some entries of the document replaced."""
        return decode_metadata({**self.document, **entries})


def parse_metadata(text: str, source: str) -> Metadata:
    """The metadata of a model file; `source` names the file in errors."""
    try:
        document = parse_json(text)
        check_version(document)
        return decode_metadata(document)
    except UserError as error:
        raise UserError(f"cannot read the metadata of {source}: {error}") from error


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
