"""Peak memory of forward passes and of training steps, each peer alone in fresh processes."""

from functools import partial
from typing import Any

from bench import step
from bench.alone import megabytes
from bench.inference import label
from bench.measure import Budget, Case, Tick, Times, measure
from bench.peers import PEERS

CASES = {
    "inference": [("Ti/16", 16), ("S/16", 16), ("B/16", 16), ("Mini/4", 128)],
    "step": step.CASES,
}


def run(budget: Budget, tick: Tick) -> dict[str, Any]:
    cases = []
    for bench, sizes in CASES.items():
        taken = Taken(bench, sizes)
        cases += [
            Case(label=f"{bench}, {label(*size)}", unit="MB", measure=partial(taken, size))
            for size in sizes
        ]
    return {"cases": measure(cases, budget, tick)}


class Taken:
    """Memory of all cases of a bench: a process of each peer tells it, once for each repeat."""

    def __init__(self, bench: str, sizes: list[tuple[str, int]]):
        self.bench, self.sizes = bench, sizes
        self.known: dict[tuple[str, int], dict[str, list[float]]] = {}

    def __call__(self, size: tuple[str, int], budget: Budget) -> Times:
        if size not in self.known:
            told = {peer: megabytes(self.bench, peer, self.sizes) for peer in PEERS}
            for number, one in enumerate(self.sizes):
                self.known[one] = {peer: [numbers[number]] for peer, numbers in told.items()}
        return self.known.pop(size)
