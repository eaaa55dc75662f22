"""Hugging Face's ViT, DeiT and DINOv2: names, config.json and image processor, read and written."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.data.config import Preprocess
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.zoo.files.find import read_json_object
from vitrail.zoo.layouts.config_json import (
    ACTIVATIONS,
    crop_fraction,
    parse_class_names,
    parse_floats,
    parse_interpolation,
    parse_size,
    translate_value,
)
from vitrail.zoo.layouts.layout import (
    CheckpointConfig,
    Export,
    Layout,
    MappedStateDict,
    check_supported,
    rename_tensors,
)

COMMON_NAMES = {
    "embeddings.cls_token": "cls_token",
    "embeddings.distillation_token": "dist_token",
    "embeddings.register_tokens": "reg_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection.{p}": "patch_embed.proj.{p}",
    "encoder.layer.{i}.attention.attention.query.{p}": "blocks.{i}.attn.qkv.{p}#0",
    "encoder.layer.{i}.attention.attention.key.{p}": "blocks.{i}.attn.qkv.{p}#1",
    "encoder.layer.{i}.attention.attention.value.{p}": "blocks.{i}.attn.qkv.{p}#2",
    "encoder.layer.{i}.attention.output.dense.{p}": "blocks.{i}.attn.proj.{p}",
    "layernorm.{p}": "norm.{p}",
    "pooler.dense.{p}": "pre_logits.fc.{p}",
}
VIT_NAMES = {
    **COMMON_NAMES,
    "encoder.layer.{i}.layernorm_before.{p}": "blocks.{i}.norm1.{p}",
    "encoder.layer.{i}.layernorm_after.{p}": "blocks.{i}.norm2.{p}",
    "encoder.layer.{i}.intermediate.dense.{p}": "blocks.{i}.mlp.fc1.{p}",
    "encoder.layer.{i}.output.dense.{p}": "blocks.{i}.mlp.fc2.{p}",
    "classifier.{p}": "head.{p}",
}
DEIT_NAMES = {  # with the heads of both tokens
    **VIT_NAMES,
    "cls_classifier.{p}": "head.{p}",
    "distillation_classifier.{p}": "head_dist.{p}",
}
DINO_NAMES = {
    **COMMON_NAMES,
    "encoder.layer.{i}.norm1.{p}": "blocks.{i}.norm1.{p}",
    "encoder.layer.{i}.norm2.{p}": "blocks.{i}.norm2.{p}",
    "encoder.layer.{i}.layer_scale1.lambda1": "blocks.{i}.ls1.gamma",
    "encoder.layer.{i}.layer_scale2.lambda1": "blocks.{i}.ls2.gamma",
    "encoder.layer.{i}.mlp.fc1.{p}": "blocks.{i}.mlp.fc1.{p}",
    "encoder.layer.{i}.mlp.fc2.{p}": "blocks.{i}.mlp.fc2.{p}",
    "classifier.{p}": "head.{p}",
}
SWIGLU_NAMES = {
    **DINO_NAMES,
    "encoder.layer.{i}.mlp.weights_in.{p}": "blocks.{i}.mlp.fc1.{p}",
    "encoder.layer.{i}.mlp.weights_out.{p}": "blocks.{i}.mlp.fc2.{p}",
}
READ_ONLY_NAMES = {  # in memory since transformers 5
    "encoder.layer.{i}.attention.q_proj.{p}": "blocks.{i}.attn.qkv.{p}#0",
    "encoder.layer.{i}.attention.k_proj.{p}": "blocks.{i}.attn.qkv.{p}#1",
    "encoder.layer.{i}.attention.v_proj.{p}": "blocks.{i}.attn.qkv.{p}#2",
    "encoder.layer.{i}.attention.o_proj.{p}": "blocks.{i}.attn.proj.{p}",
    "encoder.layer.{i}.mlp.gate_proj.{p}": "blocks.{i}.mlp.fc1.{p}#0",
    "encoder.layer.{i}.mlp.up_proj.{p}": "blocks.{i}.mlp.fc1.{p}#1",
    "encoder.layer.{i}.mlp.down_proj.{p}": "blocks.{i}.mlp.fc2.{p}",
}

FAMILIES = (  # read
    *("vit", "deit", "dinov2", "dinov2_with_registers", "vit_mae", "vit_msn"),
    *("ijepa", "dinov3_vit", "clip", "clip_vision_model", "siglip", "siglip_vision_model"),
)
DEFAULT_EPS = {"dinov2": 1e-6, "dinov3": 1e-5, "clip": 1e-5, "siglip": 1e-6}  # others: 1e-12
DEFAULT_ACTS = {"clip": "quick_gelu", "siglip": "gelu_pytorch_tanh"}  # others: gelu
ROPE_THETA = 100.0  # of DINOv3's rotary positions
RESAMPLING = {2: "bilinear", 3: "bicubic"}  # by Pillow's number
HIDDEN_ACTS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "swiglu": "gelu"}
HIDDEN_ACTS |= {"quick_gelu": "quick_gelu"}
CLASSIFIERS = ("classifier", "cls_classifier", "distillation_classifier")
MAX_MLP_RATIO = 64  # published models have 4; the search for DINOv2's ratio stops at 64


# --- reading -------------------------------------------------------------------------------------


def normalise_layers(name: str) -> str:
    """transformers 5 calls encoder.layer.3 layers.3."""
    return re.sub(r"^layers\.(\d+)\.", r"encoder.layer.\1.", name)


def finish_huggingface_mapping(mapped: MappedStateDict, names: list[str], source: str) -> None:
    """A DINOv2 classifier whose weights for the mean of the patches are zero reads [CLS] only."""
    head = mapped.chunks.get("head.weight", {}).get(0)
    kernel = mapped.shape("patch_embed.proj.weight")
    if head is None or kernel is None or head.shape[1:] != (2 * kernel[0],):
        return
    width = kernel[0]
    if not head.read()[:, width:].any():
        mapped.chunks["head.weight"][0] = head.add_transform(
            (head.shape[0], width), lambda x: x[:, :width]
        )


def finish_dinov3_mapping(mapped: MappedStateDict, names: list[str], source: str) -> None:
    """Without a gate, the only chunk of the MLP's first layer is all of it."""
    for name, chunks in mapped.chunks.items():
        if ".mlp.fc1." in name and set(chunks) == {1}:
            chunks[0] = chunks.pop(1)
    finish_huggingface_mapping(mapped, names, source)


