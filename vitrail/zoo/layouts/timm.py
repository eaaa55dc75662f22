"""timm's layout, which DeiT, DINO and MAE share: names and config.json, read and written."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.data.config import Preprocess
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.zoo.layouts.config_json import (
    ACTIVATIONS,
    parse_class_names,
    parse_floats,
    parse_interpolation,
    parse_size,
    translate_value,
)
from vitrail.zoo.layouts.layout import CheckpointConfig, Export, Layout, MappedStateDict

NAMES = {  # Vitrail's parameters are named as timm's; DeiT, DINO and MAE use the same names
    "cls_token": "cls_token",
    "dist_token": "dist_token",
    "reg_token": "reg_token",
    "pos_embed": "pos_embed",
    "patch_embed.proj.{p}": "patch_embed.proj.{p}",
    "patch_embed.backbone.{r}": "patch_embed.backbone.{r}",
    "norm_pre.{p}": "norm_pre.{p}",
    "blocks.{i}.norm1.{p}": "blocks.{i}.norm1.{p}",
    "blocks.{i}.attn.qkv.{p}": "blocks.{i}.attn.qkv.{p}",
    "blocks.{i}.attn.q_norm.{p}": "blocks.{i}.attn.q_norm.{p}",
    "blocks.{i}.attn.k_norm.{p}": "blocks.{i}.attn.k_norm.{p}",
    "blocks.{i}.attn.proj.{p}": "blocks.{i}.attn.proj.{p}",
    "blocks.{i}.ls1.gamma": "blocks.{i}.ls1.gamma",
    "blocks.{i}.norm2.{p}": "blocks.{i}.norm2.{p}",
    "blocks.{i}.mlp.fc1.{p}": "blocks.{i}.mlp.fc1.{p}",
    "blocks.{i}.mlp.fc2.{p}": "blocks.{i}.mlp.fc2.{p}",
    "blocks.{i}.ls2.gamma": "blocks.{i}.ls2.gamma",
    "norm.{p}": "norm.{p}",
    "attn_pool.{r}": "attn_pool.{r}",
    "pre_logits.fc.{p}": "pre_logits.fc.{p}",
    "head.{p}": "head.{p}",
    "head_dist.{p}": "head_dist.{p}",
}
VARIANT_NAMES = {  # of DeiT III, DINOv2, DINOv3, and of other classes of timm
    "fc_norm.{p}": "norm.{p}",  # a norm after average pooling
    "blocks.{i}.gamma_1": "blocks.{i}.ls1.gamma",  # DeiT-III
    "blocks.{i}.gamma_2": "blocks.{i}.ls2.gamma",
    "register_tokens": "reg_token",  # DINOv2
    "blocks.{i}.mlp.w12.{p}": "blocks.{i}.mlp.fc1.{p}",
    "blocks.{i}.mlp.w3.{p}": "blocks.{i}.mlp.fc2.{p}",
    "linear_head.{p}": "head.{p}",  # DINOv2 with a head, of its own code
    "storage_tokens": "reg_token",  # DINOv3
    "blocks.{i}.attn.q_bias": "blocks.{i}.attn.qkv.bias#0",  # timm's DINOv3; keys have no bias
    "blocks.{i}.attn.v_bias": "blocks.{i}.attn.qkv.bias#2",
}
UNUSED = {
    r"rope_embed\.periods": "computed from the config",
    r"blocks\.\d+\.attn\.qkv\.bias_mask": "a mask that zeroes the bias of keys, applied on loading",
}

# timm's plain ViTs. Models named rope, rpn or xp share parameter names but compute something else.
PLAIN_MODELS = re.compile(
    r"(vit|deit3?|flexivit)_[a-z]+\d*m?2?(_plus)?(_distilled)?(_patch\d+|_r\d+_s\d+)?"
    r"(_plus|_reg\d+|_gap|_map|_clip|_quickgelu|_siglip|_dinov[23]|_qkvb)*(_\d+)?(_in21k|_miil)*"
)
# Settings by model name that no tensor shows; later matches override earlier ones.
SETTINGS_BY_NAME: dict[str, dict[str, Any]] = {
    r".*_clip_.*": {"eps": 1e-5},
    r".*_clip_quickgelu_.*": {"mlp": "quick_gelu"},
    r".*_dinov3.*": {"eps": 1e-5, "positions": "rotary", "pool": "avg"},
    r"vit_huge_plus_patch16_dinov3.*": {"heads": 20},
    r"vit_base_patch16_gap_224": {"heads": 16},
    r"vit_giantopt_.*": {"heads": 16, "mlp": "gelu_tanh"},
    r"vit_(base_patch32|so400m_patch16|large_patch16)_siglip.*": {"mlp": "gelu_tanh"},
    r"vit_large_patch16_siglip(_gap)?_(256|384)": {"mlp": "gelu"},
}
POOLS = {"token": "cls", "cls": "cls", "avg": "avg", "map": "map"}
USED_ARGUMENTS = {"img_size", "num_heads", "act_layer", "global_pool"}
# Arguments of timm's models that tensors show, or that matter in training only.
REDUNDANT_ARGUMENTS = {
    "num_classes", "in_chans", "patch_size", "embed_dim", "depth", "mlp_ratio", "qkv_bias",
    "qk_norm", "init_values", "class_token", "reg_tokens", "no_embed_class", "pre_norm", "fc_norm",
    "pos_embed", "dynamic_img_size", "drop_rate", "pos_drop_rate", "patch_drop_rate",
    "proj_drop_rate", "attn_drop_rate", "drop_path_rate", "weight_init", "fix_init",
    "num_reg_tokens", "use_fc_norm",
}  # fmt: skip

# The timm models that are built on export, by width, patch and ResNet stem. Their functions fix
# what model_args cannot express: norm, MLP class, rotary embedding.
SIZE_NAMES = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge", 1408: "giant"}
SIZE_PATCHES = {"tiny": (16,), "small": (8, 16, 32), "base": (8, 16, 32), "large": (14, 16, 32)}
SIZE_PATCHES |= {"huge": (14,), "giant": (14,)}
HYBRID_MODELS = {("r26", 32): "vit_small_r26_s32_224", ("r50", 16): "vit_base_r50_s16_224"}
HYBRID_MODELS |= {("r50", 32): "vit_large_r50_s32_224"}
CLIP_MODEL = "vit_base_patch16_clip_224"
SWIGLU_MODEL = "vit_giant_patch14_dinov2"
ROTARY_MODEL = "vit_small_patch16_dinov3"
DISTILLED_MODEL = "deit_base_distilled_patch16_224"


# --- reading -------------------------------------------------------------------------------------


def normalise_blocks(name: str) -> str:
    """DINOv2 numbers blocks within chunks: blocks.1.7 is block 7."""
    return re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)


def finish_timm_mapping(mapped: MappedStateDict, names: list[str], source: str) -> None:
    """Settings that only names reveal, and DINOv3's bias of keys, which its code masks to zero."""
    if "fc_norm.weight" in names:
        mapped.vit["norm_after_pool"] = True
    if "rope_embed.periods" in names:
        mapped.vit.update(positions="rotary", eps=1e-5)
        mapped.assumed.append("positions rotary, eps 1e-05: as in DINOv3's code")
    if any(name.endswith(".bias_mask") for name in names):
        for name, chunks in mapped.chunks.items():
            if name.endswith(".attn.qkv.bias"):
                chunks[0] = chunks[0].add_transform(chunks[0].shape, zero_key_bias)


