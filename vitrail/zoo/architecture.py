"""Infers the architecture of a checkpoint from its tensors, config files and published names."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vitrail.errors import UserError
from vitrail.model.config import STAGES, ViTConfig
from vitrail.zoo.layouts.layout import CheckpointConfig, MappedStateDict
from vitrail.zoo.weights import KNOWN_HEADS, PublishedWeights

DEFAULTS: dict[str, Any] = {"mlp": "gelu", "eps": 1e-6}  # of nearly all published weights
HIDDEN_SETTINGS = ("heads", "mlp", "eps", "positions")  # no tensor shows them; callers may set them
DEFAULT_IMAGE = 224  # pixels, if neither the position embedding nor a config determines it
HEAD_WIDTH = 64  # of nearly all published models; used in an error message
BACKBONE = "patch_embed.backbone."  # prefix of a ResNet stem


@dataclass(frozen=True, kw_only=True)
class Architecture:
    vit: ViTConfig  # of the model in the file
    embedded_tokens: int  # prefix tokens with a row in the file's position embedding
    published: PublishedWeights | None = None  # the row of the table that lists these weights
    assumed: list[str] = field(default_factory=list)


def infer_architecture(
    mapped: MappedStateDict,
    config: CheckpointConfig,
    published: PublishedWeights | None,
    requested: Mapping[str, Any],
    source: str,
) -> Architecture:
    vit = infer_from_tensors(mapped, config, source)
    assumed: list[str] = []
    if published is not None and any(
        getattr(published.vit, name) != vit[name] for name in ("width", "depth", "patch")
    ):
        assumed.append(
            f"named like {published.name}, but the shapes differ: its table row is ignored"
        )
        published = None
    sources = SettingSources(
        mapped=mapped, config=config, published=published, requested=requested, assumed=assumed
    )
    hidden = round(vit["width"] * vit["mlp_ratio"])
    heads = KNOWN_HEADS.get((vit["width"], vit["depth"], hidden))
    vit["heads"] = sources.resolve("heads", heads, "as in published models of this size")
    if vit["heads"] is None:
        raise UserError(
            f"{source} does not state how many attention heads share its width of {vit['width']}; "
            f"pass the number, for example `vit.heads={max(1, vit['width'] // HEAD_WIDTH)}`"
        )
    hidden_by_file = hidden_settings(mapped)
    if vit["mlp"] != "swiglu":
        default = None if "mlp" in hidden_by_file else DEFAULTS["mlp"]
        vit["mlp"] = sources.resolve("mlp", default, "as in all published files of this layout")
        if vit["mlp"] == "swiglu":
            raise UserError(f"{source} has no gate in its MLP; do not pass `vit.mlp='swiglu'`")
    default = None if "eps" in hidden_by_file else DEFAULTS["eps"]
    vit["eps"] = sources.resolve("eps", default, "as in all published files of this layout")
    check_stated(vit, source)
    if vit["positions"] is None:
        default = "sincos" if mapped.format == "google" else None
        vit["positions"] = sources.resolve(
            "positions", default, "as in big_vision files without a position embedding"
        )
    if vit["positions"] is None:
        raise UserError(
            f"{source} has no position embedding; pass `vit.positions='none'`, "
            f"`vit.positions='sincos'` or `vit.positions='rotary'`"
        )
    if vit["pool"] is None:
        vit["pool"] = sources.resolve("pool", "cls", "the usual value")
    vit["registers"] += len(list_unread_tokens(mapped, vit))
    vit["image"], embedded_tokens = infer_image_size(sources, vit["patch"], source)
    return Architecture(
        vit=ViTConfig(**vit),
        embedded_tokens=embedded_tokens,
        published=published,
        assumed=assumed,
    )


def hidden_settings(mapped: MappedStateDict) -> set[str]:
    """Settings in which published files with these tensors differ, so that none can be assumed."""
    if mapped.format.startswith("huggingface"):
        return {"mlp", "eps"}  # its config.json states them
    if mapped.format == "openai":
        return {"mlp"}  # OpenAI's own weights have QuickGELU, those of open_clip mostly GELU
    if mapped.format == "timm" and "norm_pre.weight" in mapped.chunks:  # CLIP
        return {"mlp", "eps"}
    if mapped.format == "timm" and "attn_pool.latent" in mapped.chunks:  # SigLIP
        return {"mlp"}
    return set()


def check_stated(vit: Mapping[str, Any], source: str) -> None:
    """Raises unless activation and eps are known; names the flags and their usual values."""
    choices = {
        "mlp": "`vit.mlp='quick_gelu'` (OpenAI's CLIP), `vit.mlp='gelu'` (open_clip, ViT, DINO) or "
        "`vit.mlp='gelu_tanh'` (SigLIP)",
        "eps": "`vit.eps=1e-5` (CLIP, DINOv3), `vit.eps=1e-6` (SigLIP, DINOv2) or "
        "`vit.eps=1e-12` (Hugging Face's ViT)",
    }
    names = {"mlp": "activation", "eps": "eps"}
    if missing := [name for name in choices if vit[name] is None]:
        what = " and ".join(names[name] for name in missing)
        raise UserError(
            f"{source} does not state its {what}, and published files differ; pass "
            f"{'; and '.join(choices[name] for name in missing)}"
        )


@dataclass(frozen=True, kw_only=True)
class SettingSources:
    """Where settings come from that no tensor shows, in order of precedence."""

    requested: Mapping[str, Any]  # by the caller
    config: CheckpointConfig
    mapped: MappedStateDict
    published: PublishedWeights | None
    assumed: list[str]

    def resolve(self, name: str, default: Any, reason: str) -> Any:
        """The setting; notes in `assumed` where it comes from, unless the files state it."""
        if name in self.requested and name in HIDDEN_SETTINGS:
            self.assumed.append(f"{name} {self.requested[name]}: as requested")
            return self.requested[name]
        if name in self.config.vit:
            return self.config.vit[name]
        if name in self.mapped.vit:
            return self.mapped.vit[name]
        if self.published is not None:
            value = getattr(self.published.vit, name)
            self.assumed.append(f"{name} {value}: from the table of weights, {self.published.name}")
            return value
        if default is not None:
            self.assumed.append(f"{name} {default}: {reason}")
        return default


def infer_from_tensors(
    mapped: MappedStateDict, config: CheckpointConfig, source: str
) -> dict[str, Any]:
    """The settings that names and shapes determine; None where they are ambiguous."""
    kernel = require_shape(mapped, "patch_embed.proj.weight", 4, source)
    hidden = require_shape(mapped, "blocks.0.mlp.fc2.weight", 2, source)[1]
    fc1_outputs = require_shape(mapped, "blocks.0.mlp.fc1.weight", 2, source)[0]
    width = kernel[0]
    vit: dict[str, Any] = {
        "width": width,
        "depth": count_blocks(mapped, source),
        "mlp": "swiglu" if fc1_outputs == 2 * hidden else None,
        "mlp_ratio": exact_ratio(hidden, width),
        "positions": "learned" if "pos_embed" in mapped.chunks else None,
        "registers": (mapped.shape("reg_token") or (1, 0))[1],
        "qk_norm": "blocks.0.attn.q_norm.weight" in mapped.chunks,
        "pre_norm": "norm_pre.weight" in mapped.chunks,
        **infer_stem(mapped, kernel, source),
        "distilled": "dist_token" in mapped.chunks and "head_dist.weight" in mapped.chunks,
        **infer_pool(mapped, width),
        **infer_head(mapped, width),
    }
    if "blocks.0.ls1.gamma" in mapped.chunks:
        vit["layer_scale"] = config.vit.get("layer_scale", 1e-5)
    for name in ("width", "depth"):
        if config.vit.get(name, vit[name]) != vit[name]:
            raise UserError(
                f"{source} has {name} {vit[name]}, but its config.json says {config.vit[name]}; "
                f"they do not belong together"
            )
    return vit


def require_shape(mapped: MappedStateDict, name: str, axes: int, source: str) -> tuple[int, ...]:
    shape = mapped.shape(name)
    if shape is None or len(shape) != axes or min(shape) < 1:
        found = "is missing" if shape is None else f"has the shape {shape}"
        raise UserError(f"{source} is not a plain ViT: {name} {found}")
    return shape


def count_blocks(mapped: MappedStateDict, source: str) -> int:
    numbers = {number for name in mapped.chunks if (number := block_index(name)) is not None}
    if numbers != set(range(len(numbers))):
        missing = min(set(range(max(numbers))) - numbers)
        raise UserError(f"{source} has {max(numbers) + 1} blocks, but number {missing} is missing")
    return len(numbers)


def block_index(name: str) -> int | None:
    """The index of the block that a parameter belongs to."""
    match = re.match(r"blocks\.(\d{1,6})\.", name)
    return int(match[1]) if match else None


def exact_ratio(hidden: int, width: int) -> float:
    """The ratio for which int(width * ratio), as timm computes it, is exactly `hidden`."""
    ratio = hidden / width
    while int(width * ratio) < hidden:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def infer_stem(mapped: MappedStateDict, kernel: tuple[int, ...], source: str) -> dict[str, Any]:
    if not any(name.startswith(BACKBONE) for name in mapped.chunks):
        if kernel[2] != kernel[3]:
            raise UserError(
                f"{source} has patches of {kernel[2]} x {kernel[3]}; only square ones are supported"
            )
        return {"stem": "patch", "patch": kernel[2], "channels": kernel[1]}
    blocks: dict[int, set[int]] = {}
    for name in mapped.chunks:
        if match := re.match(rf"{re.escape(BACKBONE)}stages\.(\d+)\.blocks\.(\d+)\.", name):
            blocks.setdefault(int(match[1]), set()).add(int(match[2]))
    depths = tuple(len(blocks[stage]) for stage in sorted(blocks))
    for (kind, patch), stages in STAGES.items():
        if stages == depths:
            channels = require_shape(mapped, f"{BACKBONE}stem.conv.weight", 4, source)[1]
            return {"stem": kind, "patch": patch, "channels": channels}
    raise UserError(
        f"{source} has a ResNet stem of stages {depths}; supported are {list(STAGES.values())}"
    )


def infer_pool(mapped: MappedStateDict, width: int) -> dict[str, Any]:
    """How the tokens are pooled, where the tensors determine it."""
    norm_after_pool = mapped.vit.get("norm_after_pool", False)
    if "attn_pool.latent" in mapped.chunks:
        return {"pool": "map"}
    if "cls_token" not in mapped.chunks or norm_after_pool:
        return {"pool": "avg", "norm_after_pool": norm_after_pool}
    if (mapped.shape("head.weight") or ())[1:] == (2 * width,):
        return {"pool": "cls_avg"}
    return {"pool": "cls" if "dist_token" in mapped.chunks else None}


def infer_head(mapped: MappedStateDict, width: int) -> dict[str, Any]:
    shape, has_hidden = mapped.shape("head.weight"), "pre_logits.fc.weight" in mapped.chunks
    if shape is None and not has_hidden:
        return {"head": "none", "classes": 1000}
    return {
        "head": "mlp" if has_hidden else "linear",
        "classes": width if shape is None else shape[0],
    }


def list_unread_tokens(mapped: MappedStateDict, vit: Mapping[str, Any]) -> list[str]:
    """[CLS] and distillation tokens that no head reads, which Vitrail treats as registers."""
    names = [] if vit["pool"] in ("cls", "cls_avg") else ["cls_token"]
    names += [] if vit["distilled"] else ["dist_token"]
    return [name for name in names if name in mapped.chunks]


def infer_image_size(
    sources: SettingSources, patch: int, source: str
) -> tuple[tuple[int, int], int]:
    """The image size, and the number of prefix tokens in the file's position embedding."""
    mapped, published = sources.mapped, sources.published
    stated = sources.config.vit.get("image") or (published.vit.size if published else None)
    requested = sources.requested.get("image")
    requested = (requested, requested) if isinstance(requested, int) else requested
    shape = mapped.shape("pos_embed")
    if shape is None:
        side = DEFAULT_IMAGE // patch * patch
        return stated or requested or (side, side), 0
    counts = prefix_counts(mapped)
    for size in (stated, *square_sizes(shape[1], counts, patch), requested):
        if size is None or size[0] % patch or size[1] % patch:
            continue
        prefix = shape[1] - size[0] // patch * (size[1] // patch)
        if prefix in counts:
            if stated and size != stated:
                sources.assumed.append(
                    f"image {size[0]} x {size[1]}: from the position embedding, which contradicts "
                    f"the stated {stated[0]} x {stated[1]}"
                )
            return tuple(size), prefix
    raise UserError(
        f"{source} has {shape[1]} positions, which do not form a square of patches; "
        f"pass the image size used in training, for example "
        f"`vit.image=({20 * patch}, {10 * patch})`"
    )


def prefix_counts(mapped: MappedStateDict) -> list[int]:
    """Possible numbers of prefix tokens with positions: [CLS] and distillation, all, or none."""
    class_tokens = sum(name in mapped.chunks for name in ("cls_token", "dist_token"))
    return [class_tokens, class_tokens + (mapped.shape("reg_token") or (1, 0))[1], 0]


def square_sizes(positions: int, counts: list[int], patch: int) -> list[tuple[int, int]]:
    """The square image size for this number of positions, unless several sizes are possible."""
    sides = {math.isqrt(positions - count) for count in counts if positions > count}
    exact = [side for side in sides if any(side * side + count == positions for count in counts)]
    return [(side * patch, side * patch) for side in exact] if len(exact) == 1 else []