def parse_huggingface_config(config: Mapping[str, Any], folder: Path) -> CheckpointConfig:
    family = config["model_type"]
    if family not in FAMILIES:
        raise UserError(
            f"Hugging Face's {family} cannot be loaded; supported are {', '.join(FAMILIES)}"
        )
    if config.get("pooler_act", "tanh") != "tanh":
        raise UserError(f"a pooler with {config['pooler_act']} is not supported; only tanh is")
    config = {**config, **(config.get("vision_config") or {})}  # CLIP and SigLIP have two towers
    stem = re.match("[a-z]+(?:v[23])?", family)
    kind = stem[0] if stem else family
    vit: dict[str, Any] = {
        "image": parse_size(config.get("image_size", 224)),
        "width": config.get("hidden_size", 768),
        "depth": config.get("num_hidden_layers", 12),
        "heads": config.get("num_attention_heads", 12),
        "mlp": translate_value(
            "hidden_act", config.get("hidden_act", DEFAULT_ACTS.get(kind, "gelu")), ACTIVATIONS
        ),
        "eps": float(config.get("layer_norm_eps", DEFAULT_EPS.get(kind, 1e-12))),
        "layer_scale": float(config.get("layerscale_value", 1.0)),
    }
    if family == "dinov3_vit":
        check_dinov3(config)
        vit |= {"positions": "rotary", "pool": "cls"}
    labels = config.get("id2label") or {}
    if all(re.fullmatch(r"LABEL_\d+", str(label)) for label in labels.values()):
        labels = {}  # placeholders that transformers writes without class names
    assumed: list[str] = []
    processor = read_json_object(folder / "preprocessor_config.json")
    return CheckpointConfig(
        vit=vit,
        classes=parse_class_names(labels, assumed),
        preprocess=parse_processor(processor, assumed) if processor else None,
        names=(str(config.get("_name_or_path", "")),),
        assumed=tuple(assumed),
    )


