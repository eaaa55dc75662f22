"""Training steps: forward, backward and optimizer step, and a profile by kind of operator."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bench.matmuls import MATMULS, prepare_matmuls
from bench.measure import Budget, OnProgress
from bench.peers import PEERS
from bench.process import measure_models
from bench.profiling import profile_task
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.pretraining.config import PretrainConfig
from vitrail.pretraining.masked import MaskedAutoencoder
from vitrail.run.auto import DataSummary
from vitrail.run.unlabelled import choose_method
from vitrail.zoo.presets import preset

CASES = [("Mini/4", 128), ("Ti/16", 8)]
MASKED = "vitrail masked"  # a step of pretraining, with the settings that `pretrain` chooses
MIN_ROUNDS = 3  # steps vary more than forward passes

NOTE = (
    "`vitrail` retains freed memory, as `vitrail train` does; the others return it to the system. "
    "`vitrail masked` is a step of masked pretraining: most patches are hidden, and rebuilt."
)


def run(budget: Budget, progress: OnProgress) -> dict[str, Any]:
    budget = replace(budget, min_rounds=MIN_ROUNDS)
    cases = measure_models("step", [*PEERS, MASKED, MATMULS], CASES, budget, progress)
    profiles = []
    for (name, batch), case in zip(CASES, cases, strict=True):
        progress(1.0, f"profiling {case['label']}")
        rows = {
            peer: profile_task(prepare(peer, name, batch)) for peer in select_profiled(case["rows"])
        }
        profiles.append({"label": case["label"], "rows": rows})
    return {"cases": cases, "profiles": profiles, "note": NOTE}


def select_profiled(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Vitrail, and the fastest of the other peers if there are any."""
    others = [peer for peer in PEERS if peer != "vitrail"]
    return ["vitrail", *sorted(others, key=lambda peer: rows[peer]["ratio"])[:1]]


def prepare(contender: str, name: str, batch: int) -> Callable[[], object]:
    config = preset(name)
    if contender == MATMULS:
        return prepare_matmuls(config, batch, training=True)
    torch.manual_seed(0)
    model = build_masked(config) if contender == MASKED else PEERS[contender](config)
    model.train()
    images = torch.randn(batch, config.channels, *config.size)
    labels = torch.randint(config.classes, (batch,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> object:
        outputs = model(images)
        loss = outputs.mean() if contender == MASKED else F.cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run


def build_masked(config: ViTConfig) -> nn.Module:
    """The masked autoencoder that `pretrain` would train for this architecture."""
    vit = replace(config, head="none")
    images = DataSummary(images=50_000, classes=10, side=vit.size[0], channels=3, imbalance=1.0)
    settings, _ = choose_method(images, vit, "masked")
    return MaskedAutoencoder(ViT(vit), PretrainConfig(**settings))
