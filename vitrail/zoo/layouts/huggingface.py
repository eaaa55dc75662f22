"""A model as Hugging Face has it: ViT, DeiT or DINOv2, with labels and image processor."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail.data.config import Preprocess
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.zoo.layouts import names
from vitrail.zoo.layouts.names import inverse, translate

ACTS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "swiglu": "gelu"}
RESAMPLING = {"bilinear": 2, "bicubic": 3}  # as Pillow counts


def to_hugging_face(
    vit: ViTConfig, state: Mapping[str, Tensor], classes: tuple[str, ...] | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the config."""
    check(vit)
    family, table, body = kind(vit)
    tensors = pieces(arranged(vit, state, family), table)
    top = ("classifier", "cls_classifier", "distillation_classifier")
    if vit.head == "linear":
        tensors = {
            name if name.startswith(top) else f"{body}.{name}": x for name, x in tensors.items()
        }
    config: dict[str, Any] = {
        "architectures": [architecture(vit, family)],
        "model_type": family,
        "hidden_size": vit.width,
        "num_hidden_layers": vit.depth,
        "num_attention_heads": vit.heads,
        "hidden_act": ACTS[vit.mlp],
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
        config |= {"mlp_ratio": whole_ratio(vit), "use_swiglu_ffn": vit.mlp == "swiglu"}
        config["layerscale_value"] = 1.0 if vit.layer_scale is None else vit.layer_scale
    else:
        config["intermediate_size"] = vit.hidden
    if family == "dinov2_with_registers":
        config["num_register_tokens"] = vit.registers
    return tensors, config


def check(vit: ViTConfig) -> None:
    """Stops at what none of its classes computes."""
    odd = {
        f"pool {vit.pool}": vit.pool != "cls",
        f"positions {vit.positions}": vit.positions == "rotary",
        "qk_norm": vit.qk_norm,
        "pre_norm": vit.pre_norm,
        f"stem {vit.stem}": vit.stem != "patch",
        "distillation beside registers or layer scale": vit.distilled
        and bool(vit.registers or vit.layer_scale is not None or vit.mlp == "swiglu"),
    }
    for what, present in odd.items():
        if present:
            raise UserError(f"Hugging Face's ViT, DeiT and DINOv2 have no {what}; try --to timm")


def kind(vit: ViTConfig) -> tuple[str, Mapping[str, str], str]:
    """The family, its names, and what stands before them when a head is there."""
    if vit.distilled:
        table = {**names.HUGGING_FACE_DEIT}
        del table["classifier.{p}"]
        return "deit", table, "deit"
    if vit.registers or vit.layer_scale is not None or vit.mlp == "swiglu":
        if vit.size[0] != vit.size[1]:
            raise UserError("Hugging Face's DINOv2 takes square images only; try --to timm")
        table = names.HUGGING_FACE_DINO
        if vit.mlp == "swiglu":
            table = {
                theirs: ours
                for theirs, ours in names.HUGGING_FACE_SWIGLU.items()
                if ".mlp.fc" not in theirs
            }
        family = "dinov2_with_registers" if vit.registers else "dinov2"
        return family, table, family
    return "vit", names.HUGGING_FACE_VIT, "vit"


def architecture(vit: ViTConfig, family: str) -> str:
    if vit.distilled:
        return "DeiTForImageClassificationWithTeacher"
    name = {"vit": "ViT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}[
        family
    ]
    return f"{name}ForImageClassification" if vit.head == "linear" else f"{name}Model"


def arranged(vit: ViTConfig, state: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """The same function in the shapes that this family has."""
    state = dict(state)
    width = vit.width
    if "pos_embed" not in state:
        state["pos_embed"] = torch.zeros(1, vit.readers + vit.patches, width)
    if vit.head == "mlp":  # its models end in the hidden layer
        weight, bias = state.pop("head.weight"), state.pop("head.bias")
        if family != "vit" or bias.any() or not torch.equal(weight, torch.eye(width)):
            raise UserError(
                'Hugging Face has no head behind a hidden layer; convert with head "linear"'
            )
    if family.startswith("dinov2"):
        if vit.layer_scale is None:
            for i in range(vit.depth):
                state |= {f"blocks.{i}.ls{k}.gamma": torch.ones(width) for k in (1, 2)}
        if "head.weight" in state:  # its head reads the average of the patches too
            state["head.weight"] = torch.cat(
                [state["head.weight"], torch.zeros_like(state["head.weight"])], dim=1
            )
    return state


def pieces(state: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """Every tensor under its name there; queries, keys and values apart."""
    back = inverse(table)
    found: dict[str, Tensor] = {}
    for name, x in state.items():
        if theirs := translate(name, back):
            found[theirs] = x
            continue
        for number, one in enumerate(x.chunk(3)):
            part = translate(f"{name}#{number}", back)
            assert part is not None, f"{name} has no name there"
            found[part] = one
    if any("layer_scale" in name for name in found):  # DINOv2 has it in any case
        found["embeddings.mask_token"] = torch.zeros(1, state["cls_token"].shape[-1])
    return found


def whole_ratio(vit: ViTConfig) -> int:
    """DINOv2 counts the MLP in whole widths, and cuts a third off where it is gated."""
    for ratio in range(1, 65):
        hidden = vit.width * ratio
        if vit.mlp == "swiglu":
            hidden = (int(hidden * 2 / 3) + 7) // 8 * 8
        if hidden == vit.hidden:
            return ratio
    raise UserError(
        f"Hugging Face's DINOv2 has no MLP of {vit.hidden} in a width of {vit.width}; try --to timm"
    )


def processor(view: Preprocess) -> dict[str, Any]:
    """preprocessor_config.json: resize the short side, cut the centre, normalise."""
    height, width = view.height, view.width
    if height != width:
        edge: dict[str, int] = {
            "height": math.floor(height / view.crop),
            "width": math.floor(width / view.crop),
        }
    else:
        edge = {"shortest_edge": math.floor(height / view.crop)}
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": edge,
        "resample": RESAMPLING[view.interpolation],
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(view.mean),
        "image_std": list(view.std),
    }
