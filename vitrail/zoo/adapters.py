"""Adapters: fine-tuning that changes a few parameters of a model, kept as a file of their own."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vitrail import files
from vitrail.data.config import Preprocess
from vitrail.decoding import decode_table, parse_json
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.zoo.files.lazy import FileContents
from vitrail.zoo.metadata import FORMAT_VERSION, check_version

ADAPTER_KEY = "vitrail-adapter"  # of the safetensors metadata; its value is JSON
ALPHA = 1.0  # of LoRA, over the rank: the scale of the product
HEADS = ("head.", "head_dist.")
MATRICES = {"attn.qkv": 3, "attn.proj": 1, "mlp.fc1": 1, "mlp.fc2": 1}  # stacked in one parameter
FACTOR = "parametrizations.weight.0."  # before the name of a factor
ORIGINAL = "parametrizations.weight.original"


@dataclass(frozen=True, kw_only=True)
class AdapterDocument:
    """What the metadata of an adapter file says."""

    vit: ViTConfig
    base: str  # path or hub name of the weights that it was trained from
    base_checksum: str
    classes: tuple[str, ...]
    preprocess: Preprocess
    name: str | None = None


class LoraDelta(nn.Module):
    """W + B A, with a low rank r of the product (Hu et al., 2022); B starts at zero.

    Each of the stacked matrices (queries, keys and values of a fused qkv) has factors of its own.
    """

    def __init__(self, weight: Tensor, rank: int, stacked: int):
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(torch.empty(stacked, rank, columns, device=weight.device))
        self.up = nn.Parameter(torch.zeros(stacked, rows // stacked, rank, device=weight.device))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + ALPHA * (self.up @ self.down).flatten(0, 1)


def freeze(model: ViT, tune: str, rank: int, frozen: int) -> None:
    """Leaves only the parameters learning that `tune` names, in the blocks from `frozen` on."""
    if tune == "lora":
        add_lora(model, rank, frozen)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learns(name, tune, frozen, len(model.blocks)))


def add_lora(model: ViT, rank: int, frozen: int) -> None:
    for block in model.blocks[frozen:]:
        for path, stacked in MATRICES.items():
            layer = block.get_submodule(path)
            delta = LoraDelta(layer.get_parameter("weight"), rank, stacked)
            parametrize.register_parametrization(layer, "weight", delta)


def learns(name: str, tune: str, frozen: int, depth: int) -> bool:
    """Whether fine-tuning changes the parameter of this name."""
    if name.startswith(HEADS):
        return True
    block = int(name.split(".")[1]) if name.startswith("blocks.") else None
    if tune == "all":
        return (
            frozen == 0 or (block is not None and block >= frozen) or is_above(name, frozen, depth)
        )
    if block is None or block < frozen:
        return False
    return FACTOR in name if tune == "lora" else tune == "proj" and ".attn.proj." in name


def is_above(name: str, frozen: int, depth: int) -> bool:
    """Whether a parameter follows the blocks; the final norm counts only if a block learns."""
    return name.startswith(("norm.", "attn_pool.")) and frozen < depth


def merge_adapter(model: ViT) -> ViT:
    """The model with LoRA merged into its weights; itself if it has none."""
    if not any(FACTOR in name for name, _ in model.named_parameters()):
        return model
    with torch.device("meta"):
        merged = ViT(model.config)
    tensors = {}
    for name in merged.state_dict():
        path, _, tensor = name.rpartition(".")
        tensors[name] = getattr(model.get_submodule(path), tensor).detach()
    merged.load_state_dict(tensors, assign=True)
    return merged.eval()


def save_adapter(
    path: Path, model: ViT, tune: str, frozen: int, document: Mapping[str, Any]
) -> None:
    """Writes what a fine-tuning with few parameters has changed, without the base weights."""
    own = dict(model.named_parameters())
    changed = [name for name in own if learns(name, tune, frozen, len(model.blocks))]
    complete = {
        "format": FORMAT_VERSION,
        "vit": asdict(model.config),
        "base_checksum": hash_base(model, set(changed)),
        **document,
    }
    tensors = {
        name.replace(FACTOR, "lora."): own[name].detach().cpu().contiguous() for name in changed
    }
    files.write_file(path, save(tensors, {ADAPTER_KEY: json.dumps(complete)}))


def read_adapter(contents: FileContents, source: str) -> AdapterDocument:
    """What an adapter file says, checked."""
    try:
        document = parse_json(contents.metadata[ADAPTER_KEY])
        check_version(document)
        return decode_table(AdapterDocument, document, strict=(ViTConfig, Preprocess))
    except UserError as error:
        raise UserError(f"cannot read the adapter {source}: {error}") from error


@torch.no_grad()
def apply_adapter(model: ViT, tensors: Mapping[str, Tensor], checksum: str, source: str) -> ViT:
    """The base model with the changes of an adapter merged into it; raises for another base."""
    own = dict(model.named_parameters())
    changed = {name for name in tensors if "lora." not in name}
    if unknown := changed - own.keys():
        raise UserError(f"{source} is not an adapter of this model: no parameter {min(unknown)}")
    if hash_base(model, changed) != checksum:
        raise UserError(
            f"{source} belongs to other base weights; give the file that it was trained from"
        )
    try:
        for name in changed:
            own[name].copy_(tensors[name])
        for name in [name for name in tensors if name.endswith("lora.down")]:
            up, down = tensors[name.replace("down", "up")], tensors[name]
            own[name.replace("lora.down", "weight")].add_(ALPHA * (up @ down).flatten(0, 1))
    except (LookupError, RuntimeError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{source} is not an adapter of this model: {reason}") from error
    return model


def hash_base(model: ViT, changed: set[str]) -> str:
    """A checksum of the parameters that an adapter leaves as they are."""
    kept = {
        name.replace(ORIGINAL, "weight"): parameter
        for name, parameter in model.named_parameters()
        if name not in changed
    }
    checksum = hashlib.sha256()
    for name, parameter in sorted(kept.items()):
        checksum.update(name.encode() + parameter.detach().cpu().numpy().tobytes())
    return checksum.hexdigest()
