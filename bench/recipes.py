"""The published training recipe of each peer, for any training time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vitrail.data.config import Augment

LEARNING_RATES = (3e-4, 1e-3, 3e-3)  # of a search; the best is chosen by validation accuracy
CONVNET = "resnet-9"
Rate = Literal["published", "best", "all"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    lr: float  # peak learning rate
    batch: int
    optimizer: Literal["adam", "adamw", "sgd"]
    weight_decay: float = 0.0
    schedule: Literal["constant", "linear", "cosine"]
    warmup: float = 0.0  # fraction of the time with a linearly rising learning rate
    final: float = 0.0  # final learning rate as a fraction of the peak
    smoothing: float = 0.0  # of the labels
    dropout: float = 0.0
    clip: float = 0.0  # maximum gradient norm; 0 disables clipping
    augment: Augment
    origin: str  # where it was published
    searched: tuple[float, ...] = LEARNING_RATES  # tried beside the published one
    # the best of them by data set, in the longest search in bench/results: 4 minutes on CIFAR-10,
    # 2 on Fashion-MNIST
    best: Mapping[str, float] = field(default_factory=dict)

    def learning_rates(self, data: str, rates: Sequence[Rate]) -> list[float]:
        """The rates to train with; where the best is not known, it is searched for."""
        search = {self.lr, *self.searched}
        chosen = {
            "published": {self.lr},
            "best": {self.best[data]} if data in self.best else search,
            "all": search,
        }
        return sorted(set().union(*(chosen[rate] for rate in rates)))


RECIPES = {
    "tutorial": Recipe(
        lr=1e-3,
        batch=128,
        optimizer="adamw",
        weight_decay=0.01,  # torch's default
        schedule="constant",
        augment=Augment(),
        origin="common from-scratch tutorials: AdamW, constant learning rate, no augmentation",
        best={"cifar10": 1e-3, "fashion-mnist": 1e-3},
    ),
    "vit-pytorch": Recipe(
        lr=1e-4,
        batch=512,
        optimizer="adam",
        schedule="cosine",
        dropout=0.1,
        augment=Augment(flip=0.5, shift=0.125, policy="rand", magnitude=14 / 30),
        origin="kentaroy47/vision-transformers-cifar10, which trains this model on CIFAR-10",
        best={"cifar10": 3e-3, "fashion-mnist": 3e-3},
    ),
    "transformers": Recipe(
        lr=5e-5,
        batch=8,
        optimizer="adamw",
        schedule="linear",
        clip=1.0,
        augment=Augment(),
        origin="the defaults of its Trainer, which has no published recipe from scratch",
        best={"cifar10": 3e-4, "fashion-mnist": 3e-4},
    ),
    "timm": Recipe(
        lr=5e-4,
        batch=128,
        optimizer="adamw",
        weight_decay=3e-2,
        schedule="cosine",
        warmup=10 / 200,
        final=0.02,  # 1e-5 at the published peak
        smoothing=0.1,
        augment=Augment(
            flip=0.5, scale=0.8, policy="rand", magnitude=0.3, erase=0.25, mixup=0.8, cutmix=1.0
        ),
        origin="ViT-Lite, Hassani et al., 2021, trained with timm",
        best={"cifar10": 1e-3, "fashion-mnist": 3e-3},
    ),
    CONVNET: Recipe(
        lr=0.4,
        batch=128,
        optimizer="sgd",
        weight_decay=5e-4,
        schedule="linear",
        warmup=0.2,
        smoothing=0.1,
        augment=Augment(flip=0.5, shift=1 / 16),
        origin="Page, 2018: SGD with Nesterov momentum 0.9, one cycle; a ConvNet, not a ViT",
        searched=(),
    ),
}


def learning_rate(done: float, recipe: Recipe, peak: float) -> float:
    """The learning rate after the fraction `done` of the time."""
    if done < recipe.warmup:
        return peak * done / recipe.warmup
    if recipe.schedule == "constant":
        return peak
    decayed = (done - recipe.warmup) / (1 - recipe.warmup)
    remaining = (
        1 - decayed if recipe.schedule == "linear" else (1 + math.cos(math.pi * decayed)) / 2
    )
    return peak * (recipe.final + (1 - recipe.final) * remaining)
