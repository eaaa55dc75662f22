"""Attention pooling: one learned query attends to all patches and returns the image's vector."""

import math

import torch
from torch import Tensor, nn

from vitrail.model.config import ViTConfig
from vitrail.model.fused import scaled_dot_product_attention
from vitrail.model.mlp import Mlp


class AttentionPool(nn.Module):
    """The MAP head (Zhai et al., 2022): cross-attention from one learned query, then an MLP."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.latent = nn.Parameter(torch.zeros(1, 1, width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=config.eps)
        self.mlp = Mlp(width, config.hidden, config.mlp)

    def forward(self, x: Tensor) -> Tensor:  # (B, P, D)
        q, k, v = self.split(x)
        x = scaled_dot_product_attention(q, k, v)  # (B, h, 1, d)
        x = self.proj(x.transpose(1, 2).flatten(2))  # (B, 1, D)
        x = x + self.mlp(self.norm(x))
        return x[:, 0]  # (B, D)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (B, P, D)
        """The learned query, and the keys and values of all patches."""
        q = self.q(self.latent).expand(x.shape[0], -1, -1)  # (B, 1, D)
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, h, 1, d)
        k, v = self.kv(x).unflatten(-1, (2, self.heads, -1)).unbind(2)  # each (B, P, h, d)
        return q, k.transpose(1, 2), v.transpose(1, 2)

    def weights(self, x: Tensor) -> Tensor:  # (B, P, D)
        """The attention weights that `forward` applies: each head's share for each patch."""
        q, k, _ = self.split(x)
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1)  # (B, h, 1, P)
