"""Time to the first prediction: a new process imports, builds the model, runs one image."""

import tempfile
from time import perf_counter
from typing import Any

from bench import onnx_runtime
from bench.inference import RUNTIMES
from bench.measure import Budget, Case, OnProgress, Times, measure
from bench.peers import PEERS
from bench.process import start_process

MODEL = "Ti/16"
ROUNDS = 2  # processes of each contender per repeat, interleaved


def run(budget: Budget, progress: OnProgress) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        if RUNTIMES:
            onnx_runtime.export_onnx(MODEL, folder)
        for name in [*PEERS, *RUNTIMES]:  # fills the page cache
            seconds_to_prediction(name, folder)

        def measure_contenders(budget: Budget) -> Times:
            times: dict[str, list[float]] = {name: [] for name in [*PEERS, *RUNTIMES]}
            for _ in range(min(ROUNDS, budget.rounds)):
                for name, seconds in times.items():
                    seconds.append(seconds_to_prediction(name, folder))
            return times

        label = f"{MODEL}, import to first prediction"
        return {
            "cases": measure(
                [Case(label=label, unit="s", measure=measure_contenders)], budget, progress
            )
        }


def seconds_to_prediction(contender: str, folder: str) -> float:
    """From starting a process to its first prediction for one image."""
    start = perf_counter()
    with start_process("inference", contender, folder) as process:
        process.call("prepare", MODEL, 1)
        process.call("time", 1)
        return perf_counter() - start
