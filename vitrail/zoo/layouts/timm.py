"""A model as timm has it: its names, and the config.json that its own loader reads."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail.data.config import Preprocess
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig

SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge", 1408: "giant"}
PATCHES = {"tiny": (16,), "small": (8, 16, 32), "base": (8, 16, 32), "large": (14, 16, 32)}
PATCHES |= {"huge": (14,), "giant": (14,)}
HYBRIDS = {("r26", 32): "vit_small_r26_s32_224", ("r50", 16): "vit_base_r50_s16_224"}
HYBRIDS |= {("r50", 32): "vit_large_r50_s32_224"}

# timm's functions hold what a JSON file cannot say: which norm, which MLP, which rotation.
CLIP, SWIGLU, ROTARY = (
    "vit_base_patch16_clip_224",
    "vit_giant_patch14_dinov2",
    "vit_small_patch16_dinov3",
)
DISTILLED = "deit_base_distilled_patch16_224"


def to_timm(
    vit: ViTConfig,
    state: Mapping[str, Tensor],
    classes: tuple[str, ...] | None,
    view: Preprocess | None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the config."""
    if vit.head == "mlp":
        raise UserError('timm has no hidden layer before its head; convert with head "linear"')
    state = dict(state)
    name, arguments = rotary(vit, state) if vit.positions == "rotary" else plain(vit, state)
    count = 0 if vit.head == "none" else vit.classes
    pool = {"cls": "token", "avg": "avg", "map": "map"}[vit.pool]
    pretrained: dict[str, Any] = {
        "tag": "vitrail",
        "custom_load": False,
        "input_size": [vit.channels, *vit.size],
        "fixed_input_size": vit.positions != "rotary",
        "num_classes": count,
        "pool_size": None,
        "first_conv": "patch_embed.proj"
        if vit.stem == "patch"
        else "patch_embed.backbone.stem.conv",
        "classifier": ["head", "head_dist"] if vit.distilled else "head",
    }
    if view is not None:
        pretrained |= {
            "interpolation": view.interpolation,
            "crop_pct": view.crop,
            "crop_mode": "center",
            "mean": list(view.mean),
            "std": list(view.std),
        }
    config: dict[str, Any] = {
        "architecture": name,
        "num_classes": count,
        "num_features": vit.width,
        "global_pool": pool,
        **({"label_names": list(classes)} if classes else {}),
        "model_args": arguments,
        "pretrained_cfg": pretrained,
    }
    return state, config


def plain(vit: ViTConfig, state: dict[str, Tensor]) -> tuple[str, dict[str, Any]]:
    """The architecture's name and arguments; brings the tensors into timm's arrangement."""
    name, patch = base(vit), 1 if vit.stem != "patch" else vit.patch
    arguments: dict[str, Any] = {
        "img_size": list(vit.size),
        "patch_size": patch,
        "embed_dim": vit.width,
        "depth": vit.depth,
        "num_heads": vit.heads,
        "mlp_ratio": vit.mlp_ratio * (2 if vit.mlp == "swiglu" else 1),
        "pre_norm": vit.pre_norm,
    }
    if vit.mlp == "gelu_tanh":
        arguments["act_layer"] = "gelu_tanh"
    if vit.layer_scale is not None:
        arguments["init_values"] = vit.layer_scale
    if vit.qk_norm:
        arguments["qk_norm"] = True
    if vit.pool != "cls":
        arguments |= {"global_pool": vit.pool, "class_token": False}
    if vit.pool == "avg":
        arguments["fc_norm"] = vit.norm_after_pool
    if vit.registers:
        arguments["reg_tokens"] = vit.registers
    if vit.pre_norm:
        drop_zero(state, "patch_embed.proj.bias", "timm has no bias of patches beside pre_norm")
    if "pos_embed" not in state:
        arguments["pos_embed"] = "none"
    else:
        arguments |= place_positions(vit, state)
    if vit.norm_after_pool:
        for kind in ("weight", "bias"):
            state[f"fc_norm.{kind}"] = state.pop(f"norm.{kind}")
    return name, arguments