def zero_key_bias(x: Tensor) -> Tensor:
    q, k, v = x.chunk(3)
    return torch.cat([q, torch.zeros_like(k), v])


def parse_timm_config(config: Mapping[str, Any], folder: Path) -> CheckpointConfig:
    """Newer files nest the pretraining settings in pretrained_cfg, older ones are flat."""
    name = str(config["architecture"])
    pretrained = config.get("pretrained_cfg", config)
    if not PLAIN_MODELS.fullmatch(name):
        raise UserError(f"timm's {name} is not a plain ViT and cannot be loaded; choose another")
    vit: dict[str, Any] = {"mlp": "gelu", "eps": 1e-6}  # of timm's VisionTransformer
    for pattern, settings in SETTINGS_BY_NAME.items():
        if re.fullmatch(pattern, name):
            vit |= settings
    if pretrained.get("input_size"):
        vit["image"] = parse_size(pretrained["input_size"][-2:])
    if pool := config.get("global_pool") or pretrained.get("global_pool"):
        vit["pool"] = pool
    vit |= parse_model_args(name, dict(config.get("model_args") or {}))
    if "pool" in vit:
        vit["pool"] = translate_value("global_pool", vit["pool"], POOLS)
    tag = pretrained.get("tag")
    labels = config.get("label_names") or pretrained.get("label_names") or pretrained.get("labels")
    assumed: list[str] = []
    return CheckpointConfig(
        vit=vit,
        classes=parse_class_names(labels, assumed),
        preprocess=parse_pretrained_cfg(pretrained, assumed) if pretrained.get("mean") else None,
        names=(f"{name}.{tag}",) if tag else (name,),
        assumed=tuple(assumed),
    )


