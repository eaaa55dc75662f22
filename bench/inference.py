"""Forward passes, from one image to a batch, from 32 to 224 pixels."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench import runtime
from bench.limit import LIMIT, limit
from bench.measure import Budget, Case, Task, Tick, measure, timed
from bench.peers import PEERS
from vitrail.model.config import ViTConfig
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
RUNTIMES = {runtime.NAME: runtime.prepare}  # measured beside the eager peers, not among them


def run(budget: Budget, tick: Tick) -> dict[str, Any]:
    return {"cases": measure(cases_of(tasks, CASES), budget, tick)}


def cases_of(
    tasks: Callable[[str, int], dict[str, Task]], sizes: list[tuple[str, int]]
) -> list[Case]:
    """A case for each model and batch, in which `tasks` call the models."""
    return [
        Case(label=label(name, batch), unit="ms", measure=timed(partial(tasks, name, batch)))
        for name, batch in sizes
    ]


def tasks(name: str, batch: int) -> dict[str, Task]:
    config = preset(name)
    torch.manual_seed(0)
    peers = {peer: prepare(peer, config, batch) for peer in PEERS}
    outside = {other: make(name, batch) for other, make in RUNTIMES.items()}
    return {**peers, **outside, LIMIT: limit(config, batch)}


def prepare(peer: str, config: ViTConfig, batch: int) -> Callable[[], object]:
    model, images = PEERS[peer](config).eval(), torch.randn(batch, config.channels, *config.size)

    @torch.inference_mode()
    def run() -> object:
        return model(images)

    return run


def label(name: str, batch: int) -> str:
    return f"{name}, {preset(name).image} px, batch {batch}"
