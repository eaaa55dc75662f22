"""Peak memory of forward passes and training steps, each peer in new processes."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from bench import inference, step
from bench.measure import Budget, Case, OnProgress, Times, measure
from bench.peers import PEERS
from bench.process import Size, label_size, start_process

CASES = {"inference": inference.CASES, "step": step.CASES}
ENVIRONMENT = {
    # freed tensors return to the system at once, so that only memory in use counts
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "OMP_NUM_THREADS": "1",
}
PROCESSES = 2  # at a time, with one thread each


def run(budget: Budget, progress: OnProgress) -> dict[str, Any]:
    cases = []
    for bench, sizes in CASES.items():
        peaks = PeakMemory(bench, sizes)
        cases += [
            Case(label=f"{bench}, {label_size(*size)}", unit="MB", measure=partial(peaks, size))
            for size in sizes
        ]
    return {"cases": measure(cases, budget, progress)}


class PeakMemory:
    """Measures all cases of a benchmark at once, in one process per peer and repeat."""

    def __init__(self, bench: str, sizes: list[Size]):
        self.bench, self.sizes = bench, sizes
        self.measured: dict[Size, dict[str, list[float]]] = {}

    def __call__(self, size: Size, budget: Budget) -> Times:
        if size not in self.measured:
            with ThreadPoolExecutor(PROCESSES) as pool:
                peaks = dict(zip(PEERS, pool.map(self.measure_peer, PEERS), strict=True))
            for number, one in enumerate(self.sizes):
                self.measured[one] = {peer: [numbers[number]] for peer, numbers in peaks.items()}
        return self.measured.pop(size)

    def measure_peer(self, peer: str) -> list[float]:
        """Peak memory of each case in MB, one after the other in the same process."""
        with start_process(self.bench, peer, environment=ENVIRONMENT) as process:
            return [process.call("peak", *size) for size in self.sizes]
