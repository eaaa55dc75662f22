"""Weights of small published models, written as files in every layout."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.parity.weights import random_image, random_weight
from vitrail.model.vit import ViT

FIXTURES = Path(__file__).resolve().parents[1] / "parity" / "fixtures"
LAYOUTS = ("timm", "transformers", "torchvision")
NAMES = sorted(p.stem for p in FIXTURES.glob("*.json") if p.stem.startswith(LAYOUTS))


def fixture(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_text())
    return read


def tensors(name: str) -> dict[str, Tensor]:
    shapes = fixture(name)["shapes"]
    return {key: torch.from_numpy(random_weight(key, shape)) for key, shape in shapes.items()}


def flags(name: str) -> dict[str, Any]:
    """Settings that no tensor of this model shows."""
    config = fixture(name)["config"]
    size = config["image"]
    found = {"heads": config["heads"], "image": size if isinstance(size, int) else tuple(size)}
    if config.get("mlp") != "swiglu":
        found |= {"mlp": config.get("mlp", "gelu")}
    found["eps"] = config.get("eps", 1e-6)
    if "positions" in config:
        found["positions"] = config["positions"]
    return found


def save(name: str, folder: Path) -> Path:
    """A folder as the library writes it; with a config only where it decides the pooling."""
    folder.mkdir(exist_ok=True)
    save_file(tensors(name), folder / "model.safetensors")
    config = fixture(name)["config"]
    if config.get("pool") == "avg" and "cls_token" in fixture(name)["shapes"]:
        stated = {
            "architecture": "vit_tiny_patch16_224",
            "global_pool": "avg",
            "pretrained_cfg": {},
        }
        (folder / "config.json").write_text(json.dumps(stated))
    return folder


@torch.no_grad()
def equal(model: ViT, name: str, most: float = 1e-5) -> None:
    """Fails unless the model has the published logits for the fixture's images."""
    published = fixture(name)
    expected = torch.tensor(published["outputs"]["float32"])
    x = torch.from_numpy(random_image(**published["image"]))
    torch.testing.assert_close(model(x), expected, rtol=0, atol=most)


def renamed(state: dict[str, Tensor], **changes: str) -> dict[str, Tensor]:
    """The same tensors with parts of their names replaced; `__` stands for a dot."""
    found = {}
    for name, x in state.items():
        for old, new in changes.items():
            name = name.replace(old.replace("__", "."), new)
        found[name] = x
    return found
