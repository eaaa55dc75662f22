"""The Vision Transformer you can read in an evening, train on your own images, and see through."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.errors import UserError as UserError
    from vitrail.insight.maps import attention as attention
    from vitrail.model.config import ViTConfig as ViTConfig
    from vitrail.model.vit import ViT as ViT
    from vitrail.run.classifier import load as load
    from vitrail.run.head import head as head
    from vitrail.run.run import resume as resume
    from vitrail.run.run import train as train
    from vitrail.zoo.presets import preset as preset

__version__ = "0.1.0"

_HOMES = {  # found on first use, so that `vitrail --help` does not wait for torch
    "UserError": "vitrail.errors",
    "ViT": "vitrail.model.vit",
    "ViTConfig": "vitrail.model.config",
    "attention": "vitrail.insight.maps",
    "head": "vitrail.run.head",
    "load": "vitrail.run.classifier",
    "preset": "vitrail.zoo.presets",
    "resume": "vitrail.run.run",
    "train": "vitrail.run.run",
}

__all__ = [
    "UserError",
    "ViT",
    "ViTConfig",
    "attention",
    "head",
    "load",
    "preset",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