def parse_model_args(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    vit: dict[str, Any] = {}
    if "img_size" in arguments:
        vit["image"] = parse_size(arguments["img_size"])
    if "num_heads" in arguments:
        vit["heads"] = arguments["num_heads"]
    if "act_layer" in arguments:
        vit["mlp"] = translate_value("act_layer", arguments["act_layer"], ACTIVATIONS)
    if "global_pool" in arguments:
        vit["pool"] = arguments["global_pool"]
    if arguments.get("pos_embed") in ("", "none"):
        vit["positions"] = "none"
    if unknown := arguments.keys() - REDUNDANT_ARGUMENTS - USED_ARGUMENTS:
        raise UserError(f"timm's {name} was built with {sorted(unknown)}, which is not supported")
    return vit


def parse_pretrained_cfg(pretrained: Mapping[str, Any], assumed: list[str]) -> dict[str, Any]:
    """Settings of `Preprocess`."""
    if pretrained.get("crop_mode", "center") != "center":
        assumed.append(f"crop mode {pretrained['crop_mode']}: a centre crop is used instead")
    return {
        "crop": float(pretrained.get("crop_pct") or 1.0),
        "interpolation": parse_interpolation(pretrained.get("interpolation", "bicubic"), assumed),
        "mean": parse_floats(pretrained["mean"]),
        "std": parse_floats(pretrained["std"]),
    }


# --- writing -------------------------------------------------------------------------------------


def export_timm(
    vit: ViTConfig,
    state: dict[str, Tensor],
    classes: tuple[str, ...] | None,
    preprocess: Preprocess | None,
) -> Export:
    """The state dict, and the config.json that timm.create_model("local-dir:...") reads."""
    if vit.head == "mlp":
        raise UserError("timm has no hidden layer before its head; use `vit.head='linear'`")
    if vit.pool == "cls_avg":
        raise UserError(
            "timm's heads read [CLS] or the mean of the patches, not both; try `to='huggingface'`"
        )
    state = dict(state)
    build = rotary_arguments if vit.positions == "rotary" else plain_arguments
    architecture, arguments = build(vit, state)
    classes_count = 0 if vit.head == "none" else vit.classes
    pool = {"cls": "token", "avg": "avg", "map": "map"}[vit.pool]
    stem = "patch_embed.proj" if vit.stem == "patch" else "patch_embed.backbone.stem.conv"
    pretrained: dict[str, Any] = {
        "tag": "vitrail",
        "custom_load": False,
        "input_size": [vit.channels, *vit.size],
        "fixed_input_size": vit.positions != "rotary",
        "num_classes": classes_count,
        "pool_size": None,
        "first_conv": stem,
        "classifier": ["head", "head_dist"] if vit.distilled else "head",
    }
    if preprocess is not None:
        pretrained |= {
            "interpolation": preprocess.interpolation,
            "crop_pct": preprocess.crop,
            "crop_mode": "center",
            "mean": list(preprocess.mean),
            "std": list(preprocess.std),
        }
    config: dict[str, Any] = {
        "architecture": architecture,
        "num_classes": classes_count,
        "num_features": vit.width,
        "global_pool": pool,
        **({"label_names": list(classes)} if classes else {}),
        "model_args": arguments,
        "pretrained_cfg": pretrained,
    }
    return Export(tensors=state, json_files={"config.json": config})


def plain_arguments(vit: ViTConfig, state: dict[str, Tensor]) -> tuple[str, dict[str, Any]]:
    """timm's model name and arguments; changes `state` to timm's names and shapes."""
    arguments: dict[str, Any] = {
        "img_size": list(vit.size),
        "patch_size": vit.patch if vit.stem == "patch" else 1,
        "embed_dim": vit.width,
        "depth": vit.depth,
        "num_heads": vit.heads,
        "mlp_ratio": vit.mlp_ratio * (2 if vit.mlp == "swiglu" else 1),
        "pre_norm": vit.pre_norm,
    }
    if vit.mlp in ("gelu_tanh", "quick_gelu"):
        arguments["act_layer"] = vit.mlp
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
    if vit.pre_norm and state.pop("patch_embed.proj.bias").any():
        raise UserError("timm has no patch projection bias with pre_norm; this model has one")
    if "pos_embed" not in state:
        arguments["pos_embed"] = "none"
    else:
        arguments |= export_positions(vit, state)
    if vit.norm_after_pool:
        for kind in ("weight", "bias"):
            state[f"fc_norm.{kind}"] = state.pop(f"norm.{kind}")
    return choose_timm_model(vit), arguments


def choose_timm_model(vit: ViTConfig) -> str:
    """The timm model whose function builds this architecture."""
    if vit.distilled:
        if vit.registers or vit.eps == 1e-5 or vit.mlp == "swiglu" or vit.stem != "patch":
            raise UserError("timm's distilled ViTs have no registers, SwiGLU or ResNet stem")
        return DISTILLED_MODEL
    if vit.small_stem:
        raise UserError(f"timm has no ViT with stem {vit.stem}; use Vitrail's own format")
    if vit.stem != "patch":
        if vit.eps == 1e-5 or vit.mlp == "swiglu":
            raise UserError("timm's ViTs with a ResNet stem have eps 1e-6 and GELU only")
        return HYBRID_MODELS[vit.stem, vit.patch]
    if vit.mlp == "swiglu":
        if vit.layer_scale is None or vit.eps == 1e-5:
            raise UserError("timm has SwiGLU with layer scale and eps 1e-6 only")
        return SWIGLU_MODEL
    if vit.eps == 1e-5:
        return CLIP_MODEL
    size = SIZE_NAMES.get(vit.width, "base")
    patch = vit.patch if vit.patch in SIZE_PATCHES[size] else SIZE_PATCHES[size][-1]
    return f"vit_{size}_patch{patch}_224"


def export_positions(vit: ViTConfig, state: dict[str, Tensor]) -> dict[str, Any]:
    """Adds zero positions for registers; drops those of all prefix tokens if they are zero."""
    positions = state["pos_embed"]
    prefix, patches = positions[:, : vit.class_tokens], positions[:, vit.class_tokens :]
    if vit.prefix and not vit.distilled and not prefix.any():
        state["pos_embed"] = patches
        return {"no_embed_class": True}
    zeros = positions.new_zeros(1, vit.registers, vit.width)
    state["pos_embed"] = torch.cat([prefix, zeros, patches], dim=1)
    return {}


def rotary_arguments(vit: ViTConfig, state: dict[str, Tensor]) -> tuple[str, dict[str, Any]]:
    """For DINOv3, in timm the class Eva: other parameter names, and always a [CLS] token."""
    if vit.eps != 1e-5 or vit.layer_scale is None or vit.mlp != "gelu" or vit.pool == "map":
        raise UserError("timm has rotary positions with eps 1e-5, layer scale and exact GELU only")
    if vit.distilled or vit.pre_norm or vit.stem != "patch" or vit.norm_after_pool:
        raise UserError("timm has rotary positions in plain models only")
    registers = vit.registers
    if vit.pool == "avg":  # the first register is what timm calls [CLS]
        if not registers:
            raise UserError(
                "timm has rotary positions with a [CLS] token only; this model has none"
            )
        tokens, registers = state.pop("reg_token"), registers - 1
        state["cls_token"] = tokens[:, :1]
        if registers:
            state["reg_token"] = tokens[:, 1:]
    has_bias = any(state[f"blocks.{i}.attn.qkv.bias"].any() for i in range(vit.depth))
    for number in range(vit.depth):
        rename_rotary_block(f"blocks.{number}.", state, has_bias)
    arguments = {
        "img_size": list(vit.size),
        "patch_size": vit.patch,
        "embed_dim": vit.width,
        "depth": vit.depth,
        "num_heads": vit.heads,
        "mlp_ratio": vit.mlp_ratio,
        "qkv_bias": has_bias,
        "qk_norm": vit.qk_norm,
        "init_values": vit.layer_scale,
        "num_reg_tokens": registers,
        "global_pool": "token" if vit.pool == "cls" else "avg",
    }
    return ROTARY_MODEL, arguments


def rename_rotary_block(prefix: str, state: dict[str, Tensor], has_bias: bool) -> None:
    q, k, v = state.pop(f"{prefix}attn.qkv.bias").chunk(3)
    if k.any():
        raise UserError("timm has rotary positions without a key bias; this model has one")
    if has_bias:
        state |= {f"{prefix}attn.q_bias": q, f"{prefix}attn.v_bias": v}
    for kind in ("1", "2"):
        state[f"{prefix}gamma_{kind}"] = state.pop(f"{prefix}ls{kind}.gamma")


LAYOUT = Layout(
    name="timm",
    patch_weight="patch_embed.proj.weight",
    names=NAMES | VARIANT_NAMES,
    normalise=normalise_blocks,
    unused=UNUSED,
    finish=finish_timm_mapping,
    config_key="architecture",
    parse_config=parse_timm_config,
    export=export_timm,
    eps=(1e-6, 1e-5),
)
