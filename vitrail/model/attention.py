"""Self-attention: fast in `forward`, open to the eye in `weights`."""

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.embed import rotate

ALL = slice(None)


class Attention(nn.Module):
    """Every token asks all tokens and takes a mixture of their answers (Vaswani et al., 2017)."""

    def __init__(
        self, width: int, heads: int, qk_norm: bool = False, eps: float = 1e-6, dropout: float = 0.0
    ):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm = nn.LayerNorm(width // heads, eps=eps) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(width // heads, eps=eps) if qk_norm else nn.Identity()
        self.proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rope: Tensor | None = None) -> Tensor:  # (B, N, D)
        q, k, v = self.split(x, rope)  # each (B, h, N, d)
        x = F.scaled_dot_product_attention(q, k, v)  # softmax(q k^T / sqrt(d)) v, never written out
        x = self.proj(x.transpose(1, 2).flatten(2))  # (B, N, D)
        x = self.dropout(x)
        return x

    def split(self, x: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every head."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # each (B, N, h, d)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # each (B, h, N, d)
        return rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope), v

    def weights(
        self,
        x: Tensor,
        heads: Sequence[int] | slice | None = None,
        rows: Sequence[int] | slice | None = None,
        rope: Tensor | None = None,
    ) -> Tensor:
        """The same attention spelled out: how much each token listens to each other one.

        `heads`, and `rows` (the tokens that ask), choose a part of it; every row sums to 1.
        """
        heads, rows = (ALL if choice is None else choice for choice in (heads, rows))
        turn = None if rope is None else rope[..., rows, :]
        q = rotate(self.q_norm(self.part(0, x[:, rows])), turn)[:, heads]  # (B, heads, rows, d)
        k = rotate(self.k_norm(self.part(1, x)), rope)[:, heads]  # (B, heads, N, d)
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1)  # (B, heads, rows, N)

    def part(self, number: int, x: Tensor) -> Tensor:
        """Only the queries (0), the keys (1) or the values (2)."""
        weight, bias = self.qkv.weight.chunk(3)[number], self.qkv.bias.chunk(3)[number]
        x = F.linear(x, weight, bias).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return x
