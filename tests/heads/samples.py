"""A tiny model and separable features for several tests."""

import numpy as np
import torch

from vitrail.data.config import Preprocess
from vitrail.heads.features import Features
from vitrail.heads.head import Head
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT

PREPROCESS = Preprocess(size=8, channels=1)


def tiny(**settings):
    """A random model for digits."""
    torch.manual_seed(0)
    sizes = {"image": 8, "patch": 4, "channels": 1, "classes": 10}
    sizes |= {"width": 16, "depth": 3, "heads": 2}
    return ViT(ViTConfig(**sizes | settings)).eval()


def rows(count=90, width=8, classes=3, seed=0, distance=3.0):
    """Separable features, and their classes."""
    rng = np.random.default_rng(seed)
    means = np.random.default_rng(99).normal(size=(classes, width)) * distance
    y = np.arange(count) % classes
    return (rng.normal(size=(count, width)) + means[y]).astype(np.float32), y


def head(estimator, kind="logistic", classes=3, width=8):
    return Head(
        kind=kind,
        estimator=estimator,
        classes=tuple("abcdefghijkl"[:classes]),
        features=Features(),
        width=width,
        weights_hash="0" * 64,
        preprocess=PREPROCESS.to_dict(),
        data={"name": "rows"},
        temperature=1.5,
    )
