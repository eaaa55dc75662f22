"""Forward passes, from one image to a batch, from 32 to 224 pixels."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch

from bench import runtime
from bench.alone import in_turn
from bench.limit import LIMIT, limit
from bench.measure import Budget, Tick
from bench.peers import PEERS
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
RUNTIMES = [runtime.NAME]  # measured beside the eager peers, not among them


def run(budget: Budget, tick: Tick) -> dict[str, Any]:
    contenders = [*PEERS, *RUNTIMES, LIMIT]
    with tempfile.TemporaryDirectory() as folder:
        if RUNTIMES:
            for name in dict.fromkeys(name for name, _ in CASES):
                tick(0.0, f"{name} to ONNX")
                runtime.export(name, folder)
        return {"cases": in_turn("inference", contenders, CASES, budget, tick, folder)}


def prepare(contender: str, name: str, batch: int) -> Callable[[], object]:
    config = preset(name)
    if contender == LIMIT:
        return limit(config, batch)
    torch.manual_seed(0)
    model = PEERS[contender](config).eval()
    images = torch.randn(batch, config.channels, *config.size)

    @torch.inference_mode()
    def run() -> object:
        return model(images)

    return run
