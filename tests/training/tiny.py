"""Small models and endless batches that the tests of training share."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.training.config import TrainConfig
from vitrail.training.learner import Learner
from vitrail.training.loop import Step, train_steps

PATCHES, CLASSES = 6, 3


class Tiny(nn.Module):
    """One transformer block over six patches, with dropout, a norm, a token and fused matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        x = self.embed(x.flatten(1).unflatten(1, (PATCHES, 4)))
        if keep is not None:
            x = x.gather(1, keep[:, :, None].expand(-1, -1, 8))
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        x = x + self.mlp(x)
        return self.head(x[:, 0])


MATRICES = {"qkv.weight": 3, "mlp.0.weight": 1, "mlp.3.weight": 1}


def mlp() -> nn.Module:
    parts = [nn.Flatten(), nn.Linear(24, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3)]
    return nn.Sequential(*parts, nn.Linear(16, CLASSES))


MODELS = {"transformer": (Tiny, MATRICES), "mlp": (mlp, {"1.weight": 1})}


def learner(config: TrainConfig, kind: str = "transformer") -> Learner:
    torch.manual_seed(config.seed)
    build, matrices = MODELS[kind]
    return Learner(build(), config, matrices=matrices)


def batches(start: int = 0, size: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches as functions of their number, without end."""
    while True:
        random = torch.Generator().manual_seed(start)
        labels = torch.randint(CLASSES, (size,), generator=random)
        images = torch.randn(size, 1, 4, 6, generator=random) + labels[:, None, None, None]
        yield images, labels
        start += 1


def run(
    learner: Learner, config: TrainConfig, total: int = 20, start: int = 0, **options: Any
) -> list[Step]:
    return list(train_steps(learner, batches(start), config, total, start=start, **options))
