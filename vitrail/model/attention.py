"""Multi-head self-attention: fused in `forward`, written out in `weights`."""

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.embed import apply_rotary
from vitrail.model.fused import scaled_dot_product_attention

ALL = slice(None)


class Attention(nn.Module):
    """Each token takes a weighted mean of the values of all tokens (Vaswani et al., 2017)."""

    def __init__(
        self,
        width: int,
        heads: int,
        qk_norm: bool = False,
        eps: float = 1e-6,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ):
        super().__init__()
        self.heads = heads
        self.attention_dropout = attention_dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm = nn.LayerNorm(width // heads, eps=eps) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(width // heads, eps=eps) if qk_norm else nn.Identity()
        self.proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rope: Tensor | None = None) -> Tensor:  # (B, N, D)
        q, k, v = self.split(x, rope)  # each (B, h, N, d)
        rate = self.attention_dropout if self.training else 0.0
        x = scaled_dot_product_attention(q, k, v, dropout_p=rate)  # softmax(q k^T / sqrt(d)) v
        x = self.proj(x.transpose(1, 2).flatten(2))  # (B, N, D)
        x = self.dropout(x)
        return x

    def split(self, x: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every head; `rope` rotates queries and keys."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # each (B, N, h, d)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # each (B, h, N, d)
        return apply_rotary(self.q_norm(q), rope), apply_rotary(self.k_norm(k), rope), v

    def weights(
        self,
        x: Tensor,
        heads: Sequence[int] | slice | None = None,
        rows: Sequence[int] | slice | None = None,
        rope: Tensor | None = None,
    ) -> Tensor:
        """The attention weights that `forward` applies: how much each token attends to each other.

        `heads` and `rows` (the query tokens) select a part; None is all. Every row sums to 1, as
        attention dropout is left out.
        """
        heads, rows = (ALL if choice is None else choice for choice in (heads, rows))
        query_rope = None if rope is None else rope[..., rows, :]
        q = apply_rotary(self.q_norm(self.project(x[:, rows], 0)), query_rope)
        k = apply_rotary(self.k_norm(self.project(x, 1)), rope)
        q, k = q[:, heads], k[:, heads]
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1)  # (B, heads, rows, N)

    def project(self, x: Tensor, part: int) -> Tensor:  # (B, rows, D)
        """Only the queries (0), the keys (1) or the values (2) of these tokens."""
        weight, bias = self.qkv.weight.chunk(3)[part], self.qkv.bias.chunk(3)[part]
        x = F.linear(x, weight, bias).unflatten(-1, (self.heads, -1))  # (B, rows, h, d)
        return x.transpose(1, 2)  # (B, h, rows, d)
