"""Accuracy over time: Vitrail's default against each peer's model and recipe, at equal minutes.

Every entry is one training run in its own process; its result is a JSON file in the work folder.
Finished entries are not repeated.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.measure import OnProgress
from bench.process import ROOT
from bench.recipes import CONVNET, RECIPES
from bench.report import describe_code
from vitrail.errors import UserError
from vitrail.files import write_file

OURS, PLAIN = "vitrail", "vitrail, plain ViT"
PLAIN_FLAGS = ("--model", "Nano/4", "--vit.positions", "sincos", "--vit.pool", "avg")
CORES = len(os.sched_getaffinity(0))
SHORTER = (0.5, 0.25)  # fractions of the minutes; Vitrail also trains for these, with one seed
MIN_MINUTES = 1.0  # start, planning and test take too large a part of anything shorter
# waiting threads sleep instead of spinning, as in `vitrail train` on a shared machine; for all
ENVIRONMENT = {"GOMP_SPINCOUNT": "0"}


@dataclass(frozen=True, kw_only=True)
class AccuracySettings:
    minutes: float = 10  # only for accuracy: training time of each entry
    set: tuple[str, ...] = ("cifar10", "fashion-mnist")  # only for accuracy: built-in data sets
    seeds: int = 3  # only for accuracy: Vitrail's runs, each with its own random seed
    jobs: int = 1  # only for accuracy: entries at the same time; they share the cores equally
    peers: tuple[str, ...] = tuple(RECIPES)  # only for accuracy: contenders beside Vitrail
    # only for accuracy: the best ViT peer and the ConvNet train for so many times the minutes too,
    # if they do not reach our accuracy within them
    longer: float = 4
    work: Path = Path("runs/bench-accuracy")  # only for accuracy: folder of finished entries

    def __post_init__(self) -> None:
        if unknown := set(self.peers) - RECIPES.keys():
            raise UserError(f"unknown peer {min(unknown)!r}; choose from {', '.join(RECIPES)}")
        if not self.longer >= 1:
            raise UserError(f"{self.longer:g} times longer; give at least 1")
        if not self.minutes > 0 or self.seeds < 1 or not self.set or self.jobs < 1:
            raise UserError(
                f"{self.minutes:g} minutes, {self.seeds} seeds, {self.jobs} jobs, "
                f"{len(self.set)} data sets; every number must be greater than 0"
            )
        if self.jobs > CORES:
            raise UserError(f"{self.jobs} jobs on {CORES} cores; use at most {CORES} jobs")

    @property
    def threads(self) -> int:
        """Per entry."""
        return CORES // self.jobs

    @property
    def total(self) -> float:
        """Minutes of all entries, without the peers' evaluations and longer runs."""
        return sum(entry.minutes for entry in self.entries())

    def entries(self) -> list["Entry"]:
        entries = []
        for data in self.set:
            entry = Entry(data=data, contender=OURS, minutes=self.minutes, threads=self.threads)
            entries += [replace(entry, seed=seed) for seed in range(self.seeds)]
            shorter = [fraction * self.minutes for fraction in SHORTER]
            entries += [replace(entry, minutes=m) for m in shorter if m >= MIN_MINUTES]
            entries.append(replace(entry, contender=PLAIN))
            for peer in self.peers:
                rates = sorted({RECIPES[peer].lr, *RECIPES[peer].rates})
                entries += [replace(entry, contender=peer, lr=lr) for lr in rates]
        return entries


@dataclass(frozen=True, kw_only=True)
class Entry:
    data: str
    contender: str
    minutes: float
    threads: int
    seed: int = 0
    lr: float | None = None  # None for Vitrail, which chooses it

    def __str__(self) -> str:
        last = f"seed {self.seed}" if self.lr is None else f"lr {self.lr:g}"
        return f"{self.data}, {self.contender}, {self.minutes:g} min, {last}"

    @property
    def file(self) -> str:
        return f"{self}, {self.threads} threads.json".replace(", ", "_").replace(" ", "-")


