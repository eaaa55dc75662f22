"""Small models of every kind with random weights, and attention written out by hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT

TINY: dict[str, Any] = {
    "image": 16,
    "patch": 4,
    "classes": 5,
    "width": 24,
    "depth": 3,
    "heads": 3,
    "mlp_ratio": 2.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "registers": {"registers": 2},
    "distilled": {"distilled": True},
    "avg": {"pool": "avg"},
    "avg after": {"pool": "avg", "norm_after_pool": True, "registers": 1},
    "cls and avg": {"pool": "cls_avg", "registers": 1},
    "map": {"pool": "map", "registers": 1},
    "rotary": {"positions": "rotary", "registers": 2},
    "rotary avg": {"positions": "rotary", "pool": "avg"},
    "wide": {"image": (8, 20)},
    "qk norm": {"qk_norm": True},
    "sincos": {"positions": "sincos"},
    "no positions": {"positions": "none"},
    "scaled": {"layer_scale": 0.1, "mlp": "swiglu", "pre_norm": True},
    "grey": {"channels": 1},
}


def small(kind: str = "plain", **changes: Any) -> ViT:
    """A small random model in training mode, with dropout: explanations must not depend on it."""
    torch.manual_seed(0)
    model = ViT(ViTConfig(**{**TINY, "dropout": 0.1, **KINDS[kind], **changes}))
    for x in model.parameters():
        noise = torch.randn(x.shape)
        x.data = x.data + 0.3 * noise if x.ndim > 1 else 0.5 + 0.2 * noise
    return model


def pictures(model: ViT, count: int = 2) -> Tensor:
    config = model.config
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, config.channels, *config.size, generator=generator)


@contextmanager
def spelled_out() -> Iterator[list[Tensor]]:
    """Replaces fused attention by the textbook's formula; the list receives its weights."""
    maps: list[Tensor] = []

    def written(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
        maps.append(scores.exp() / scores.exp().sum(dim=-1, keepdim=True))
        return torch.einsum("bhij,bhjd->bhid", maps[-1], v)

    with patch("torch.nn.functional.scaled_dot_product_attention", written):
        yield maps
