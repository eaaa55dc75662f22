"""Vitrail's own model file: safetensors whose metadata holds everything needed to use it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from vitrail import __version__, files
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.cost import count_parameters, count_statistics
from vitrail.model.vit import ViT
from vitrail.zoo.files.lazy import FileContents, LazyTensor, read_ahead
from vitrail.zoo.files.open import open_weight_file
from vitrail.zoo.metadata import (
    FORMAT_VERSION,
    METADATA_KEY,
    Checksums,
    Metadata,
    check_document,
    hash_document,
    parse_metadata,
)


def save_model(path: str | Path, model: ViT, metadata: Mapping[str, Any]) -> None:
    """Writes the weights with `metadata`: classes, preprocessing, metrics, anything JSON holds."""
    tensors = {name: x.detach().cpu().contiguous() for name, x in model.state_dict().items()}
    complete = {
        "format": FORMAT_VERSION,
        "vit": asdict(model.config),
        "versions": {"vitrail": __version__, "torch": torch.__version__},
        **metadata,
    }
    stored = json.loads(json.dumps(complete))  # as it will be read
    sums = Checksums(tensors=hash_tensors(tensors), document=hash_document(stored))
    text = json.dumps({**stored, "checksums": asdict(sums)})
    files.write_file(path, save(tensors, {METADATA_KEY: text}))


def hash_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The sha256 of the bytes of each tensor."""
    return {
        name: hashlib.sha256(x.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
        for name, x in tensors.items()
    }


def load_model(path: str | Path) -> tuple[ViT, Metadata]:
    """The model in evaluation mode, and its metadata."""
    contents = open_weight_file(Path(path))
    metadata = read_metadata(contents, str(path))
    if metadata is None:
        raise UserError(f"{path} is not a model file of Vitrail: its metadata is missing")
    elements = sum(torch.Size(x.shape).numel() for x in contents.tensors.values())
    config = check_architecture(metadata, elements, str(path))
    with torch.device("meta"):
        model = ViT(config)
    expected = {name: x.shape for name, x in model.state_dict().items()}
    found = {name: torch.Size(x.shape) for name, x in contents.tensors.items()}
    if expected != found:
        names = expected.keys() | found.keys()
        wrong = min(name for name in names if expected.get(name) != found.get(name))
        raise UserError(
            f"{path} does not contain the model that its metadata describes: {wrong} has the shape "
            f"{found.get(wrong)}, expected {expected.get(wrong)}; download or train it again"
        )
    tensors = read_tensors(contents, metadata)
    model.load_state_dict({name: x.read() for name, x in tensors.items()}, assign=True)
    return model.eval(), metadata


def read_metadata(contents: FileContents, source: str) -> Metadata | None:
    """The metadata of a Vitrail model file; None for a foreign file."""
    if METADATA_KEY not in contents.metadata:
        return None
    metadata = parse_metadata(contents.metadata[METADATA_KEY], source)
    check_document(metadata, source)
    return metadata


def read_tensors(contents: FileContents, metadata: Metadata) -> dict[str, LazyTensor]:
    """The tensors of a Vitrail model file, read and compared with their sha256."""
    return read_ahead(contents.tensors, metadata.checksums.tensors if metadata.checksums else {})


def check_architecture(metadata: Metadata, elements: int, source: str) -> ViTConfig:
    """The architecture in the metadata; raises unless its tensors have `elements` numbers."""
    if metadata.vit is None:
        raise UserError(f"{source} does not describe its model; download or train it again")
    expected = count_parameters(metadata.vit) + count_statistics(metadata.vit)
    if elements != expected:
        raise UserError(
            f"{source} does not contain the model that its metadata describes: it has {elements:,} "
            f"elements, the model has {expected:,}"
        )
    return metadata.vit