def run(settings: AccuracySettings, progress: OnProgress) -> dict[str, Any]:
    work = settings.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    entries = settings.entries()
    minutes, stop = dict.fromkeys(entries, 0.0), threading.Event()

    def advance(entry: Entry, fraction: float) -> None:
        if stop.is_set():
            raise UserError(f"{entry} was stopped")  # which terminates its process
        minutes[entry] = min(1.0, fraction) * entry.minutes
        total = sum(entry.minutes for entry in entries)  # grows by the longer runs
        progress(sum(minutes.values()) / total, str(entry))

    def run_entry(entry: Entry) -> dict[str, Any]:
        path = work / entry.file
        if not path.is_file():
            train = train_vitrail if entry.contender in (OURS, PLAIN) else train_peer
            train(entry, path, partial(advance, entry))
        advance(entry, 1.0)
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    pool = ThreadPoolExecutor(settings.jobs)
    try:
        results = list(pool.map(run_entry, entries))
        extended = extend_entries(settings, entries, results)
        entries += extended
        results += pool.map(run_entry, extended)
    except (KeyboardInterrupt, SystemExit):
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)  # after an error, running entries finish
    sets: dict[str, list[dict[str, Any]]] = {data: [] for data in settings.set}
    for entry, result in zip(entries, results, strict=True):
        sets[entry.data].append(result)
    return {
        "minutes": settings.minutes,
        "jobs": settings.jobs,
        "threads": settings.threads,
        "sets": sets,
    }


def extend_entries(
    settings: AccuracySettings, entries: list[Entry], results: list[dict[str, Any]]
) -> list[Entry]:
    """Longer runs of the best ViT peer and of the ConvNet, where they are below all our seeds."""
    extended = []
    for data in settings.set if settings.longer > 1 else ():
        scores = {
            e: r["val"] or 0.0 for e, r in zip(entries, results, strict=True) if e.data == data
        }
        usual = {e: score for e, score in scores.items() if e.minutes == settings.minutes}
        level = min(score for e, score in usual.items() if e.contender == OURS)
        vits = [e for e in usual if e.contender not in (OURS, PLAIN, CONVNET)]
        others = sorted(vits, key=usual.__getitem__)[-1:]
        others += [e for e in usual if e.contender == CONVNET]
        minutes = settings.longer * settings.minutes
        extended += [replace(e, minutes=minutes) for e in others if usual[e] < level]
    return extended


def train_vitrail(entry: Entry, path: Path, on_progress: Callable[[float], None]) -> None:
    """Runs `vitrail train SET --minutes M --from none`; the curve comes from the run's log."""
    from vitrail.model.config import ViTConfig
    from vitrail.model.cost import count_parameters
    from vitrail.run.recipe import read_recipe, settings_from_dict
    from vitrail.run.storage.journal import read_journal

    folder, code = path.with_suffix(""), describe_code()
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted entry
    command = ["vitrail", "train", entry.data, "--minutes", f"{entry.minutes:g}"]
    command += ["--seed", str(entry.seed), "--out", str(folder), "--from", "none"]
    command += PLAIN_FLAGS if entry.contender == PLAIN else ()
    run_module(command, entry, path, on_progress)
    metrics = json.loads((folder / "metrics.json").read_text())
    recipe = read_recipe(folder / "recipe.toml")
    curve = [
        [line["seconds"], line["val_accuracy"]]
        for line in read_journal(folder / "log.jsonl")
        if line["kind"] == "epoch" and line["val_accuracy"] is not None
    ]
    result = {
        "contender": entry.contender,
        "lr": recipe["train"]["lr"],
        "seed": entry.seed,
        "minutes": entry.minutes,
        "parameters": count_parameters(settings_from_dict(ViTConfig, recipe["vit"])),
        "batch": recipe["train"]["batch"],
        "steps": metrics["steps"],
        "seconds": metrics["seconds"],
        "curve": curve,
        "val": metrics["val"]["accuracy"],
        "test": metrics["test"]["accuracy"],
        **code,
    }
    write_file(path, json.dumps(result, indent=1) + "\n")


def train_peer(entry: Entry, path: Path, on_progress: Callable[[float], None]) -> None:
    job = asdict(entry)
    job["peer"] = job.pop("contender")
    del job["threads"]
    run_module(["bench.train_peer", json.dumps(job), str(path)], entry, path, on_progress)


def run_module(
    command: list[str], entry: Entry, path: Path, on_progress: Callable[[float], None]
) -> None:
    """Runs a Python module to its end; its output goes to a log beside the result."""
    log, start = path.with_suffix(".log"), time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", *command],
            env=os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(entry.threads)},
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                on_progress((time.monotonic() - start) / (60 * entry.minutes))
                time.sleep(0.5)
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        raise UserError(f"{entry} failed with exit code {process.returncode}; see {log}")
