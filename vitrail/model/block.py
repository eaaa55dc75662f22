"""MLP, layer scale, stochastic depth, and the block they form."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.attention import Attention
from vitrail.model.config import Mlp as MlpKind
from vitrail.model.config import ViTConfig


class Mlp(nn.Module):
    """Two linear layers with a bend between them, applied to every token by itself."""

    def __init__(self, width: int, hidden: int, kind: MlpKind, dropout: float = 0.0):
        super().__init__()
        self.kind = kind
        self.fc1 = nn.Linear(width, 2 * hidden if kind == "swiglu" else hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D)
        x = self.bend(self.fc1(x))  # (B, N, M)
        x = self.dropout(self.fc2(self.dropout(x)))  # (B, N, D)
        return x

    def bend(self, x: Tensor) -> Tensor:
        if self.kind == "swiglu":  # one half opens and closes the other (Shazeer, 2020)
            gate, x = x.chunk(2, dim=-1)
            return F.silu(gate) * x
        form = "tanh" if self.kind == "gelu_tanh" else "none"
        if torch.is_grad_enabled():
            return F.gelu(x, approximate=form)
        # without gradients nobody needs x again: written over it, the largest tensor is there once
        bent: Tensor = torch.ops.aten.gelu_(x, approximate=form)
        return bent


class LayerScale(nn.Module):
    """One learned factor for each number of a token, small at first (Touvron et al., 2021)."""

    def __init__(self, width: int, start: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """In training, leaves a branch out for some images of the batch (Huang et al., 2016)."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        kept = x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - self.rate)  # (B, 1, 1)
        return x * kept / (1 - self.rate)  # divided, so that the expectation stays


class Block(nn.Module):
    """Tokens talk to each other, then each thinks for itself; both are added to what they were."""

    def __init__(self, config: ViTConfig, drop_path: float):
        super().__init__()
        width, eps, scale = config.width, config.eps, config.layer_scale
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = Attention(width, config.heads, config.qk_norm, eps, config.dropout)
        self.ls1 = nn.Identity() if scale is None else LayerScale(width, scale)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = Mlp(width, config.hidden, config.mlp, config.dropout)
        self.ls2 = nn.Identity() if scale is None else LayerScale(width, scale)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, rope: Tensor | None = None) -> Tensor:  # (B, N, D)
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x), rope)))  # equation 2
        x = x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))  # equation 3
        return x
