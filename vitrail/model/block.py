"""The encoder block: attention and MLP, each with layer norm, layer scale and drop path."""

import torch
from torch import Tensor, nn

from vitrail.model.attention import Attention
from vitrail.model.config import ViTConfig
from vitrail.model.inplace import InplaceMlp


class LayerScale(nn.Module):
    """One learned factor for each of the D channels, small at first (Touvron et al., 2021)."""

    def __init__(self, width: int, initial: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: in training, drops the branch for random images (Huang et al., 2016)."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        mask = x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - self.rate)  # (B, 1, 1)
        return x * mask / (1 - self.rate)  # divided, so that the expected value stays the same


class Block(nn.Module):
    """Attention mixes the tokens, the MLP transforms each; both are residual and pre-norm."""

    def __init__(self, config: ViTConfig, drop_path: float):
        super().__init__()
        width, eps, scale = config.width, config.eps, config.layer_scale
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = Attention(
            width, config.heads, config.qk_norm, eps, config.dropout, config.attention_dropout
        )
        self.ls1 = nn.Identity() if scale is None else LayerScale(width, scale)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = InplaceMlp(width, config.hidden, config.mlp, config.dropout)
        self.ls2 = nn.Identity() if scale is None else LayerScale(width, scale)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, rope: Tensor | None = None) -> Tensor:  # (B, N, D)
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x), rope)))  # equation 2
        x = x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))  # equation 3
        return x