def check_dinov3(config: Mapping[str, Any]) -> None:
    """Raises at settings of DINOv3 that the published models do not have."""
    rope = config.get("rope_parameters") or {}
    theta = config.get("rope_theta", rope.get("rope_theta", ROPE_THETA))
    for name, found, wanted in (
        ("rope_theta", float(theta), ROPE_THETA),
        ("apply_layernorm", config.get("apply_layernorm", True), True),
    ):
        if found != wanted:
            raise UserError(f"DINOv3 with {name} {found} is not supported; only {wanted} is")


def parse_processor(processor: Mapping[str, Any], assumed: list[str]) -> dict[str, Any]:
    """Settings of `Preprocess`, which always resizes the short side and crops the centre."""
    factor = processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 1
    if abs(factor * 255 - 1) > 1e-6:
        raise UserError(
            f"preprocessor_config.json scales pixels by {factor}; only 1/255 is supported"
        )
    settings: dict[str, Any] = {"mean": (0.0,), "std": (1.0,), "crop": 1.0}
    if processor.get("do_normalize", True):
        settings["mean"] = parse_floats(processor.get("image_mean", (0.5, 0.5, 0.5)))
        settings["std"] = parse_floats(processor.get("image_std", (0.5, 0.5, 0.5)))
    size, distorts = parse_edge(processor.get("size", 224))
    if processor.get("do_center_crop", "crop_size" in processor):
        cropped, _ = parse_edge(processor.get("crop_size", size))
        settings["crop"] = crop_fraction(cropped, size)
    if distorts and processor.get("do_resize", True):
        assumed.append(
            "resizing: Hugging Face squeezes the image into a square, Vitrail crops its centre"
        )
    resample = RESAMPLING.get(processor.get("resample", 2), str(processor.get("resample")))
    return {**settings, "interpolation": parse_interpolation(resample, assumed)}


def parse_edge(size: Any) -> tuple[int, bool]:
    """The length of the short side, and whether resizing ignores the aspect ratio."""
    if isinstance(size, int):
        return size, True
    if "shortest_edge" in size:
        return int(size["shortest_edge"]), False
    return min(int(size["height"]), int(size["width"])), True


# --- writing -------------------------------------------------------------------------------------


def export_huggingface(
    vit: ViTConfig,
    state: dict[str, Tensor],
    classes: tuple[str, ...] | None,
    preprocess: Preprocess | None,
) -> Export:
    """The state dict, and the config files that `from_pretrained` reads."""
    check_expressible(vit)
    family, table = choose_family(vit)
    tensors = rename_tensors(reshape_tensors(vit, state, family), table)
    if family.startswith("dinov2"):
        tensors["embeddings.mask_token"] = torch.zeros(1, vit.width)
    if vit.head == "linear":
        tensors = {
            name if name.startswith(CLASSIFIERS) else f"{family}.{name}": x
            for name, x in tensors.items()
        }
    config = build_config(vit, family, classes)
    if preprocess is None:
        return Export(tensors=tensors, json_files={"config.json": config})
    processor = build_processor(preprocess)
    return Export(
        tensors=tensors,
        json_files={"config.json": config, "preprocessor_config.json": processor},
    )


