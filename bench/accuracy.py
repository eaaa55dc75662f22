"""Accuracy over time: Vitrail's default against each peer's model and recipe, at equal minutes.

Every entry is one training run in its own process on its own cores; its result is a JSON file in
the work folder. Finished entries are not repeated: the same command with the same work folder, or a
copy of its JSON files on another machine, continues where it stopped.

The ConvNet and the best ViT peer train for shorter or longer times too, each with a schedule that
ends there, until two of them bracket our accuracy.
"""

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from bench.measure import OnProgress
from bench.pairs import Cores, Job, available_cores, run_job
from bench.recipes import CONVNET, RECIPES, Rate
from bench.report import describe_environment
from vitrail.errors import UserError
from vitrail.files import write_file
from vitrail.model.config import ViTConfig

OURS, PLAIN = "vitrail", "vitrail, plain ViT"
PLAIN_FLAGS = ("--model", "Nano/4", "--vit.positions", "sincos", "--vit.pool", "avg")
SHORTER = (0.5, 0.25)  # fractions of the minutes; Vitrail also trains for these, with one seed
MIN_MINUTES = 1.0  # start, planning and test take too large a part of anything shorter
OVERHEAD = 0.5  # minutes of a peer beside its training: imports, images, evaluations


@dataclass(frozen=True, kw_only=True)
class AccuracySettings:
    minutes: float = 10  # only for accuracy: training time of each entry
    set: tuple[str, ...] = ("cifar10", "fashion-mnist")  # only for accuracy: built-in data sets
    seeds: int = 3  # only for accuracy: Vitrail's runs, each with its own random seed
    jobs: int = 1  # only for accuracy: entries at the same time, each on its share of the cores
    peers: tuple[str, ...] = tuple(RECIPES)  # only for accuracy: contenders beside Vitrail
    # only for accuracy: learning rates of the ViT peers; best: of an earlier, shorter search
    rates: tuple[Rate, ...] = ("published", "best")
    # only for accuracy: the ConvNet and the best ViT peer also train for these multiples of the
    # minutes, as far as needed to find the time that they need for our accuracy
    times: tuple[float, ...] = (0.25, 0.5, 2)
    work: Path = Path("runs/bench-accuracy")  # only for accuracy: folder of finished entries

    def __post_init__(self) -> None:
        if unknown := set(self.peers) - RECIPES.keys():
            raise UserError(f"unknown peer {min(unknown)!r}; choose from {', '.join(RECIPES)}")
        if wrong := [time for time in self.times if not time > 0]:
            raise UserError(f"`times` has {wrong[0]:g}; every number must be greater than 0")
        if not self.minutes > 0 or self.seeds < 1 or not self.set or self.jobs < 1:
            raise UserError(
                f"{self.minutes:g} minutes, {self.seeds} seeds, {self.jobs} jobs, "
                f"{len(self.set)} data sets; every number must be greater than 0"
            )
        if not self.rates:
            raise UserError("no `rates`; give at least one of published, best and all")
        if self.jobs > (cores := len(available_cores())):
            raise UserError(f"{self.jobs} jobs on {cores} cores; use at most {cores} jobs")

    @property
    def threads(self) -> int:
        """Per entry."""
        return len(available_cores()) // self.jobs

    @property
    def total(self) -> float:
        """Minutes of all entries, without the peers' evaluations and other training times."""
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
                rates = RECIPES[peer].learning_rates(data, self.rates)
                entries += [replace(entry, contender=peer, lr=lr) for lr in rates]
        return entries

    def describe_cost(self) -> str:
        """Entries that are not finished, and how long they take."""
        entries = [entry for entry in self.entries() if not (self.work / entry.file).is_file()]
        others = max(sum(t for t in self.times if t < 1), sum(t for t in self.times if t > 1))
        hours = sum(entry.minutes + OVERHEAD for entry in entries) / self.jobs / 60
        more = 2 * len(self.set) * others * self.minutes / self.jobs / 60
        return (
            f"accuracy: {len(entries)} entries take about {hours:.1f} hours, the ConvNet and the "
            f"best ViT peer for other times up to {more:.1f} more; finished entries: {self.work}"
        )


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
    cores, stop = Cores(settings.jobs, settings.threads), threading.Event()
    entries = settings.entries()
    minutes, results = dict.fromkeys(entries, 0.0), dict[Entry, dict[str, Any]]()

    def advance(entry: Entry, fraction: float) -> None:
        if stop.is_set():
            raise UserError(f"{entry} was stopped")  # which terminates its process
        minutes[entry] = min(1.0, fraction) * entry.minutes
        progress(sum(minutes.values()) / sum(entry.minutes for entry in minutes), str(entry))

    def run_entry(entry: Entry) -> dict[str, Any]:
        path = work / entry.file
        if not path.is_file():
            train = train_vitrail if entry.contender in (OURS, PLAIN) else train_peer
            with cores.take() as share:
                train(entry, path, share, partial(advance, entry))
        advance(entry, 1.0)
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    pool = ThreadPoolExecutor(settings.jobs)
    try:
        while entries:
            minutes |= dict.fromkeys(entries, 0.0)
            results |= zip(entries, pool.map(run_entry, entries), strict=True)
            entries = [e for data in settings.set for e in next_entries(settings, data, results)]
    except (KeyboardInterrupt, SystemExit):
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)  # after an error, running entries finish
    return {
        "minutes": settings.minutes,
        "jobs": settings.jobs,
        "threads": settings.threads,
        "sets": {data: [r for e, r in results.items() if e.data == data] for data in settings.set},
    }


