"""Equalises the channels of activations before they are quantised, without changing the model.

A channel ten times as large as the others leaves these a tenth of the levels. Where an input comes
from a linear operation, its channels can be divided by any scales if the next weight is multiplied
by them (Xiao et al., 2023, SmoothQuant).
"""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from vitrail.model.block import Block
from vitrail.model.vit import ViT

BATCH = 16  # images in a forward pass
SMALLEST = 1e-5  # of a channel's largest value, against division by zero


def equalize_channels(model: ViT, images: Tensor) -> None:
    """Changes the weights in place so that the channels of all activations have similar ranges."""
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    layers = [layer for one in blocks for layer in (one.attn.qkv, one.attn.proj, one.mlp.fc1)]
    largest = measure_channels(model, layers, images)
    with torch.no_grad():
        for block in blocks:
            for norm, layer in ((block.norm1, block.attn.qkv), (block.norm2, block.mlp.fc1)):
                scale = choose_scale(largest[layer], layer.weight)
                norm.weight.div_(scale)
                norm.bias.div_(scale)
                layer.weight.mul_(scale)
            scale = choose_scale(largest[block.attn.proj], block.attn.proj.weight)
            values = slice(-len(scale), None)  # rows of the values, after queries and keys
            block.attn.qkv.weight[values].div_(scale[:, None])
            if block.attn.qkv.bias is not None:
                block.attn.qkv.bias[values].div_(scale)
            block.attn.proj.weight.mul_(scale)


def choose_scale(largest: Tensor, weight: Tensor) -> Tensor:
    """One scale per channel: halfway between equal activations and equal weights."""
    return (largest / weight.abs().amax(dim=0).clamp(min=SMALLEST)).clamp(min=SMALLEST).sqrt()


def measure_channels(
    model: ViT, layers: list[nn.Linear], images: Tensor
) -> dict[nn.Linear, Tensor]:
    """The largest absolute value of every channel of each layer's input."""
    largest = {layer: torch.zeros(layer.in_features) for layer in layers}

    def record(layer: nn.Linear) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found = inputs[0].detach().abs().flatten(0, -2).amax(dim=0)
            largest[layer] = torch.maximum(largest[layer], found)

        return hook

    with ExitStack() as hooks, torch.inference_mode():
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(record(layer)).remove)
        for batch in images.split(BATCH):
            model(batch)
    return {layer: x.clone() for layer, x in largest.items()}
