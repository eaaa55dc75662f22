"""Vitrail's own model file: safetensors whose metadata explain how to use the weights."""

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
from vitrail.model.cost import parameters
from vitrail.model.vit import ViT

FORMAT = 1
KEY = "vitrail"  # the one key of the metadata; its value is JSON
LARGEST = 1_000_000  # of the numbers that define an architecture


def save_model(path: str | Path, model: ViT, facts: dict[str, Any]) -> None:
    """Writes the weights with `facts`: classes, preprocessing, metrics, whatever JSON holds."""
    versions = {"vitrail": __version__, "torch": torch.__version__}
    head = {"format": FORMAT, "vit": asdict(model.config), "versions": versions, **facts}
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    files.write(path, save(tensors, {KEY: json.dumps(head)}))


def load_model(path: str | Path) -> tuple[ViT, dict[str, Any]]:
    """The model in evaluation mode, and its facts."""
    facts, tensors = read_tensors(Path(path))
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        found = facts.get("format") if isinstance(facts, dict) else facts
        raise UserError(
            f"{path} has format {found!r:.80}, this version reads {FORMAT}; "
            f"use the version of vitrail that wrote it"
        )
    config = own_config(facts, sum(tensor.numel() for tensor in tensors.values()), str(path))
    with torch.device("meta"):
        model = ViT(config)
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if wanted != found:
        odd = min(
            name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)
        )
        raise UserError(
            f"{path} does not hold the model it speaks of: {odd} is not as it should be"
        )
    model.load_state_dict(tensors, assign=True)
    return model.eval(), facts


def own_config(facts: Mapping[str, Any], numbers: int, source: str) -> ViTConfig:
    """The architecture, believed if it has as many parameters as the file holds numbers."""
    try:
        said = dict(facts["vit"])
        if any(isinstance(one, int | float) and abs(one) > LARGEST for one in said.values()):
            raise UserError(f"{source} speaks of a model that is too large to be one: {said}")
        config = ViTConfig(**said)
    except (KeyError, TypeError) as error:
        raise UserError(f"{source} does not say what model it holds: {error}") from error
    if parameters(config) != numbers:
        raise UserError(
            f"{source} does not hold the model it speaks of, which has {parameters(config):,} "
            f"parameters: it has {numbers:,} numbers"
        )
    return config


def read_tensors(path: Path) -> tuple[Any, dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if KEY not in metadata:
                raise UserError(f"{path} is not a model of vitrail: it does not say what it holds")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = json.loads(metadata[KEY])
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"there is no model {path}; give a run folder or a model file") from error
    except (SafetensorError, ValueError, RecursionError, OSError) as error:
        raise UserError(f"{path} is no readable model: {error}") from error
    return facts, tensors