def base(vit: ViTConfig) -> str:
    if vit.distilled:
        if vit.registers or vit.eps == 1e-5 or vit.mlp == "swiglu" or vit.stem != "patch":
            raise UserError("timm has a distilled ViT without registers, SwiGLU or ResNet only")
        return DISTILLED
    if vit.stem != "patch":
        if vit.eps == 1e-5 or vit.mlp == "swiglu":
            raise UserError("timm has a ResNet before a ViT with eps 1e-6 and GELU only")
        return HYBRIDS[vit.stem, vit.patch]
    if vit.mlp == "swiglu":
        if vit.layer_scale is None or vit.eps == 1e-5:
            raise UserError("timm has SwiGLU with layer scale and eps 1e-6 only")
        return SWIGLU
    if vit.eps == 1e-5:
        return CLIP
    size = SIZES.get(vit.width, "base")
    patch = vit.patch if vit.patch in PATCHES[size] else PATCHES[size][-1]
    return f"vit_{size}_patch{patch}_224"


def place_positions(vit: ViTConfig, state: dict[str, Tensor]) -> dict[str, Any]:
    """Positions for registers too, which are zero; or for no token in front, if all are zero."""
    positions = state["pos_embed"]
    front, patches = positions[:, : vit.readers], positions[:, vit.readers :]
    if vit.prefix and not vit.distilled and not front.any():
        state["pos_embed"] = patches
        return {"no_embed_class": True}
    zeros = positions.new_zeros(1, vit.registers, vit.width)
    state["pos_embed"] = torch.cat([front, zeros, patches], dim=1)
    return {}


def rotary(vit: ViTConfig, state: dict[str, Tensor]) -> tuple[str, dict[str, Any]]:
    """DINOv3, which in timm is another class with names of its own and a [CLS] in any case."""
    if vit.eps != 1e-5 or vit.layer_scale is None or vit.mlp != "gelu" or vit.pool == "map":
        raise UserError("timm has rotary positions with eps 1e-5, layer scale and exact GELU only")
    if vit.distilled or vit.pre_norm or vit.stem != "patch" or vit.norm_after_pool:
        raise UserError("timm has rotary positions in plain models only")
    registers = vit.registers
    if vit.pool == "avg":  # the first token that nobody reads is its [CLS]
        if not registers:
            raise UserError("timm has rotary positions beside a [CLS] only; this model has none")
        tokens, registers = state.pop("reg_token"), registers - 1
        state["cls_token"] = tokens[:, :1]
        if registers:
            state["reg_token"] = tokens[:, 1:]
    biased = any(state[f"blocks.{i}.attn.qkv.bias"].any() for i in range(vit.depth))
    for number in range(vit.depth):
        front = f"blocks.{number}."
        q, k, v = state.pop(f"{front}attn.qkv.bias").chunk(3)
        if k.any():
            raise UserError("timm has rotary positions without a bias of keys; this model has one")
        if biased:
            state |= {f"{front}attn.q_bias": q, f"{front}attn.v_bias": v}
        for kind in ("1", "2"):
            state[f"{front}gamma_{kind}"] = state.pop(f"{front}ls{kind}.gamma")
    arguments = {
        "img_size": list(vit.size),
        "patch_size": vit.patch,
        "embed_dim": vit.width,
        "depth": vit.depth,
        "num_heads": vit.heads,
        "mlp_ratio": vit.mlp_ratio,
        "qkv_bias": biased,
        "qk_norm": vit.qk_norm,
        "init_values": vit.layer_scale,
        "num_reg_tokens": registers,
        "global_pool": "token" if vit.pool == "cls" else "avg",
    }
    return ROTARY, arguments


def drop_zero(state: dict[str, Tensor], name: str, why: str) -> None:
    if state.pop(name).any():
        raise UserError(f"{why}; this model has one")
