"""The forecast of `vitrail plan` against trainings on this machine, by one and by two processes.

Both train the same recipe on 32-pixel images. Memory is what a process needs beyond the smallest
training, of Pico/4 with an image per process: Python, torch and the data are not in the forecast.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from PIL import Image

import vitrail
from bench.measure import Budget, Case, OnProgress, Times, measure
from bench.process import ROOT

MODEL, BATCH, STEPS = "Mini/4", 64, 24
SMALLEST, FEW_STEPS = "Pico/4", 4
LOGGED, WARM_UP = 2, 2  # steps between two lines of the log, and lines that are not counted
IMAGES, CLASSES = 640, 4
ROUNDS = 1  # per repeat
SETTINGS: dict[str, dict[str, Any]] = {
    "train": {"batch": BATCH, "steps": STEPS, "log_every": LOGGED, "evaluate_every": 1000},
    "data": {"workers": 0, "disk_gb": 0},
}

# Trains in each process, and writes its peak memory.
TRAINING = """
import json, os, resource, sys
from pathlib import Path
import vitrail
out, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
vitrail.train("images", model=sys.argv[3], weights="none", settings=settings, out=out, report=False,
              quiet=True)
peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
Path(f"{out}-rank-{os.environ.get('RANK', 0)}").write_text(str(peak))
"""


def run(budget: Budget, progress: OnProgress) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_images(work / "images")
        found: dict[int, list[tuple[dict[str, float], dict[str, float]]]] = {1: [], 2: []}
        cases = [
            Case(
                label=f"{MODEL}, {processes} process{'es' * (processes > 1)}, {quantity}",
                unit=unit,
                images=1 if unit == "images/s" else 0,
                measure=partial(compare_forecast, work, processes, quantity, found),
            )
            for processes in (1, 2)
            for quantity, unit in (("time", "images/s"), ("memory", "MB"))
        ]
        measured = measure(cases, budget, progress)
    errors = {case["label"]: case["rows"]["forecast"]["ratio"] - 1 for case in measured}
    note = "Error of the forecast, time or bytes: " + ", ".join(
        f"{label.partition(', ')[2]} {error:+.0%}" for label, error in errors.items()
    )
    return {"cases": measured, "note": f"{note}.", "errors": errors}


def compare_forecast(
    work: Path,
    processes: int,
    quantity: str,
    found: dict[int, list[tuple[dict[str, float], dict[str, float]]]],
    budget: Budget,
) -> Times:
    """The forecast and the truth; one training serves both quantities."""
    if quantity == "time":
        found[processes] = [
            (forecast_training(work, processes), train_here(work, processes))
            for _ in range(min(ROUNDS, budget.rounds))
        ]
    return {
        "vitrail": [truth[quantity] for _, truth in found[processes]],
        "forecast": [forecast[quantity] for forecast, _ in found[processes]],
    }


def forecast_training(work: Path, processes: int) -> dict[str, float]:
    """Seconds per image and megabytes of a process, after the measurement that `plan` makes."""
    forecast = vitrail.plan(
        work / "images",
        devices=f"{processes}xcpu",
        model=MODEL,
        weights="none",
        settings=SETTINGS,
    )
    return {"time": 1 / forecast.images_per_second, "memory": forecast.memory.total / 1e6}


def train_here(work: Path, processes: int) -> dict[str, float]:
    """The same numbers of a training by torchrun."""
    few = {"batch": processes, "steps": FEW_STEPS}
    _, base = run_training(work, processes, SMALLEST, {**SETTINGS["train"], **few})
    speeds, peak = run_training(work, processes, MODEL, SETTINGS["train"])
    # the mean: steps with patch dropout are cheaper, and the forecast is for all
    return {"time": mean(1 / speed for speed in speeds[WARM_UP:]), "memory": (peak - base) / 1e6}


def run_training(
    work: Path, processes: int, model: str, train: dict[str, Any]
) -> tuple[list[float], int]:
    """Images per second between the lines of its log, and the largest peak of its processes."""
    out = Path(tempfile.mkdtemp(dir=work)) / "run"
    script = work / "training.py"
    script.write_text(TRAINING)
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    threads = max(1, (os.cpu_count() or 1) // processes)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    settings = json.dumps({**SETTINGS, "train": train})
    subprocess.run(
        [*launch, str(script), str(out), settings, model],
        cwd=work,
        env=environment,
        check=True,
        capture_output=True,
    )
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    speeds = [line["images_per_s"] for line in lines if line["kind"] == "step"]
    return speeds, max(int(path.read_text()) for path in out.parent.glob("run-rank-*"))


def write_images(folder: Path) -> None:
    """Small pictures, always the same ones."""
    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        path = folder / f"class {number % CLASSES}" / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