def build_config(vit: ViTConfig, family: str, classes: tuple[str, ...] | None) -> dict[str, Any]:
    """The content of config.json."""
    config: dict[str, Any] = {
        "architectures": [choose_class(vit, family)],
        "model_type": family,
        "hidden_size": vit.width,
        "num_hidden_layers": vit.depth,
        "num_attention_heads": vit.heads,
        "hidden_act": HIDDEN_ACTS[vit.mlp],
        "layer_norm_eps": vit.eps,
        "image_size": vit.size[0] if vit.size[0] == vit.size[1] else list(vit.size),
        "patch_size": vit.patch,
        "num_channels": vit.channels,
        "qkv_bias": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "dtype": "float32",
    }
    if vit.head == "linear":
        labels = classes or tuple(f"LABEL_{number}" for number in range(vit.classes))
        config["id2label"] = {str(number): label for number, label in enumerate(labels)}
        config["label2id"] = {label: number for number, label in enumerate(labels)}
    if family.startswith("dinov2"):
        config |= {"mlp_ratio": integer_mlp_ratio(vit), "use_swiglu_ffn": vit.mlp == "swiglu"}
        config["layerscale_value"] = 1.0 if vit.layer_scale is None else vit.layer_scale
    else:
        config["intermediate_size"] = vit.hidden
    if family == "dinov2_with_registers":
        config["num_register_tokens"] = vit.registers
    return config


def check_expressible(vit: ViTConfig) -> None:
    """Raises at features that none of the three model families has."""
    is_dinov2 = needs_dinov2(vit)
    check_supported(
        "Hugging Face's ViT, DeiT or DINOv2",
        {
            f"pool {vit.pool}": not vit.has_cls,
            f"pool {vit.pool} without a head": vit.pool == "cls_avg" and vit.head == "none",
            f"positions {vit.positions}": vit.positions == "rotary",
            "qk_norm": vit.qk_norm,
            "pre_norm": vit.pre_norm,
            f"stem {vit.stem}": vit.stem != "patch",
            "a distillation token with registers, layer scale or SwiGLU": vit.distilled
            and is_dinov2,
            "DINOv2 on images that are not square": is_dinov2 and vit.size[0] != vit.size[1],
        },
    )


def needs_dinov2(vit: ViTConfig) -> bool:
    """Whether the model has something that only DINOv2's classes have."""
    scaled = vit.layer_scale is not None
    return bool(vit.registers or scaled or vit.mlp == "swiglu" or vit.pool == "cls_avg")


def choose_family(vit: ViTConfig) -> tuple[str, Mapping[str, str]]:
    """The model_type, which is also the prefix of the backbone's parameters, and its names."""
    if vit.distilled:
        return "deit", {name: ours for name, ours in DEIT_NAMES.items() if name != "classifier.{p}"}
    if needs_dinov2(vit):
        family = "dinov2_with_registers" if vit.registers else "dinov2"
        if vit.mlp != "swiglu":
            return family, DINO_NAMES
        return family, {name: ours for name, ours in SWIGLU_NAMES.items() if ".mlp.fc" not in name}
    return "vit", VIT_NAMES


def choose_class(vit: ViTConfig, family: str) -> str:
    """The class of transformers that computes this model."""
    if vit.distilled:
        return "DeiTForImageClassificationWithTeacher"
    name = {"vit": "ViT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}[
        family
    ]
    return f"{name}ForImageClassification" if vit.head == "linear" else f"{name}Model"


