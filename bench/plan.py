"""The forecast of `vitrail plan` against trainings on this machine, by one and by two processes.

Both train the same recipe on 32-pixel images. Memory is what a process needs beyond its imports.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

import vitrail
from bench.measure import Budget, Case, OnProgress, Times, measure
from bench.process import ROOT

MODEL, BATCH, STEPS = "Mini/4", 64, 24
LOGGED, WARM_UP = 2, 2  # steps between two lines of the log, and lines that are not counted
IMAGES, CLASSES = 640, 4
ROUNDS = 1  # per repeat
SETTINGS = {
    "train": {"batch": BATCH, "steps": STEPS, "log_every": LOGGED, "evaluate_every": 1000},
    "data": {"workers": 0, "disk_gb": 0},
}

# Trains in each process, and writes how far its memory rose above that of the imports.
TRAINING = """
import json, os, resource, sys
from pathlib import Path
import torch, torch.distributed, vitrail, vitrail.run.train, vitrail.run.finish
out, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
pages = int(Path("/proc/self/statm").read_text().split()[1])
before = pages * os.sysconf("SC_PAGE_SIZE")
vitrail.train("images", model=sys.argv[3], weights="none", settings=settings, out=out, report=False,
              quiet=True)
peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
Path(f"{out}-rank-{os.environ.get('RANK', 0)}").write_text(str(peak - before))
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
    out = Path(tempfile.mkdtemp(dir=work)) / "run"
    script = work / "training.py"
    script.write_text(TRAINING)
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    threads = max(1, (os.cpu_count() or 1) // processes)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    subprocess.run(
        [*launch, str(script), str(out), json.dumps(SETTINGS), MODEL],
        cwd=work,
        env=environment,
        check=True,
        capture_output=True,
    )
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    speeds = [line["images_per_s"] for line in lines if line["kind"] == "step"][WARM_UP:]
    memory = [int(path.read_text()) for path in out.parent.glob("run-rank-*")]
    return {"time": 1 / median(speeds), "memory": max(memory) / 1e6}


def write_images(folder: Path) -> None:
    """Small pictures, always the same ones."""
    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        path = folder / f"class {number % CLASSES}" / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