def next_entries(
    settings: AccuracySettings, data: str, results: dict[Entry, dict[str, Any]]
) -> list[Entry]:
    """The next training time of the ConvNet and of the best ViT peer at its best learning rate."""
    finished = {entry: result for entry, result in results.items() if entry.data == data}
    usual = [entry for entry in finished if entry.minutes == settings.minutes]
    level = mean(finished[entry]["test"] for entry in usual if entry.contender == OURS)
    vits = [e for e in usual if e.contender not in (OURS, PLAIN, CONVNET)]
    best = sorted(vits, key=lambda entry: finished[entry]["val"] or 0.0)[-1:]
    entries = []
    for rival in best + [entry for entry in usual if entry.contender == CONVNET]:
        reached = {
            entry.minutes / settings.minutes: (result["test"] or 0.0) >= level
            for entry, result in finished.items()
            if replace(entry, minutes=rival.minutes) == rival
        }
        time = next_time(reached, settings.times)
        entries += [replace(rival, minutes=time * settings.minutes)] if time else []
    return entries


def next_time(reached: dict[float, bool], times: Sequence[float]) -> float | None:
    """The longest of `times` between the longest one too short and the shortest one that reached.

    If none has reached our accuracy, that is the longest of all, which shows whether any does.
    """
    high = min((time for time, enough in reached.items() if enough), default=float("inf"))
    low = max((time for time, enough in reached.items() if not enough and time < high), default=0)
    return max((time for time in times if low < time < high), default=None)


def train_vitrail(
    entry: Entry, path: Path, cores: Sequence[int], on_progress: Callable[[float], None]
) -> None:
    """Runs `vitrail train SET --minutes M --from none`; the curve comes from the run's log."""
    import torch

    from vitrail.model.cost import count_parameters
    from vitrail.run.recipe import read_recipe, settings_from_dict
    from vitrail.run.storage.journal import read_journal
    from vitrail.training.learner import training_dtype

    folder, environment = path.with_suffix(""), describe_environment(len(cores))
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted entry
    command = ["vitrail", "train", entry.data, "--minutes", f"{entry.minutes:g}"]
    command += ["--seed", str(entry.seed), "--out", str(folder), "--from", "none"]
    command += PLAIN_FLAGS if entry.contender == PLAIN else ()
    run_module(command, entry, path, cores, on_progress)
    metrics = json.loads((folder / "metrics.json").read_text())
    recipe = read_recipe(folder / "recipe.toml")
    vit = settings_from_dict(ViTConfig, recipe["vit"])
    dtype = training_dtype(recipe["train"]["precision"], torch.device("cpu"))
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
        "parameters": count_parameters(vit),
        "precision": str(dtype).removeprefix("torch."),
        "batch": recipe["train"]["batch"],
        "steps": metrics["steps"],
        "seconds": metrics["seconds"],
        "curve": curve,
        "val": metrics["val"]["accuracy"],
        "test": metrics["test"]["accuracy"],
        **environment,
    }
    write_file(path, json.dumps(result, indent=1) + "\n")


def train_peer(
    entry: Entry, path: Path, cores: Sequence[int], on_progress: Callable[[float], None]
) -> None:
    job = asdict(entry)
    job["peer"] = job.pop("contender")
    del job["threads"]
    run_module(["bench.train_peer", json.dumps(job), str(path)], entry, path, cores, on_progress)


def run_module(
    command: Sequence[str],
    entry: Entry,
    path: Path,
    cores: Sequence[int],
    on_progress: Callable[[float], None],
) -> None:
    """Runs a Python module to its end; its output goes to a log beside the result."""
    job = Job(path=path, log=path.with_suffix(".log"), command=tuple(command))
    run_job(job, cores, lambda seconds: on_progress(seconds / (60 * entry.minutes)))