def reshape_tensors(vit: ViTConfig, state: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """Adds the tensors that the family requires, with values that do not change the output."""
    state = dict(state)
    width = vit.width
    if "pos_embed" not in state:
        state["pos_embed"] = torch.zeros(1, vit.class_tokens + vit.patches, width)
    if vit.head == "mlp":  # ViTModel ends with the hidden layer, which it calls pooler
        weight, bias = state.pop("head.weight"), state.pop("head.bias")
        if family != "vit" or bias.any() or not torch.equal(weight, torch.eye(width)):
            raise UserError(
                "Hugging Face has no hidden layer before the head; use `vit.head='linear'`"
            )
    if family.startswith("dinov2"):
        if vit.layer_scale is None:
            for i in range(vit.depth):
                state |= {f"blocks.{i}.ls{k}.gamma": torch.ones(width) for k in (1, 2)}
        if "head.weight" in state and vit.pool == "cls":  # its head also reads their mean
            state["head.weight"] = torch.cat(
                [state["head.weight"], torch.zeros_like(state["head.weight"])], dim=1
            )
    return state


def integer_mlp_ratio(vit: ViTConfig) -> int:
    """DINOv2's config has an integer MLP ratio, of which SwiGLU takes two thirds."""
    for ratio in range(1, MAX_MLP_RATIO + 1):
        hidden = vit.width * ratio
        if vit.mlp == "swiglu":
            hidden = (int(hidden * 2 / 3) + 7) // 8 * 8
        if hidden == vit.hidden:
            return ratio
    raise UserError(
        f"Hugging Face's DINOv2 has no MLP of hidden width {vit.hidden} at width {vit.width}; "
        f"try `to='timm'`"
    )


def build_processor(preprocess: Preprocess) -> dict[str, Any]:
    """The content of preprocessor_config.json: resizes the short side, crops, normalises."""
    height, width = preprocess.height, preprocess.width
    if height != width:
        edge: dict[str, int] = {
            "height": math.floor(height / preprocess.crop),
            "width": math.floor(width / preprocess.crop),
        }
    else:
        edge = {"shortest_edge": math.floor(height / preprocess.crop)}
    resample = {name: number for number, name in RESAMPLING.items()}
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": edge,
        "resample": resample[preprocess.interpolation],
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }


LAYOUT = Layout(
    name="huggingface",
    patch_weight="embeddings.patch_embeddings.projection.weight",
    names=DEIT_NAMES | SWIGLU_NAMES | READ_ONLY_NAMES,
    normalise=normalise_layers,
    finish=finish_huggingface_mapping,
    config_key="model_type",
    parse_config=parse_huggingface_config,
    export=export_huggingface,
)

DINOV3_LAYOUT = Layout(
    name="huggingface-dinov3",
    patch_weight="embeddings.patch_embeddings.weight",
    names={
        "embeddings.cls_token": "cls_token",
        "embeddings.register_tokens": "reg_token",
        "embeddings.patch_embeddings.{p}": "patch_embed.proj.{p}",
        "layer.{i}.norm1.{p}": "blocks.{i}.norm1.{p}",
        "layer.{i}.attention.q_proj.{p}": "blocks.{i}.attn.qkv.{p}#0",
        "layer.{i}.attention.k_proj.{p}": "blocks.{i}.attn.qkv.{p}#1",
        "layer.{i}.attention.v_proj.{p}": "blocks.{i}.attn.qkv.{p}#2",
        "layer.{i}.attention.o_proj.{p}": "blocks.{i}.attn.proj.{p}",
        "layer.{i}.layer_scale1.lambda1": "blocks.{i}.ls1.gamma",
        "layer.{i}.norm2.{p}": "blocks.{i}.norm2.{p}",
        "layer.{i}.mlp.gate_proj.{p}": "blocks.{i}.mlp.fc1.{p}#0",
        "layer.{i}.mlp.up_proj.{p}": "blocks.{i}.mlp.fc1.{p}#1",
        "layer.{i}.mlp.down_proj.{p}": "blocks.{i}.mlp.fc2.{p}",
        "layer.{i}.layer_scale2.lambda1": "blocks.{i}.ls2.gamma",
        "norm.{p}": "norm.{p}",
        "classifier.{p}": "head.{p}",
    },
    normalise=lambda name: name.removeprefix("model."),
    finish=finish_dinov3_mapping,
)
