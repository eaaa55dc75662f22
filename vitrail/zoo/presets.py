"""The table of named architectures, as papers call them."""

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from vitrail.arguments import check_arguments
from vitrail.errors import UserError
from vitrail.model.config import (
    HeadKind,
    MlpKind,
    PoolKind,
    PositionKind,
    StemKind,
    ViTConfig,
)

# Two names may differ in case only: "g" (giant) and "G" (gigantic) are two models of one paper.
SIZES: dict[str, dict[str, Any]] = {
    "Ti": {"width": 192, "depth": 12, "heads": 3},  # Touvron et al., 2021 (DeiT)
    "S": {"width": 384, "depth": 12, "heads": 6},
    "B": {"width": 768, "depth": 12, "heads": 12},  # Dosovitskiy et al., 2021
    "L": {"width": 1024, "depth": 24, "heads": 16},
    "H": {"width": 1280, "depth": 32, "heads": 16},
    "g": {"width": 1408, "depth": 40, "heads": 16, "mlp_ratio": 48 / 11},  # Zhai et al., 2022
    "G": {"width": 1664, "depth": 48, "heads": 16, "mlp_ratio": 64 / 13},
    # From here on for small images, of 8 to 128 pixels: see SMALL_IMAGES.
    "Pico": {"width": 64, "depth": 4, "heads": 2},
    "Nano": {"width": 64, "depth": 6, "heads": 2},
    "Micro": {"width": 128, "depth": 6, "heads": 4},
    "Mini": {"width": 192, "depth": 9, "heads": 3},
    # Hassani et al., 2021 (ViT-Lite-7)
    "Lite": {"width": 256, "depth": 7, "heads": 4, "mlp_ratio": 2.0},
}
SMALL_SIZES = ("Pico", "Nano", "Micro", "Mini", "Lite")

PATCHES = {
    "Ti": (16,),
    "S": (32, 16, 14, 8),
    "B": (32, 16, 14, 8),
    "L": (32, 16, 14),
    "H": (16, 14),
    "g": (16, 14),
    "G": (14,),
    "Pico": (2, 4),
    "Nano": (2, 4, 8, 16),
    "Micro": (2, 4, 8, 16),
    "Mini": (2, 4, 8, 16),
    "Lite": (4, 8),
}

SMALL_IMAGES = {2: 8, 4: 32, 8: 64, 16: 128}  # image size of a small model by its patch, pixels

# Settings in which published families differ from the plain ViT of the paper, other than size.
DEIT: dict[str, Any] = {"drop_path": 0.1}
DINO2: dict[str, Any] = {"image": 518, "patch": 14, "layer_scale": 1e-5, "head": "none"}
DINO3: dict[str, Any] = {
    "positions": "rotary",
    "registers": 4,
    "layer_scale": 1e-5,
    "eps": 1e-5,
    "head": "none",
}
SIGLIP: dict[str, Any] = {"pool": "map", "mlp": "gelu_tanh", "head": "none"}
CLIP: dict[str, Any] = {"pre_norm": True, "eps": 1e-5, "head": "none"}
SIMPLE: dict[str, Any] = {"positions": "sincos", "pool": "avg"}
R9: dict[str, Any] = {**SIMPLE, "stem": "r9", "depth": 2, "mlp_ratio": 2.0}
R9_PATCHES = (4, 8)
MAE: dict[str, Any] = {"pool": "avg", "norm_after_pool": True, "registers": 1, "drop_path": 0.1}
SWIGLU: dict[str, Any] = {"mlp": "swiglu", "mlp_ratio": 8 / 3}
PAPER: dict[str, Any] = {"dropout": 0.1, "head": "mlp", "classes": 21843}

# The first stages of a ResNet-9, then two blocks on few tokens: what `train` chooses
HYBRID_SIZES = {f"R9+{size}": {**SIZES[size], **R9} for size in ("Nano", "Micro", "Mini")}

