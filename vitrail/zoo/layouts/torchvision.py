"""torchvision's VisionTransformer: its parameter names, read and written; it has no config file."""

import torch
from torch import Tensor

from vitrail.data.config import Preprocess
from vitrail.model.config import ViTConfig
from vitrail.zoo.layouts.layout import Export, Layout, check_supported, rename_tensors

NAMES = {
    "class_token": "cls_token",
    "encoder.pos_embedding": "pos_embed",
    "conv_proj.{p}": "patch_embed.proj.{p}",
    "encoder.layers.encoder_layer_{i}.ln_1.{p}": "blocks.{i}.norm1.{p}",
    "encoder.layers.encoder_layer_{i}.self_attention.in_proj_{p}": "blocks.{i}.attn.qkv.{p}",
    "encoder.layers.encoder_layer_{i}.self_attention.out_proj.{p}": "blocks.{i}.attn.proj.{p}",
    "encoder.layers.encoder_layer_{i}.ln_2.{p}": "blocks.{i}.norm2.{p}",
    "encoder.layers.encoder_layer_{i}.mlp.0.{p}": "blocks.{i}.mlp.fc1.{p}",
    "encoder.layers.encoder_layer_{i}.mlp.3.{p}": "blocks.{i}.mlp.fc2.{p}",
    "encoder.ln.{p}": "norm.{p}",
    "heads.pre_logits.{p}": "pre_logits.fc.{p}",
    "heads.head.{p}": "head.{p}",
}
READ_ONLY_NAMES = {  # before torchvision 0.13
    "encoder.layers.encoder_layer_{i}.mlp.linear_1.{p}": "blocks.{i}.mlp.fc1.{p}",
    "encoder.layers.encoder_layer_{i}.mlp.linear_2.{p}": "blocks.{i}.mlp.fc2.{p}",
}


def export_torchvision(
    vit: ViTConfig,
    state: dict[str, Tensor],
    classes: tuple[str, ...] | None,
    preprocess: Preprocess | None,
) -> Export:
    """The state dict alone: torchvision keeps class names and preprocessing in its code."""
    check_supported(
        "torchvision's VisionTransformer",
        {
            f"pool {vit.pool}": vit.pool != "cls",
            f"positions {vit.positions}": vit.positions == "rotary",
            f"mlp {vit.mlp}": vit.mlp != "gelu",
            "registers": bool(vit.registers),
            "a distillation token": vit.distilled,
            "layer scale": vit.layer_scale is not None,
            "qk_norm": vit.qk_norm,
            "pre_norm": vit.pre_norm,
            f"stem {vit.stem}": vit.stem != "patch",
            f"{vit.channels} channels": vit.channels != 3,
            "images that are not square": vit.size[0] != vit.size[1],
            "a model without head": vit.head == "none",
        },
    )
    if "pos_embed" not in state:
        state = {**state, "pos_embed": torch.zeros(1, 1 + vit.patches, vit.width)}
    return Export(tensors=rename_tensors(state, NAMES))


LAYOUT = Layout(
    name="torchvision",
    patch_weight="conv_proj.weight",
    names=NAMES | READ_ONLY_NAMES,
    export=export_torchvision,
    eps=(1e-6,),
)
