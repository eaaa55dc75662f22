"""Peak memory of forward passes and of training steps, each peer alone in fresh processes."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from bench import inference, step
from bench.alone import Size, alone, label
from bench.measure import Budget, Case, Tick, Times, measure
from bench.peers import PEERS

CASES = {"inference": inference.CASES, "step": step.CASES}
ENVIRONMENT = {
    # every large tensor goes back to the system when it is freed: memory in use is what counts
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "OMP_NUM_THREADS": "1",
}
AT_ONCE = 2  # processes, of one thread each


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

    def __init__(self, bench: str, sizes: list[Size]):
        self.bench, self.sizes = bench, sizes
        self.known: dict[Size, dict[str, list[float]]] = {}

    def __call__(self, size: Size, budget: Budget) -> Times:
        if size not in self.known:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                told = dict(zip(PEERS, pool.map(self.megabytes, PEERS), strict=True))
            for number, one in enumerate(self.sizes):
                self.known[one] = {peer: [numbers[number]] for peer, numbers in told.items()}
        return self.known.pop(size)

    def megabytes(self, peer: str) -> list[float]:
        """What each case takes at its peak, one after the other in the same process."""
        with alone(self.bench, peer, environment=ENVIRONMENT) as process:
            return [process.ask("peak", *size) for size in self.sizes]
