"""Tiny models of every kind, with random weights that make no two logits alike."""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from vitrail.data.config import Preprocess
from vitrail.exporting.graph import ExportGraph, GraphOptions, prepare_model
from vitrail.model import embed
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT

TINY = {"image": 16, "patch": 4, "width": 16, "depth": 1, "heads": 2, "classes": 5}
KINDS: dict[str, dict[str, Any]] = {  # together they use every setting of ViTConfig
    "cls": {},
    "avg": {
        "pool": "avg",
        "registers": 3,
        "positions": "sincos",
        "image": (12, 20),
        "channels": 5,
    },
    "mae": {"pool": "avg", "norm_after_pool": True, "pre_norm": True, "mlp": "gelu_tanh"},
    "map": {"pool": "map", "qk_norm": True, "mlp": "swiglu", "layer_scale": 0.1},
    "rotary": {
        "positions": "rotary",
        "registers": 4,
        "channels": 2,
        "dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "distilled": {"distilled": True, "channels": 1, "drop_path": 0.1},
    "pretraining": {"head": "mlp", "positions": "none", "depth": 2},
    "headless": {"head": "none", "pool": "cls_avg"},
    "hybrid": {"stem": "r50", "image": 32, "patch": 16},
    "conv": {"stem": "conv", "mlp": "quick_gelu", "pool": "avg"},
    "r9": {"stem": "r9"},
}
# each option is exported with some kinds; the plain graph, logits only, with the others
OPTIONS: dict[str, GraphOptions] = {
    "avg": GraphOptions(pixels="uint8", features=True),
    "map": GraphOptions(attention=True, features=True),
    "rotary": GraphOptions(attention=True, any_size=True),
    "distilled": GraphOptions(features=True, pixels="uint8"),
    "pretraining": GraphOptions(odd=True),
}


def build_model(kind: str, **changes: Any) -> ViT:
    """A model of one kind in evaluation mode."""
    torch.manual_seed(0)
    short = {("r50", 16): (1, 1, 1)}  # one block in each stage of the ResNet: faster to trace
    with mock.patch.object(embed, "STAGES", short):
        model = ViT(ViTConfig(**{**TINY, **KINDS[kind], **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def preprocess_of(model: ViT) -> Preprocess:
    channels = model.config.channels
    mean, std = (np.linspace(low, 0.6, channels).tolist() for low in (0.3, 0.2))
    return Preprocess(size=model.config.size, mean=tuple(mean), std=tuple(std), channels=channels)


def build_graph(kind: str, options: GraphOptions | None = None) -> ExportGraph:
    options = options or OPTIONS.get(kind, GraphOptions())
    model = build_model(kind)
    preprocess = preprocess_of(model)
    prepared = prepare_model(model, preprocess, options.any_size)
    return ExportGraph(prepared, preprocess, options).eval()


@dataclass
class FakeEngine:
    """PyTorch in the place of another runtime, with an error added to chosen outputs."""

    graph: ExportGraph
    errors: dict[str, Any]  # output: function of its values
    name: str = "fake"
    version: str = "1"
    sizes: tuple[int, ...] = ()

    @property
    def pixels(self):
        return self.graph.options.pixels

    @property
    def metadata(self):
        return {}

    def run(self, pixels):
        self.sizes += (len(pixels),)
        with torch.inference_mode():
            tensors = self.graph(torch.from_numpy(pixels))
        outputs = {n: x.numpy() for n, x in zip(self.graph.outputs, tensors, strict=True)}
        return {n: self.errors.get(n, lambda x: x)(x) for n, x in outputs.items()}
