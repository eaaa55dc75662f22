"""Rollout, relevance and Grad-CAM without options, equal to the package's; for a ViT with [CLS]."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail import ViT


def rollout(layers: Sequence[Tensor]) -> Tensor:  # attention of each layer: (B, h, N, N)
    identity = torch.eye(layers[0].shape[-1])
    flow = identity
    for attention in layers:
        flow = (attention.mean(dim=1) + identity) / 2 @ flow
    return flow[:, 0, 1:]  # (B, P)


def attention_and_gradients(
    model: ViT, x: Tensor, label: int
) -> tuple[list[Tensor], Sequence[Tensor]]:
    """The attention weights A of each layer, and dy/dA for the logit y of the class."""
    z, layers = model.embed(x.clone().requires_grad_())[0], []
    for block in model.blocks:
        q, k, v = block.attn.split(block.norm1(z))  # each (B, h, N, d)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)  # (B, h, N, N)
        z = z + block.attn.proj((weights @ v).transpose(1, 2).flatten(2))  # equation 2
        z = z + block.mlp(block.norm2(z))  # equation 3
        layers.append(weights)
    y = model.classify(z)[:, label]
    return layers, torch.autograd.grad(y.sum(), layers)


def relevance(model: ViT, x: Tensor, label: int) -> Tensor:
    flow = torch.eye(model.config.tokens)  # R = I
    for weights, gradient in zip(*attention_and_gradients(model, x, label), strict=True):
        helpful = (gradient * weights).clamp(min=0).mean(dim=1)  # (B, N, N)
        flow = flow + helpful @ flow
    return flow[:, 0, 1:].detach()  # (B, P)


def grad_cam(model: ViT, x: Tensor, label: int) -> Tensor:
    z = model.embed(x.clone().requires_grad_())[0]
    *early, last = model.blocks
    for block in early:
        z = block(z)
    tokens = last.norm1(z)  # the input of the last attention, (B, N, D)
    z = z + last.attn(tokens)
    z = z + last.mlp(last.norm2(z))
    (gradient,) = torch.autograd.grad(model.classify(z)[:, label].sum(), tokens)
    weights = gradient[:, 1:].mean(dim=1, keepdim=True)  # (B, 1, D)
    heatmap = (weights * tokens)[:, 1:].sum(dim=-1).detach()  # (B, P)
    return (heatmap - heatmap.mean(dim=1, keepdim=True)).clamp(min=0)  # (B, P)