PRESETS: dict[str, dict[str, Any]] = {
    f"{size}/{patch}": {
        **SIZES[size],
        "patch": patch,
        "image": SMALL_IMAGES[patch] if size in SMALL_SIZES else 224,
    }
    for size, patches in PATCHES.items()
    for patch in patches
} | {
    "R26+S/32": {**SIZES["S"], "stem": "r26", "patch": 32},
    "R50+B/16": {**SIZES["B"], "stem": "r50", "patch": 16},
    "R50+L/32": {**SIZES["L"], "stem": "r50", "patch": 32},
    # Xiao et al., 2021: convolutions of stride 2 replace the patches and one block
    "Conv+Ti/16": {**SIZES["Ti"], "depth": 11, "stem": "conv", "patch": 16},
    "Conv+S/16": {**SIZES["S"], "depth": 11, "stem": "conv", "patch": 16},
    **{
        f"{size}/{patch}": {**settings, "image": 32, "patch": patch}
        for size, settings in HYBRID_SIZES.items()
        for patch in R9_PATCHES
    },
    "B/16 in21k": {**SIZES["B"], "patch": 16, **PAPER},  # Dosovitskiy et al., pretraining
    "DeiT-Ti/16 distilled": {**SIZES["Ti"], "distilled": True, **DEIT},  # Touvron et al., 2021
    "DeiT-S/16 distilled": {**SIZES["S"], "distilled": True, **DEIT},
    "DeiT-B/16 distilled": {**SIZES["B"], "distilled": True, **DEIT},
    "DeiT3-S/16": {**SIZES["S"], "layer_scale": 1e-6, "drop_path": 0.05},  # Touvron et al., 2022
    "DeiT3-B/16": {**SIZES["B"], "layer_scale": 1e-6, "drop_path": 0.2},
    "Simple-S/16": {**SIZES["S"], **SIMPLE},  # Beyer et al., 2022
    "MAE-B/16": {**SIZES["B"], **MAE},  # He et al., 2022, fine-tuned: no head reads its [CLS]
    "MAE-L/16": {**SIZES["L"], **MAE, "drop_path": 0.2},
    "CLIP-B/16": {**SIZES["B"], **CLIP},  # Radford et al., 2021, as LAION trains it
    "CLIP-L/14": {**SIZES["L"], **CLIP, "patch": 14},
    "SigLIP-B/16": {**SIZES["B"], **SIGLIP},  # Zhai et al., 2023
    "DINOv2-S/14": {**SIZES["S"], **DINO2},  # Oquab et al., 2024
    "DINOv2-B/14": {**SIZES["B"], **DINO2},
    "DINOv2-L/14": {**SIZES["L"], **DINO2},
    "DINOv2-g/14": {"width": 1536, "depth": 40, "heads": 24, **SWIGLU, **DINO2},
    "DINOv2-S/14 reg4": {**SIZES["S"], **DINO2, "registers": 4},  # Darcet et al., 2024
    "DINOv2-B/14 reg4": {**SIZES["B"], **DINO2, "registers": 4},
    "DINOv3-S/16": {**SIZES["S"], **DINO3},  # Siméoni et al., 2025
    "DINOv3-B/16": {**SIZES["B"], **DINO3},
    "DINOv3-L/16": {**SIZES["L"], **DINO3},
}


@check_arguments
def preset(
    name: str,
    *,
    image: int | tuple[int, int] | None = None,
    patch: int | None = None,
    channels: int | None = None,
    classes: int | None = None,
    width: int | None = None,
    depth: int | None = None,
    heads: int | None = None,
    mlp_ratio: float | None = None,
    mlp: MlpKind | None = None,
    positions: PositionKind | None = None,
    pool: PoolKind | None = None,
    norm_after_pool: bool | None = None,
    registers: int | None = None,
    distilled: bool | None = None,
    layer_scale: float | None = None,
    drop_path: float | None = None,
    dropout: float | None = None,
    attention_dropout: float | None = None,
    qk_norm: bool | None = None,
    pre_norm: bool | None = None,
    eps: float | None = None,
    head: HeadKind | None = None,
    stem: StemKind | None = None,
) -> ViTConfig:
    """The architecture that papers call `name`, with any setting of `ViTConfig` changed.

    None keeps the value of the preset; `ViTConfig` explains every setting. Case matters where two
    names differ in nothing else: "g/14" (giant, 1.0 billion parameters) and "G/14" (gigantic,
    1.8 billion). Other names are also found in another case.

    >>> vitrail.preset("S/16", image=160, classes=10).tokens
    101
    """
    arguments = locals()
    changes = {key: arguments[key] for key in _SETTINGS if arguments[key] is not None}
    return ViTConfig(**{**PRESETS[find_preset(name)], **changes})


_SETTINGS = [setting.name for setting in fields(ViTConfig)]


def find_preset(name: str) -> str:
    """The name in PRESETS: exactly `name`, or the only one that differs from it in case."""
    if name in PRESETS:
        return name
    matches = [candidate for candidate in PRESETS if candidate.lower() == name.lower()]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(
            f"{name!r} is ambiguous: {' and '.join(matches)} are different models; choose one"
        )
    near = _find_nearest(name, list(PRESETS))
    raise UserError(f"no model is called {name!r}; the nearest are {near}")


def _find_nearest(word: str, candidates: list[str]) -> str:
    """The three nearest, all spellings of each that differ in case only."""
    by_lowercase: dict[str, list[str]] = {}
    for candidate in candidates:
        by_lowercase.setdefault(candidate.lower(), []).append(candidate)
    close = get_close_matches(word.lower(), by_lowercase, n=3, cutoff=0.4)
    return ", ".join(name for key in close or list(by_lowercase)[:3] for name in by_lowercase[key])
