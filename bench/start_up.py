"""From nothing to the first answer: a fresh process imports, builds the model, sees one image."""

import tempfile
from time import perf_counter
from typing import Any

from bench import runtime
from bench.alone import alone
from bench.inference import RUNTIMES
from bench.measure import Budget, Case, Tick, Times, measure
from bench.peers import PEERS

MODEL = "Ti/16"
ROUNDS = 2  # processes of each contender in a repeat; they take turns


def run(budget: Budget, tick: Tick) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        if RUNTIMES:
            runtime.export(MODEL, folder)
        for name in [*PEERS, *RUNTIMES]:  # the first process of all reads from the disk
            seconds_to_answer(name, folder)

        def times(budget: Budget) -> Times:
            found: dict[str, list[float]] = {name: [] for name in [*PEERS, *RUNTIMES]}
            for _ in range(min(ROUNDS, budget.rounds)):
                for name, seconds in found.items():
                    seconds.append(seconds_to_answer(name, folder))
            return found

        label = f"{MODEL}, import to first answer"
        return {"cases": measure([Case(label=label, unit="s", measure=times)], budget, tick)}


def seconds_to_answer(contender: str, folder: str) -> float:
    """From the order of a process to its first answer about one image."""
    start = perf_counter()
    with alone("inference", contender, folder) as process:
        process.ask("prepare", MODEL, 1)
        process.ask("time", 1)
        return perf_counter() - start
