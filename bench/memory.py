"""Peak memory of a forward pass and of a training step, each peer alone in a fresh process."""

from functools import partial
from typing import Any

from bench.alone import megabytes
from bench.inference import label
from bench.measure import Budget, Case, Tick, Times, measure
from bench.peers import PEERS

CASES = [
    ("inference", "Ti/16", 16),
    ("step", "Mini/4", 128),
    ("step", "Ti/16", 8),
]


def run(budget: Budget, tick: Tick) -> dict[str, Any]:
    cases = [
        Case(
            label=f"{bench}, {label(name, batch)}",
            unit="MB",
            measure=partial(peaks, bench, name, batch),
        )
        for bench, name, batch in CASES
    ]
    return {"cases": measure(cases, budget, tick)}


def peaks(bench: str, name: str, batch: int, budget: Budget) -> Times:
    """One process of each peer: memory hardly varies."""
    return {peer: [megabytes(bench, peer, name, batch)] for peer in PEERS}
