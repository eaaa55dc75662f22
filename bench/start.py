"""From `vitrail train` to the first step: on 5,000 JPEG files, with cold and with warm caches.

`start-up` measures imports and the first prediction; this measures what a training run does with
its data before it learns: list, hash and split the files, choose a recipe, decode everything.
Cold means that neither Vitrail nor the page cache has seen a file, warm is the run after it.
"""

import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from PIL import Image

from bench.measure import Budget, Case, OnProgress, Times, measure
from bench.process import ROOT

IMAGES, CLASSES = 5_000, 10
HEIGHT, WIDTH = 300, 400  # pixels
MODEL, BATCH = "Ti/16", 8  # small: the first step itself takes a fraction of a second
ROUNDS = 2  # runs of each checkout per repeat, interleaved
DROP_CACHES = Path("/proc/sys/vm/drop_caches")  # Linux, writable for root
REACHED = 77  # exit code of a run that reached its first step

# Runs the command line of the checkout in PYTHONPATH, and exits before the first optimizer step.
FIRST_STEP = f"""
import os, runpy, sys
from torch.optim.optimizer import register_optimizer_step_pre_hook
register_optimizer_step_pre_hook(lambda *_: os._exit({REACHED}))
sys.argv = ["vitrail", *sys.argv[1:]]
runpy.run_module("vitrail", run_name="__main__", alter_sys=True)
"""
WARM_UP = "import torch, vitrail.cli.main, vitrail.data.loader, vitrail.model.vit, matplotlib"


def run(budget: Budget, progress: OnProgress, before: Path | None = None) -> dict[str, Any]:
    """Measures this checkout, and the one at `before` beside it."""
    checkouts = {"vitrail": ROOT, **({"before": before.resolve()} if before else {})}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        progress(0.0, f"writing {IMAGES:,} images")
        make_images(work / "images")
        cases = [
            Case(label=label, unit="s", measure=partial(time_checkouts, checkouts, work, cold=cold))
            for label, cold in (
                (f"{IMAGES:,} JPEGs, cold", True),
                (f"{IMAGES:,} JPEGs, warm", False),
            )
        ]
        result: dict[str, Any] = {"cases": measure(cases, budget, progress)}
    result["note"] = f"From the command to the first step of {MODEL}, batch size {BATCH}."
    if before:
        result["note"] += " `before`: an earlier checkout."
    return result


def time_checkouts(
    checkouts: Mapping[str, Path], work: Path, budget: Budget, *, cold: bool
) -> Times:
    times: dict[str, list[float]] = {name: [] for name in checkouts}
    for _ in range(min(ROUNDS, budget.rounds)):
        for name, checkout in checkouts.items():
            times[name].append(
                seconds_to_first_step(checkout, work, work / f"cache of {name}", cold)
            )
    return times


def seconds_to_first_step(checkout: Path, work: Path, cache: Path, cold: bool) -> float:
    """Runs `vitrail train` of a checkout until its first step; warm runs follow a cold one."""
    if cold:
        shutil.rmtree(cache, ignore_errors=True)
        drop_page_cache((work / "images").rglob("*.jpg"))
    environment = {**os.environ, "PYTHONPATH": str(checkout), "VITRAIL_CACHE": str(cache)}
    # imports come from the page cache in every run: only the data are cold
    subprocess.run([sys.executable, "-c", WARM_UP], env=environment, cwd=work, check=True)
    run = Path(tempfile.mkdtemp(dir=work)) / "run"
    settings = ["--model", MODEL, "--train.steps", "1", "--train.batch", str(BATCH)]
    command = ["train", str(work / "images"), *settings, "--out", str(run)]
    start = perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", FIRST_STEP, *command],
        env=environment,
        cwd=work,
        capture_output=True,
        text=True,
    )
    seconds = perf_counter() - start
    if done.returncode != REACHED:
        raise RuntimeError(f"no first step with the code in {checkout}:\n{done.stderr}")
    return seconds


def drop_page_cache(files: Iterable[Path]) -> None:
    """Makes the next read of these files come from the disk, as far as the system permits."""
    os.sync()
    if os.access(DROP_CACHES, os.W_OK):
        try:
            DROP_CACHES.write_text("1")
            return
        except OSError:  # a container's root
            pass
    if hasattr(os, "posix_fadvise"):
        for path in files:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make_images(folder: Path, count: int | None = None) -> None:
    """Writes different JPEG files of about 25 kB, always the same ones."""
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 6, (HEIGHT, WIDTH, 1))
    for number in range(count or IMAGES):
        coarse = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        pixels = (np.asarray(smooth) + np.roll(noise, number)).clip(0, 255).astype(np.uint8)
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "JPEG", quality=85)
        path = folder / f"class {number % CLASSES}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stream.getvalue())
