"""Builds a model from the mapped tensors of a checkpoint, each read when it is needed."""

import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.zoo.adapt import (
    adapt_input_channels,
    resize_patch_kernel,
    resize_position_embedding,
)
from vitrail.zoo.architecture import Architecture, block_index, list_unread_tokens
from vitrail.zoo.layouts.layout import MappedStateDict, summarise_names

HEAD_PREFIXES = ("head.", "head_dist.")
OPTIONAL_BIASES = r"(patch_embed\.proj|blocks\.\d+\.attn\.qkv)\.bias"  # zero if the file has none


@dataclass(kw_only=True)
class Changes:
    """What happened to the tensors of a file on their way into the model."""

    loaded: int = 0  # tensors of the file that became parameters
    resized: list[str] = field(default_factory=list)
    adapted: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def build_model(
    mapped: MappedStateDict, architecture: Architecture, wanted: ViTConfig, source: str
) -> tuple[ViT, Changes]:
    """The wanted model in evaluation mode, with the weights of the file adapted to it."""
    changes, old = Changes(), architecture.vit
    with torch.device("meta"):
        model = ViT(wanted)
    shapes = {name: x.shape for name, x in model.state_dict().items()}
    new_head = note_head_change(old, wanted, changes)
    unused = [name for name in mapped.chunks if is_dropped(name, shapes, old, wanted, new_head)]
    check_all_mapped(mapped, old, {*shapes, *unused}, source)
    changes.loaded = sum(len(x) for name, x in mapped.chunks.items() if name not in unused)
    if wanted.depth < old.depth:
        changes.adapted.append(f"depth {old.depth} -> {wanted.depth}: the first blocks")
    tokens = arrange_tokens(mapped, architecture, changes)
    if "pos_embed" in tokens:
        tokens["pos_embed"] = resize_position_embedding(
            tokens["pos_embed"], old, wanted, changes.resized
        )
    state = {}
    for name, shape in shapes.items():
        if name in tokens:
            x = tokens[name]
        elif new_head and name.startswith(HEAD_PREFIXES):
            x = torch.zeros(shape)
        else:
            x = build_parameter(name, shape, mapped, source)
            x = adapt_first_convolution(name, x, wanted, changes)
        if x.shape != shape:
            raise UserError(
                f"{source} has {name} of shape {format_shape(x.shape)}, "
                f"expected {format_shape(shape)}"
            )
        state[name] = x.to(torch.float32).contiguous()
    note_conversions(mapped, shapes, old, new_head, changes)
    model.load_state_dict(state, assign=True)
    return model.eval(), changes


def note_head_change(old: ViTConfig, wanted: ViTConfig, changes: Changes) -> bool:
    """Whether a new head starts at zero (Dosovitskiy et al., 2021, section 3.2)."""
    if wanted.head == "none":
        if old.head != "none":
            changes.left_out.append("head: not requested")
        return False
    if old.head == wanted.head and old.classes == wanted.classes:
        return False
    before = "no head" if old.head == "none" else f"classes {old.classes}"
    changes.adapted.append(f"{before} -> classes {wanted.classes}: a new head of zeros")
    if old.head == "mlp":
        changes.left_out.append("pre_logits: the hidden layer of the old head")
    return True


def check_all_mapped(
    mapped: MappedStateDict, old: ViTConfig, expected: set[str], source: str
) -> None:
    """Raises if the file has a parameter that the model does not have."""
    unread = list_unread_tokens(mapped, {"pool": old.pool, "distilled": old.distilled})
    if unexpected := mapped.chunks.keys() - expected - {*unread, "reg_token"}:
        raise UserError(f"{source} has {min(unexpected)}, which this model does not have")


def is_dropped(
    name: str, shapes: dict[str, torch.Size], old: ViTConfig, wanted: ViTConfig, new_head: bool
) -> bool:
    """Whether a parameter is part of a block or head that the wanted model does not have."""
    if name.startswith("head.") or (name.startswith("head_dist.") and old.distilled):
        return new_head or wanted.head == "none"
    if name.startswith("pre_logits."):
        return name not in shapes
    number = block_index(name)
    return number is not None and number >= wanted.depth


def build_parameter(name: str, shape: torch.Size, mapped: MappedStateDict, source: str) -> Tensor:
    """A parameter from the file, or a neutral value if the file's model does not have it."""
    if name in mapped.chunks:
        return read_parameter(mapped, name, source)
    if re.fullmatch(OPTIONAL_BIASES, name):
        return torch.zeros(shape)
    if name in ("head.weight", "head.bias") and ends_in_pooler(mapped):
        return torch.eye(*shape) if len(shape) == 2 else torch.zeros(shape)
    raise UserError(f"{source} is incomplete: {name} is missing")


