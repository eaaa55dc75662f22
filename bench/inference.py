"""Forward passes, from one image to a batch, from 32 to 224 pixels."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch

from bench import onnx_runtime
from bench.matmuls import MATMULS, prepare_matmuls
from bench.measure import Budget, OnProgress
from bench.peers import PEERS
from bench.process import measure_models
from vitrail.zoo.presets import preset

CASES = [
    ("Ti/16", 1),
    ("Ti/16", 16),
    ("S/16", 1),
    ("S/16", 16),
    ("B/16", 1),
    ("B/16", 16),
    ("Mini/4", 1),
    ("Mini/4", 128),
]
RUNTIMES = [onnx_runtime.NAME]  # contenders that are not eager PyTorch


def run(budget: Budget, progress: OnProgress) -> dict[str, Any]:
    contenders = [*PEERS, *RUNTIMES, MATMULS]
    with tempfile.TemporaryDirectory() as folder:
        if RUNTIMES:
            for name in dict.fromkeys(name for name, _ in CASES):
                progress(0.0, f"exporting {name} to ONNX")
                onnx_runtime.export_onnx(name, folder)
        return {"cases": measure_models("inference", contenders, CASES, budget, progress, folder)}


def prepare(contender: str, name: str, batch: int) -> Callable[[], object]:
    config = preset(name)
    if contender == MATMULS:
        return prepare_matmuls(config, batch)
    torch.manual_seed(0)
    model = PEERS[contender](config).eval()
    images = torch.randn(batch, config.channels, *config.size)

    @torch.inference_mode()
    def run() -> object:
        return model(images)

    return run
