"""The tensors of a file put together into the state of a model, each read when it is needed."""

import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.zoo.adapt import resize_kernel, spread_channels, stretch_positions
from vitrail.zoo.architecture import Found, block_of, unread
from vitrail.zoo.layouts.layout import Parts, listing

HEADS = ("head.", "head_dist.")
BIASES = r"(patch_embed\.proj|blocks\.\d+\.attn\.qkv)\.bias"  # some models have none: zero here


@dataclass(kw_only=True)
class Notes:
    loaded: int = 0  # tensors of the file that found their place
    resized: list[str] = field(default_factory=list)
    adapted: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def assemble(parts: Parts, found: Found, wanted: ViTConfig, source: str) -> tuple[ViT, Notes]:
    """The model that is wanted, from the weights of the one that was found."""
    notes, old = Notes(), found.vit
    with torch.device("meta"):
        model = ViT(wanted)
    shapes = {name: one.shape for name, one in model.state_dict().items()}
    new_head = head_changes(old, wanted, notes)
    given_up = [name for name in parts.pieces if dropped(name, shapes, old, wanted, new_head)]
    check_places(parts, old, {*shapes, *given_up}, source)
    notes.loaded = sum(len(pieces) for name, pieces in parts.pieces.items() if name not in given_up)
    if wanted.depth < old.depth:
        notes.adapted.append(f"depth {old.depth} -> {wanted.depth}: the first blocks")
    special = tokens(parts, found, notes)
    if "pos_embed" in special:
        special["pos_embed"] = stretch_positions(special["pos_embed"], old, wanted, notes.resized)
    state, biases = {}, []
    for name, shape in shapes.items():
        if name in special:
            x = special[name]
        elif new_head and name.startswith(HEADS):
            x = torch.zeros(shape)
        elif name not in parts.pieces and re.fullmatch(BIASES, name):
            x = torch.zeros(shape)
            biases.append(name)
        elif name not in parts.pieces and pooled(parts, name):
            x = torch.eye(*shape) if len(shape) == 2 else torch.zeros(shape)
        else:
            x = fit(name, joined(parts, name, source), wanted, notes)
        if x.shape != shape:
            raise UserError(
                f"{source} has {name} as {sizes(x.shape)}, which should be {sizes(shape)}"
            )
        state[name] = x.to(torch.float32).contiguous()
    if biases:
        notes.adapted.append(f"{listing(biases)}: zero, the file has none")
    if pooled(parts, "head.weight") and old.head == "mlp" and not new_head:
        notes.adapted.append("head: the identity, so that the output is the pooler's")
    kinds = {one.dtype for name in shapes for one in parts.pieces.get(name, {}).values()}
    for kind in sorted(str(kind).removeprefix("torch.") for kind in kinds - {torch.float32}):
        notes.adapted.append(f"numbers {kind} -> float32")
    model.load_state_dict(state, assign=True)
    return model.eval(), notes


def head_changes(old: ViTConfig, wanted: ViTConfig, notes: Notes) -> bool:
    """Whether a new head starts at zero (Dosovitskiy et al., 2021, section 3.2)."""
    if wanted.head == "none":
        if old.head != "none":
            notes.left_out.append("head: not wanted")
        return False
    if old.head == wanted.head and old.classes == wanted.classes:
        return False
    before = "no head" if old.head == "none" else f"classes {old.classes}"
    notes.adapted.append(f"{before} -> classes {wanted.classes}: a new head of zeros")
    if old.head == "mlp":
        notes.left_out.append("pre_logits: the hidden layer of the old head")
    return True


def check_places(parts: Parts, old: ViTConfig, placed: set[str], source: str) -> None:
    """Stops if a tensor of the file has no place in the model and no reason to have none."""
    idle = unread(parts, {"pool": old.pool, "distilled": old.distilled})
    if lost := parts.pieces.keys() - placed - {*idle, "reg_token"}:
        raise UserError(f"{source} has {min(lost)}, for which this model has no place")


def dropped(
    name: str, shapes: dict[str, torch.Size], old: ViTConfig, wanted: ViTConfig, new_head: bool
) -> bool:
    """Whether a tensor goes with a block or a head that is not wanted."""
    if name.startswith("head.") or (name.startswith("head_dist.") and old.distilled):
        return new_head or wanted.head == "none"
    if name.startswith("pre_logits."):
        return name not in shapes
    number = block_of(name)
    return number is not None and number >= wanted.depth


def pooled(parts: Parts, name: str) -> bool:
    """Whether a file ends in a hidden layer without a head, as Hugging Face's ViTModel does."""
    return (
        name in ("head.weight", "head.bias")
        and "head.weight" not in parts.pieces
        and "pre_logits.fc.weight" in parts.pieces
    )


def joined(parts: Parts, name: str, source: str) -> Tensor:
    """A tensor from its pieces. Where keys have no bias, a gap stays between two pieces: zero."""
    pieces = parts.pieces.get(name)
    if pieces is None:
        raise UserError(f"{source} is no whole model: {name} is missing")
    if list(pieces) == [0]:
        x = pieces[0].read()
    else:
        read = {number: pieces[number].read() for number in sorted(pieces)}
        first = next(iter(read.values()))
        gap = torch.zeros_like(first)
        x = torch.cat([read.get(number, gap) for number in range(max(read) + 1)])
    if not x.is_floating_point():
        raise UserError(f"{source} has {name} as {x.dtype}; give floating point weights")
    return x


def fit(name: str, x: Tensor, wanted: ViTConfig, notes: Notes) -> Tensor:
    """The first convolution fitted to other channels and patches; all else as it is."""
    first = "patch_embed.proj.weight"
    if wanted.stem != "patch":
        first = "patch_embed.backbone.stem.conv.weight"
    if name != first:
        return x
    x = spread_channels(x.to(torch.float32), wanted.channels, notes.adapted)
    return resize_kernel(x, wanted.patch, notes.resized) if wanted.stem == "patch" else x


def tokens(parts: Parts, found: Found, notes: Notes) -> dict[str, Tensor]:
    """The tokens in front of the patches and all positions, arranged as here.

    Others give positions to all these tokens, to some or to none. Here [CLS] and distillation have
    one, and a token that no head reads is a register, with its position added to it for good.
    """
    read = {
        name: joined(parts, name, "the file")
        for name in ("cls_token", "dist_token", "reg_token")
        if name in parts.pieces
    }
    idle = unread(parts, {"pool": found.vit.pool, "distilled": found.vit.distilled})
    positions = joined(parts, "pos_embed", "the file") if "pos_embed" in parts.pieces else None
    slots: list[Tensor] = []
    registers: list[Tensor] = []
    state: dict[str, Tensor] = {}
    start = 0
    for name, x in read.items():
        own = None
        if positions is not None and start < found.slots:
            own = positions[:, start : start + x.shape[1]]
        start += x.shape[1]
        if name == "reg_token" or name in idle:
            registers.append(x if own is None else x + own)
        else:
            state[name] = x
            slots.append(torch.zeros_like(x) if own is None else own)
    notes.adapted.extend(f"{token}: a register, no head reads it" for token in idle)
    if registers:
        state["reg_token"] = torch.cat(registers, dim=1)
    if positions is not None:
        state["pos_embed"] = torch.cat([*slots, positions[:, found.slots :]], dim=1)
    return state


def sizes(shape: torch.Size) -> str:
    return " x ".join(str(side) for side in shape)