def ends_in_pooler(mapped: MappedStateDict) -> bool:
    """Whether the file has a hidden layer without a head, as Hugging Face's ViTModel has."""
    return "head.weight" not in mapped.chunks and "pre_logits.fc.weight" in mapped.chunks


def read_parameter(mapped: MappedStateDict, name: str, source: str) -> Tensor:
    """Reads a parameter's chunks and concatenates them; a missing key bias is zero."""
    chunks = mapped.chunks[name]
    if list(chunks) == [0]:
        x = chunks[0].read()
    else:
        parts = {number: chunks[number].read() for number in sorted(chunks)}
        zeros = torch.zeros_like(next(iter(parts.values())))
        x = torch.cat([parts.get(number, zeros) for number in range(max(parts) + 1)])
    if not x.is_floating_point():
        raise UserError(
            f"{source} has {name} as {x.dtype}; only floating-point weights can be loaded"
        )
    return x


def adapt_first_convolution(name: str, x: Tensor, wanted: ViTConfig, changes: Changes) -> Tensor:
    """Adapts the first convolution to channels and patch size; returns all others unchanged."""
    first = "patch_embed.proj.weight"
    if wanted.small_stem:
        first = "patch_embed.backbone.layers.0.conv.weight"
    elif wanted.stem != "patch":
        first = "patch_embed.backbone.stem.conv.weight"
    if name != first:
        return x
    x = adapt_input_channels(x.to(torch.float32), wanted.channels, changes.adapted)
    return resize_patch_kernel(x, wanted.patch, changes.resized) if wanted.stem == "patch" else x


def arrange_tokens(
    mapped: MappedStateDict, architecture: Architecture, changes: Changes
) -> dict[str, Tensor]:
    """The prefix tokens and the position embedding in Vitrail's arrangement.

    Other libraries give positions to all prefix tokens, to some or to none. In Vitrail the [CLS]
    and distillation tokens have one. A token that no head reads becomes a register, and its
    position is added to it.
    """
    old = architecture.vit
    tokens = {
        name: read_parameter(mapped, name, "the file")
        for name in ("cls_token", "dist_token", "reg_token")
        if name in mapped.chunks
    }
    unread = list_unread_tokens(mapped, {"pool": old.pool, "distilled": old.distilled})
    positions = None
    if "pos_embed" in mapped.chunks:
        positions = read_parameter(mapped, "pos_embed", "the file")
    prefix: list[Tensor] = []
    registers: list[Tensor] = []
    state: dict[str, Tensor] = {}
    start = 0
    for name, x in tokens.items():
        position = None
        if positions is not None and start < architecture.embedded_tokens:
            position = positions[:, start : start + x.shape[1]]
        start += x.shape[1]
        if name == "reg_token" or name in unread:
            registers.append(x if position is None else x + position)
        else:
            state[name] = x
            prefix.append(torch.zeros_like(x) if position is None else position)
    changes.adapted.extend(f"{token}: a register, because no head reads it" for token in unread)
    if registers:
        state["reg_token"] = torch.cat(registers, dim=1)
    if positions is not None:
        patches = positions[:, architecture.embedded_tokens :]
        state["pos_embed"] = torch.cat([*prefix, patches], dim=1)
    return state


def note_conversions(
    mapped: MappedStateDict,
    shapes: dict[str, torch.Size],
    old: ViTConfig,
    new_head: bool,
    changes: Changes,
) -> None:
    """Records parameters that were filled in and dtypes that were cast."""
    missing = [name for name in shapes if name not in mapped.chunks]
    if biases := [name for name in missing if re.fullmatch(OPTIONAL_BIASES, name)]:
        changes.adapted.append(f"{summarise_names(biases)}: zero, because the file has none")
    if ends_in_pooler(mapped) and old.head == "mlp" and not new_head:
        changes.adapted.append("head: the identity, so that the output is the pooler's")
    dtypes = {x.dtype for name in shapes for x in mapped.chunks.get(name, {}).values()}
    for dtype in sorted(str(dtype) for dtype in dtypes - {torch.float32}):
        changes.adapted.append(f"dtype {dtype.removeprefix('torch.')} -> float32")


def format_shape(shape: torch.Size) -> str:
    return " x ".join(str(size) for size in shape)
