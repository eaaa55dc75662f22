"""Accuracy over time: our default against every peer's model and recipe in the same minutes.

Every entry is one training in a process of its own that leaves one JSON file in the work folder;
finished ones are not repeated.
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

from bench.alone import ROOT
from bench.measure import Tick
from bench.recipes import RATES, RECIPES
from bench.report import origin
from vitrail.errors import UserError
from vitrail.files import write_file

OURS = "vitrail"
CORES = len(os.sched_getaffinity(0))
LESS = (0.5, 0.25)  # parts of the minutes in which ours is run too, with one seed
SHORT = 1.0  # but no minutes below this, which start, timing and tests would fill
# threads that wait for each other sleep instead of spinning: `vitrail train` wants it so on a
# shared machine, and what holds for us holds for all
ENVIRONMENT = {"GOMP_SPINCOUNT": "0"}


@dataclass(frozen=True, kw_only=True)
class Contest:
    minutes: float = 10  # accuracy: of training for each entry
    set: tuple[str, ...] = ("cifar10", "fashion-mnist")  # accuracy: built-in sets
    seeds: int = 3  # accuracy: runs of ours
    jobs: int = 1  # accuracy: entries at the same time, each with its share of the cores
    work: Path = Path("runs/bench-accuracy")  # accuracy: folder of finished entries

    def __post_init__(self) -> None:
        if not self.minutes > 0 or self.seeds < 1 or not self.set or self.jobs < 1:
            raise UserError(
                f"{self.minutes:g} minutes, {self.seeds} seeds, {self.jobs} jobs, "
                f"{len(self.set)} sets; give more than 0 of each"
            )
        if self.jobs > CORES:
            raise UserError(f"{self.jobs} jobs on {CORES} cores; give each at least one")

    @property
    def threads(self) -> int:
        """Of each entry."""
        return CORES // self.jobs

    @property
    def total(self) -> float:
        """Minutes of all entries together, but for looks and tests."""
        return sum(entry.minutes for entry in self.entries())

    def entries(self) -> list["Entry"]:
        found = []
        for data in self.set:
            entry = Entry(data=data, who=OURS, minutes=self.minutes, threads=self.threads)
            found += [replace(entry, seed=seed) for seed in range(self.seeds)]
            shorter = [part * self.minutes for part in LESS]
            found += [replace(entry, minutes=less) for less in shorter if less >= SHORT]
            for who, recipe in RECIPES.items():
                found += [replace(entry, who=who, lr=lr) for lr in sorted({recipe.lr, *RATES})]
        return found


@dataclass(frozen=True, kw_only=True)
class Entry:
    data: str
    who: str
    minutes: float
    threads: int
    seed: int = 0
    lr: float | None = None  # None for ours, which chooses itself

    def __str__(self) -> str:
        last = f"seed {self.seed}" if self.lr is None else f"rate {self.lr:g}"
        return f"{self.data}, {self.who}, {self.minutes:g} min, {last}"

    @property
    def file(self) -> str:
        return f"{self}, {self.threads} threads.json".replace(", ", "_").replace(" ", "-")


def run(contest: Contest, tick: Tick) -> dict[str, Any]:
    work = contest.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    entries = contest.entries()
    spent, stop = dict.fromkeys(entries, 0.0), threading.Event()

    def advance(entry: Entry, part: float) -> None:
        if stop.is_set():
            raise UserError(f"{entry} was stopped")  # and its process with it
        spent[entry] = min(1.0, part) * entry.minutes
        tick(sum(spent.values()) / contest.total, str(entry))

    def take(entry: Entry) -> dict[str, Any]:
        path = work / entry.file
        if not path.is_file():
            (ours if entry.who == OURS else theirs)(entry, path, partial(advance, entry))
        advance(entry, 1.0)
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    pool = ThreadPoolExecutor(contest.jobs)
    try:
        results = list(pool.map(take, entries))
    except (KeyboardInterrupt, SystemExit):
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)  # after an error, those that run come to their end
    sets: dict[str, list[dict[str, Any]]] = {data: [] for data in contest.set}
    for entry, result in zip(entries, results, strict=True):
        sets[entry.data].append(result)
    return {
        "minutes": contest.minutes,
        "jobs": contest.jobs,
        "threads": contest.threads,
        "sets": sets,
    }


def ours(entry: Entry, path: Path, follow: Callable[[float], None]) -> None:
    """What anybody gets: `vitrail train SET --minutes M`; the clock is that of its journal."""
    from vitrail.model.config import ViTConfig
    from vitrail.model.cost import count_parameters
    from vitrail.run.journal import read_journal
    from vitrail.run.recipe import settings_from_dict, read_recipe

    folder, about = path.with_suffix(""), origin()
    shutil.rmtree(folder, ignore_errors=True)  # of an entry that was interrupted
    words = ["vitrail", "train", entry.data, "--minutes", f"{entry.minutes:g}"]
    perform([*words, "--seed", str(entry.seed), "--out", str(folder)], entry, path, follow)
    metrics = json.loads((folder / "metrics.json").read_text())
    recipe = read_recipe(folder / "recipe.toml")
    looks = [
        [line["seconds"], line["val_accuracy"]]
        for line in read_journal(folder / "log.jsonl")
        if line["kind"] == "epoch" and line["val_accuracy"] is not None
    ]
    result = {
        "who": OURS,
        "lr": recipe["train"]["lr"],
        "seed": entry.seed,
        "minutes": entry.minutes,
        "parameters": count_parameters(settings_from_dict(ViTConfig, recipe["vit"])),
        "batch": recipe["train"]["batch"],
        "steps": metrics["steps"],
        "seconds": metrics["seconds"],
        "curve": looks,
        "val": metrics["val"]["accuracy"],
        "test": metrics["test"]["accuracy"],
        **about,
    }
    write_file(path, json.dumps(result, indent=1) + "\n")


def theirs(entry: Entry, path: Path, follow: Callable[[float], None]) -> None:
    lesson = asdict(entry)
    lesson["peer"] = lesson.pop("who")
    del lesson["threads"]
    perform(["bench.pupil", json.dumps(lesson), str(path)], entry, path, follow)


def perform(words: list[str], entry: Entry, path: Path, follow: Callable[[float], None]) -> None:
    """Runs a module to its end; what it says goes into a log beside the result."""
    log, start = path.with_suffix(".log"), time.monotonic()
    with log.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", *words],
            env=os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(entry.threads)},
            cwd=ROOT,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                follow((time.monotonic() - start) / (60 * entry.minutes))
                time.sleep(0.5)
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        raise UserError(f"{entry} failed with code {process.returncode}; {log} says why")
