"""Features of many images: one process with one thread, and Ray with a worker on each core.

JPEG files of 400 x 300 pixels through Ti/16. The number is the time of one core for an image, from
the times of the parts: without the start of Python, of Ray and of the workers, which a job of
millions of images does not notice.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.measure import Budget, Case, OnProgress, Times, measure
from bench.process import ROOT
from bench.start import make_images
from vitrail.data.config import Preprocess
from vitrail.model.vit import ViT
from vitrail.zoo.file import save_model
from vitrail.zoo.presets import preset

MODEL, IMAGES, PART = "Ti/16", 384, 8
ROUNDS = 2  # of each contender per repeat, interleaved
WARM_UP = 2  # parts of each worker that are not counted
CONTENDERS = {"vitrail": "local", "vitrail on ray": "ray"}


def run(budget: Budget, progress: OnProgress) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        progress(0.0, f"writing {IMAGES:,} images")
        make_images(work / "images", IMAGES)
        write_model(work / "model.safetensors")
        label = f"{MODEL}, {IMAGES:,} JPEGs, ms of a core per image"
        case = Case(label=label, unit="ms", measure=partial(time_jobs, work))
        measured = measure([case], budget, progress)
    ratio = measured[0]["rows"]["vitrail on ray"]["ratio"]
    note = f"Per core, Ray reaches {1 / ratio:.2f} of the throughput of one process."
    return {"cases": measured, "note": note, "throughput": 1 / ratio}


def time_jobs(work: Path, budget: Budget) -> Times:
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(min(ROUNDS, budget.rounds)):
        for name, on in CONTENDERS.items():
            times[name].append(core_seconds_per_image(work, on))
    return times


def core_seconds_per_image(work: Path, on: str) -> float:
    """Runs `vitrail features`: with one thread, or with a worker of Ray on each core."""
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = ["features", "model.safetensors", "images", "--out", "out", "--part", str(PART)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    subprocess.run(
        [sys.executable, "-m", "vitrail", *command, "--on", on],
        cwd=work,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    workers = 1 if on == "local" else os.cpu_count() or 1
    times = [path.stat().st_mtime for path in out.glob("part-*.parquet")]
    return workers * seconds_per_part(times, WARM_UP * workers) / PART


def seconds_per_part(times: Sequence[float], skipped: int) -> float:
    """Mean seconds between the ends of two parts, after the first ones."""
    ordered = sorted(times)
    return (ordered[-1] - ordered[skipped - 1]) / (len(ordered) - skipped)


def write_model(path: Path) -> None:
    torch.manual_seed(0)
    names = [str(number) for number in range(1000)]
    settings = Preprocess(size=224, crop=0.9).to_dict()
    save_model(path, ViT(preset(MODEL)), {"classes": names, "preprocess": settings})
