"""A tiny model and easy features that several tests use."""

import numpy as np
import torch

from vitrail.data.config import Preprocess
from vitrail.heads.features import Features
from vitrail.heads.head import Head
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT

VIEW = Preprocess(size=8, channels=1)


def tiny(**settings):
    """A random model for digits."""
    torch.manual_seed(0)
    sizes = {"image": 8, "patch": 4, "channels": 1, "classes": 10}
    sizes |= {"width": 16, "depth": 3, "heads": 2}
    return ViT(ViTConfig(**sizes | settings)).eval()


def rows(count=90, width=8, classes=3, seed=0, apart=3.0):
    """Features that tell the classes apart, and the classes."""
    random = np.random.default_rng(seed)
    middles = np.random.default_rng(99).normal(size=(classes, width)) * apart
    y = np.arange(count) % classes
    return (random.normal(size=(count, width)) + middles[y]).astype(np.float32), y


def head(estimator, kind="logistic", classes=3, width=8):
    return Head(
        kind=kind,
        estimator=estimator,
        classes=tuple("abcdefghijkl"[:classes]),
        features=Features(),
        width=width,
        weights="0" * 64,
        view=VIEW.plain(),
        data={"name": "rows"},
        temperature=1.5,
    )
