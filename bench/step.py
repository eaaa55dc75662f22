"""Training steps: forward, backward and the same optimizer for all; and where their time goes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from bench.alone import in_turn
from bench.limit import LIMIT, limit
from bench.measure import Budget, Tick
from bench.peers import PEERS
from bench.shares import shares
from vitrail.zoo.presets import preset

CASES = [("Mini/4", 128), ("Ti/16", 8)]
FEWEST = 3  # rounds: they differ more than those of forwards

NOTE = "`vitrail` keeps freed memory, as it does in every training; the others give it back."


def run(budget: Budget, tick: Tick) -> dict[str, Any]:
    budget = replace(budget, fewest=FEWEST)
    found = in_turn("step", [*PEERS, LIMIT], CASES, budget, tick)
    where = []
    for (name, batch), case in zip(CASES, found, strict=True):
        tick(1.0, f"{case['label']}, where the time goes")
        rows = {peer: shares(prepare(peer, name, batch)) for peer in fastest(case["rows"])}
        where.append({"label": case["label"], "rows": rows})
    return {"cases": found, "where": where, "note": NOTE}


def fastest(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Ours, and the fastest of the others, if there are others."""
    others = [peer for peer in PEERS if peer != "vitrail"]
    return ["vitrail", *sorted(others, key=lambda peer: rows[peer]["ratio"])[:1]]


def prepare(contender: str, name: str, batch: int) -> Callable[[], object]:
    config = preset(name)
    if contender == LIMIT:
        return limit(config, batch, training=True)
    torch.manual_seed(0)
    model = PEERS[contender](config).train()
    images = torch.randn(batch, config.channels, *config.size)
    labels = torch.randint(config.classes, (batch,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> object:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run
