"""Vitrail's own model file: safetensors whose metadata holds everything needed to use it."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vitrail import __version__, files
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.cost import count_parameters
from vitrail.model.vit import ViT
from vitrail.zoo.metadata import FORMAT_VERSION, METADATA_KEY, Metadata, parse_metadata


def save_model(path: str | Path, model: ViT, metadata: Mapping[str, Any]) -> None:
    """Writes the weights with `metadata`: classes, preprocessing, metrics, anything JSON holds."""
    versions = {"vitrail": __version__, "torch": torch.__version__}
    complete = {
        "format": FORMAT_VERSION,
        "vit": asdict(model.config),
        "versions": versions,
        **metadata,
    }
    tensors = {name: x.detach().cpu().contiguous() for name, x in model.state_dict().items()}
    files.write_file(path, save(tensors, {METADATA_KEY: json.dumps(complete)}))


def load_model(path: str | Path) -> tuple[ViT, Metadata]:
    """The model in evaluation mode, and its metadata."""
    metadata, tensors = read_model_file(Path(path))
    config = check_architecture(metadata, sum(x.numel() for x in tensors.values()), str(path))
    with torch.device("meta"):
        model = ViT(config)
    expected = {name: x.shape for name, x in model.state_dict().items()}
    found = {name: x.shape for name, x in tensors.items()}
    if expected != found:
        names = expected.keys() | found.keys()
        wrong = min(name for name in names if expected.get(name) != found.get(name))
        raise UserError(
            f"{path} does not contain the model that its metadata describes: {wrong} has the shape "
            f"{found.get(wrong)}, expected {expected.get(wrong)}; download or train it again"
        )
    model.load_state_dict(tensors, assign=True)
    return model.eval(), metadata


def read_model_file(path: Path) -> tuple[Metadata, dict[str, Tensor]]:
    """The metadata and the tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if METADATA_KEY not in metadata:
                raise UserError(f"{path} is not a model file of Vitrail: its metadata is missing")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return parse_metadata(metadata[METADATA_KEY], str(path)), tensors
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; give a run folder or a model file") from error
    except (SafetensorError, ValueError, OSError) as error:
        raise UserError(f"cannot read the model {path}: {error}") from error


def check_architecture(metadata: Metadata, elements: int, source: str) -> ViTConfig:
    """The architecture in the metadata; raises unless it has `elements` parameters."""
    if metadata.vit is None:
        raise UserError(f"{source} does not describe its model; download or train it again")
    if count_parameters(metadata.vit) != elements:
        raise UserError(
            f"{source} does not contain the model that its metadata describes: it has {elements:,} "
            f"elements, the model has {count_parameters(metadata.vit):,} parameters"
        )
    return metadata.vit
