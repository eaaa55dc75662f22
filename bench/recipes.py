"""How each peer is trained where it was published, with the length left open."""

import math
from dataclasses import dataclass
from typing import Literal

from vitrail.data.config import Augment

RATES = (3e-4, 1e-3, 3e-3)  # every peer also gets the best of these, chosen on validation images


@dataclass(frozen=True, kw_only=True)
class Recipe:
    lr: float  # at its peak
    batch: int
    optimizer: Literal["adam", "adamw"]
    weight_decay: float = 0.0
    schedule: Literal["constant", "linear", "cosine"]
    warmup: float = 0.0  # part of the time in which the rate rises in a line
    final: float = 0.0  # rate at the end, as a part of the peak
    smoothing: float = 0.0
    dropout: float = 0.0
    clip: float = 0.0  # longest gradient; 0 shortens none
    augment: Augment
    origin: str  # where it was published


RECIPES = {
    "seeds": Recipe(
        lr=1e-3,
        batch=128,
        optimizer="adamw",
        weight_decay=0.01,  # torch's default
        schedule="constant",
        augment=Augment(),
        origin="the seeds: AdamW, constant rate, [CLS], images as they are",
    ),
    "vit-pytorch": Recipe(
        lr=1e-4,
        batch=512,
        optimizer="adam",
        schedule="cosine",
        dropout=0.1,
        augment=Augment(flip=0.5, shift=0.125, policy="rand", magnitude=14 / 30),
        origin="kentaroy47/vision-transformers-cifar10, which trains this model on CIFAR-10",
    ),
    "transformers": Recipe(
        lr=5e-5,
        batch=8,
        optimizer="adamw",
        schedule="linear",
        clip=1.0,
        augment=Augment(),
        origin="the defaults of its Trainer: it publishes no recipe for training from scratch",
    ),
    "timm": Recipe(
        lr=5e-4,
        batch=128,
        optimizer="adamw",
        weight_decay=3e-2,
        schedule="cosine",
        warmup=10 / 200,
        final=0.02,  # 1e-5
        smoothing=0.1,
        augment=Augment(
            flip=0.5, scale=0.8, policy="rand", magnitude=0.3, erase=0.25, mixup=0.8, cutmix=1.0
        ),
        origin="ViT-Lite, Hassani et al., 2021, trained with timm",
    ),
}


def rate(done: float, recipe: Recipe, peak: float) -> float:
    """The learning rate when that part of the time is over."""
    if done < recipe.warmup:
        return peak * done / recipe.warmup
    if recipe.schedule == "constant":
        return peak
    fallen = (done - recipe.warmup) / (1 - recipe.warmup)
    left = 1 - fallen if recipe.schedule == "linear" else (1 + math.cos(math.pi * fallen)) / 2
    return peak * (recipe.final + (1 - recipe.final) * left)
