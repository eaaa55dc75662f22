"""From nothing to the first answer: a fresh process imports, builds the model, sees one image."""

import tempfile
from pathlib import Path
from typing import Any

from bench import runtime
from bench.alone import seconds_to_answer
from bench.inference import RUNTIMES
from bench.measure import Budget, Case, Tick, Times, measure
from bench.peers import PEERS
from vitrail.files import write

MODEL = "Ti/16"
ROUNDS = 2  # processes of each contender in a repeat; they take turns


def run(budget: Budget, tick: Tick) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        if RUNTIMES:
            write(file, runtime.exported(MODEL))
        for name in [*PEERS, *RUNTIMES]:  # the first process of all reads from the disk
            seconds_to_answer(name, MODEL, str(file))

        def times(budget: Budget) -> Times:
            found: dict[str, list[float]] = {name: [] for name in [*PEERS, *RUNTIMES]}
            for _ in range(min(ROUNDS, budget.rounds)):
                for name, seconds in found.items():
                    seconds.append(seconds_to_answer(name, MODEL, str(file)))
            return found

        label = f"{MODEL}, import to first answer"
        return {"cases": measure([Case(label=label, unit="s", measure=times)], budget, tick)}
