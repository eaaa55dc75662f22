"""Which model a file holds: read off its tensors, then asked of config, table and flags."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vitrail.errors import UserError
from vitrail.model.config import STAGES, ViTConfig
from vitrail.zoo.beside import Beside
from vitrail.zoo.layouts.layout import Parts
from vitrail.zoo.weights import HEADS, Published

USUAL: dict[str, Any] = {"mlp": "gelu", "eps": 1e-6}  # what nearly all published weights have
FREE = ("heads", "mlp", "eps", "positions")  # no tensor shows them: a flag may say


@dataclass(frozen=True, kw_only=True)
class Found:
    vit: ViTConfig  # as the file has it
    slots: int  # tokens in front of the patches for which the file has positions
    row: Published | None = None  # of the table, if these are weights that it knows
    told: list[str] = field(default_factory=list)


def recognise(
    parts: Parts,
    beside: Beside,
    row: Published | None,
    flags: Mapping[str, Any],
    source: str,
) -> Found:
    vit = shown(parts, beside, source)
    told: list[str] = []
    if row is not None and any(
        getattr(row.vit, name) != vit[name] for name in ("width", "depth", "patch")
    ):
        told.append(f"the name is that of {row.name}, but the shapes are others: not believed")
        row = None
    who = Witnesses(parts=parts, beside=beside, row=row, flags=flags, told=told)
    hidden = round(vit["width"] * vit["mlp_ratio"])
    heads = HEADS.get((vit["width"], vit["depth"], hidden))
    vit["heads"] = who.ask("heads", heads, "as published models of this size have")
    if vit["heads"] is None:
        raise UserError(
            f"{source} does not say how many heads share its width of {vit['width']}; "
            f"say it, such as --vit.heads {max(1, vit['width'] // 64)}"
        )
    if vit["mlp"] != "swiglu":
        vit["mlp"] = who.ask("mlp", USUAL["mlp"], "as usual")
        if vit["mlp"] == "swiglu":
            raise UserError(f"{source} has no gate in its MLP; leave mlp swiglu out")
    vit["eps"] = who.ask("eps", USUAL["eps"], "as usual")
    if vit["positions"] is None:
        usual = "sincos" if parts.format == "google" else None
        vit["positions"] = who.ask("positions", usual, "as in big_vision, if the file has none")
    if vit["positions"] is None:
        raise UserError(f"{source} has no positions; say --vit.positions none, sincos or rotary")
    if vit["pool"] is None:
        vit["pool"] = who.ask("pool", "cls", "as usual")
    vit["registers"] += len(unread(parts, vit))
    vit["image"], slots = picture(parts, vit, who, source)
    return Found(vit=ViTConfig(**vit), slots=slots, row=row, told=told)


@dataclass(frozen=True, kw_only=True)
class Witnesses:
    """Who may know what tensors do not show, in the order in which they are believed."""

    parts: Parts
    beside: Beside
    row: Published | None
    flags: Mapping[str, Any]
    told: list[str]

    def ask(self, name: str, usual: Any, why: str) -> Any:
        """The setting; unless the files say it themselves, that it was told, and by whom."""
        if name in self.flags and name in FREE:
            self.told.append(f"{name} {self.flags[name]}: said by a flag")
            return self.flags[name]
        if name in self.beside.vit:
            return self.beside.vit[name]
        if name in self.parts.vit:
            return self.parts.vit[name]
        if self.row is not None:
            value = getattr(self.row.vit, name)
            self.told.append(f"{name} {value}: from the table of weights, {self.row.name}")
            return value
        if usual is not None:
            self.told.append(f"{name} {usual}: {why}")
        return usual


def shown(parts: Parts, beside: Beside, source: str) -> dict[str, Any]:
    """What names and shapes alone tell; None where they leave a question."""
    kernel = need(parts, "patch_embed.proj.weight", 4, source)
    hidden = need(parts, "blocks.0.mlp.fc2.weight", 2, source)[1]
    outside = need(parts, "blocks.0.mlp.fc1.weight", 2, source)[0]
    width = kernel[0]
    vit: dict[str, Any] = {
        "width": width,
        "depth": depth(parts, source),
        "mlp": "swiglu" if outside == 2 * hidden else None,
        "mlp_ratio": ratio(hidden, width),
        "positions": "learned" if "pos_embed" in parts.pieces else None,
        "registers": (parts.shape("reg_token") or (1, 0))[1],
        "qk_norm": "blocks.0.attn.q_norm.weight" in parts.pieces,
        "pre_norm": "norm_pre.weight" in parts.pieces,
        **stem(parts, kernel, source),
        "distilled": "dist_token" in parts.pieces and "head_dist.weight" in parts.pieces,
        **pooling(parts),
        **heading(parts, source),
    }
    if "blocks.0.ls1.gamma" in parts.pieces:
        vit["layer_scale"] = beside.vit.get("layer_scale", 1e-5)
    for name in ("width", "depth"):
        if beside.vit.get(name, vit[name]) != vit[name]:
            raise UserError(
                f"{source} has {name} {vit[name]}, but its config.json says {beside.vit[name]}; "
                f"they do not belong together"
            )
    return vit


def need(parts: Parts, name: str, axes: int, source: str) -> tuple[int, ...]:
    shape = parts.shape(name)
    if shape is None or len(shape) != axes or min(shape) < 1:
        found = "is missing" if shape is None else f"has the shape {shape}"
        raise UserError(f"{source} is no plain ViT: {name} {found}")
    return shape


def depth(parts: Parts, source: str) -> int:
    numbers = {number for name in parts.pieces if (number := block_of(name)) is not None}
    if numbers != set(range(len(numbers))):
        gap = min(set(range(max(numbers))) - numbers)
        raise UserError(f"{source} has {max(numbers) + 1} blocks, but number {gap} is missing")
    return len(numbers)


def block_of(name: str) -> int | None:
    """The number of the block that a tensor belongs to."""
    found = re.match(r"blocks\.(\d{1,6})\.", name)
    return int(found[1]) if found else None


def ratio(hidden: int, width: int) -> float:
    """A number that gives `hidden` again when it is multiplied by `width` and rounded down."""
    share = hidden / width
    while int(width * share) < hidden:
        share = math.nextafter(share, math.inf)
    return share


def stem(parts: Parts, kernel: tuple[int, ...], source: str) -> dict[str, Any]:
    front = "patch_embed.backbone."
    if not any(name.startswith(front) for name in parts.pieces):
        if kernel[2] != kernel[3]:
            raise UserError(f"{source} has patches of {kernel[2]} x {kernel[3]}; give square ones")
        return {"stem": "patch", "patch": kernel[2], "channels": kernel[1]}
    units: dict[int, set[int]] = {}
    for name in parts.pieces:
        if match := re.match(rf"{re.escape(front)}stages\.(\d+)\.blocks\.(\d+)\.", name):
            units.setdefault(int(match[1]), set()).add(int(match[2]))
    found = tuple(len(units[stage]) for stage in sorted(units))
    for (kind, patch), stages in STAGES.items():
        if stages == found:
            channels = need(parts, f"{front}stem.conv.weight", 4, source)[1]
            return {"stem": kind, "patch": patch, "channels": channels}
    raise UserError(f"{source} has a ResNet of stages {found}; known are {list(STAGES.values())}")


def pooling(parts: Parts) -> dict[str, Any]:
    """Who is read, where the tensors leave no question."""
    after = parts.vit.get("norm_after_pool", False)
    if "attn_pool.latent" in parts.pieces:
        return {"pool": "map"}
    if "cls_token" not in parts.pieces or after:
        return {"pool": "avg", "norm_after_pool": after}
    return {"pool": "cls" if "dist_token" in parts.pieces else None}


def unread(parts: Parts, vit: Mapping[str, Any]) -> list[str]:
    """Tokens that no head reads; here they are registers."""
    found = [] if vit["pool"] == "cls" else ["cls_token"]
    found += [] if vit["distilled"] else ["dist_token"]
    return [name for name in found if name in parts.pieces]


def heading(parts: Parts, source: str) -> dict[str, Any]:
    shape, hidden = parts.shape("head.weight"), "pre_logits.fc.weight" in parts.pieces
    head = "mlp" if hidden else "linear"
    if shape is None and not hidden:
        return {"head": "none", "classes": 1000}
    width = need(parts, "patch_embed.proj.weight", 4, source)[0]
    return {"head": head, "classes": width if shape is None else shape[0]}


def picture(
    parts: Parts, vit: Mapping[str, Any], who: Witnesses, source: str
) -> tuple[tuple[int, int], int]:
    """The size of the images, and for how many tokens in front the file has positions."""
    patch = vit["patch"]
    said = who.beside.vit.get("image") or (who.row.vit.size if who.row else None)
    asked = who.flags.get("image")
    asked = (asked, asked) if isinstance(asked, int) else asked
    shape = parts.shape("pos_embed")
    if shape is None:
        return said or asked or (224 // patch * patch, 224 // patch * patch), 0
    for size in (said, *squares(shape[1], fronts(parts), patch), asked):
        if size is None or size[0] % patch or size[1] % patch:
            continue
        slots = shape[1] - size[0] // patch * (size[1] // patch)
        if slots in fronts(parts):
            if said and size != said:
                who.told.append(
                    f"image {size[0]} x {size[1]}: by its positions, not as said beside"
                )
            return tuple(size), slots
    raise UserError(
        f"{source} has {shape[1]} positions, which are no square of patches; "
        f"say the size it was trained at, such as --vit.image {20 * patch} {10 * patch}"
    )


def fronts(parts: Parts) -> list[int]:
    """How many tokens in front may have positions: [CLS] and distillation, all, or none."""
    readers = sum(name in parts.pieces for name in ("cls_token", "dist_token"))
    return [readers, readers + (parts.shape("reg_token") or (1, 0))[1], 0]


def squares(count: int, fronts: list[int], patch: int) -> list[tuple[int, int]]:
    """The sizes that leave a square of patches; more than one only for odd counts of registers."""
    sides = {math.isqrt(count - front) for front in fronts if count > front}
    exact = [side for side in sides if any(side * side + front == count for front in fronts)]
    return [(side * patch, side * patch) for side in exact] if len(exact) == 1 else []
