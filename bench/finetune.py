"""Fine-tuning at equal minutes: Vitrail's default against timm with the usual recipe.

Every entry is one training in its own process; its result is a JSON file in the work folder.
Finished entries are not repeated.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.measure import OnProgress
from bench.process import ROOT
from vitrail.errors import UserError
from vitrail.files import write_file

OURS, PEER = "vitrail", "timm"
RATES = (1e-4, 3e-4, 1e-3)  # of the peer; the table shows the best one on validation data
HOPELESS = 0.2  # below the best rate on validation data with the first seed: not tried again
TUNES = ("all", "proj", "lora", "head")
STEP_BATCH, TIMED_STEPS = 16, 6


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings:
    photos: Path = ROOT.parent / "shared" / "data" / "pets-8"  # only for finetune: data set
    weights: Path = (  # only for finetune: folder of the weights, as on timm's hub
        ROOT.parent / "shared" / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    )
    clock: tuple[float, ...] = (2.0, 5.0)  # only for finetune: minutes of each training
    tries: int = 3  # only for finetune: random seeds
    finished: Path = Path("runs/bench-finetune")  # only for finetune: folder of finished entries

    def entries(self) -> list["FinetuneEntry"]:
        rates: list[tuple[str, float | None]] = [(OURS, None), *((PEER, rate) for rate in RATES)]
        return [
            FinetuneEntry(contender=contender, minutes=minutes, seed=seed, lr=lr)
            for minutes in self.clock
            for seed in range(self.tries)
            for contender, lr in rates
        ]


@dataclass(frozen=True, kw_only=True)
class FinetuneEntry:
    contender: str
    minutes: float
    seed: int
    lr: float | None  # None for Vitrail, which chooses it

    def __str__(self) -> str:
        rate = "" if self.lr is None else f"-{self.lr:g}"
        return f"{self.contender}{rate}-{self.minutes:g}min-seed{self.seed}"


def run(settings: FinetuneSettings, progress: OnProgress) -> dict[str, Any]:
    work = settings.finished.absolute()
    work.mkdir(parents=True, exist_ok=True)
    entries = settings.entries()
    results: list[dict[str, Any]] = []
    total = sum(entry.minutes for entry in entries)
    for number, entry in enumerate(entries):
        if is_hopeless(entry, results):
            continue
        progress(sum(e.minutes for e in entries[:number]) / total, str(entry))
        path = work / f"{entry}.json"
        if not path.is_file():
            train = train_ours if entry.contender == OURS else train_timm
            train(settings, entry, path)
        results.append({**asdict(entry), **json.loads(path.read_text())})
    steps = [measure_tune(tune, settings.weights) for tune in TUNES]
    return {"data": settings.photos.name, "entries": results, "steps": steps}


def is_hopeless(entry: FinetuneEntry, results: list[dict[str, Any]]) -> bool:
    """Whether the rate of an entry was far behind another one with the first seed."""
    first = {r["lr"]: r["val"] for r in results if r["minutes"] == entry.minutes and not r["seed"]}
    first.pop(None, None)  # ours
    return entry.seed > 0 and entry.lr in first and first[entry.lr] < max(first.values()) - HOPELESS


def train_ours(settings: FinetuneSettings, entry: FinetuneEntry, path: Path) -> None:
    folder = path.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted entry
    start = time.monotonic()
    command = ["vitrail", "train", str(settings.photos), "--from", str(settings.weights)]
    command += ["--minutes", f"{entry.minutes:g}", "--seed", str(entry.seed), "--out", str(folder)]
    run_python(command, path)
    seconds = time.monotonic() - start
    metrics = json.loads((folder / "metrics.json").read_text())
    scores = {split: metrics[split]["accuracy"] for split in ("val", "test")}
    found = {"steps": metrics["steps"], "seconds": round(seconds, 1), **scores}
    write_file(path, json.dumps(found, indent=1) + "\n")


def train_timm(settings: FinetuneSettings, entry: FinetuneEntry, path: Path) -> None:
    job = {"data": str(settings.photos), "weights": str(settings.weights)}
    job |= {"minutes": entry.minutes, "lr": entry.lr, "seed": entry.seed}  # type: ignore[dict-item]
    run_python(["bench.finetune_peer", json.dumps(job), str(path)], path)


def run_python(command: list[str], path: Path) -> str:
    """Runs a module to its end; its messages go to a log beside the result."""
    log = path.with_suffix(".log")
    with log.open("w") as messages:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", *command],
            env=os.environ | {"GOMP_SPINCOUNT": "0"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
        )
    if done.returncode:
        raise UserError(f"{path.stem} failed with exit code {done.returncode}; see {log}")
    return done.stdout


def measure_tune(tune: str, weights: Path) -> dict[str, Any]:
    """Milliseconds per step and peak memory of one tune mode, in its own process."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "bench.finetune", tune, str(weights)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def time_steps(tune: str, weights: str) -> dict[str, Any]:
    """Steps of `STEP_BATCH` random images; the head learns from cached features."""
    import resource

    from torch.nn import functional as F

    from vitrail.run.transfer import UpperPart, lower_part
    from vitrail.training.config import TrainConfig
    from vitrail.training.learner import Learner
    from vitrail.zoo.adapters import freeze
    from vitrail.zoo.load import load_weights

    torch.manual_seed(0)
    model = load_weights(weights, vit={"classes": 10}).model
    frozen = len(model.blocks) if tune == "head" else 0
    freeze(model, tune, 8, frozen)
    images = torch.randn(STEP_BATCH, 3, *model.config.size)
    inputs = lower_part(model, images, frozen) if frozen else images
    learner = Learner(model, TrainConfig())
    module = UpperPart(model, frozen) if frozen else model
    module.train()
    labels, times = torch.arange(STEP_BATCH) % 10, []
    for _ in range(TIMED_STEPS):
        start = time.perf_counter()
        learner.optimizer.zero_grad()
        F.cross_entropy(module(inputs), labels).backward()
        learner.optimizer.step()
        times.append(time.perf_counter() - start)
    learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    milliseconds = round(1000 * statistics.median(times[1:]), 1)
    return {"tune": tune, "learned": learned, "ms": milliseconds, "peak_mb": round(peak)}


def render_finetune(result: dict[str, Any]) -> str:
    """The result as Markdown: test accuracies, means over seeds, at the peer's best rate."""
    entries = result["entries"]
    lines = ["| minutes | vitrail | timm, best rate | error of vitrail over timm's |"]
    lines += ["|---:|---:|---:|---:|"]
    for minutes in sorted({entry["minutes"] for entry in entries}):
        ours = [e for e in entries if e["contender"] == OURS and e["minutes"] == minutes]
        rates = {
            lr: [e for e in entries if e["lr"] == lr and e["minutes"] == minutes]
            for lr in sorted({e["lr"] for e in entries if e["lr"] is not None})
        }
        best = max(rates, key=lambda lr: mean(rates[lr], "val"))
        error, theirs = (1 - mean(group, "test") for group in (ours, rates[best]))
        ratio = f"{error / theirs:.2f}" if theirs else "-"
        lines.append(
            f"| {minutes:g} | {1 - error:.1%} ({len(ours)} seeds) | {1 - theirs:.1%} "
            f"({best:g}, {len(rates[best])} seeds) | {ratio} |"
        )
    lines += ["", f"Test accuracy on {result['data']}.", ""]
    lines += [
        "| tune | parameters that learn | ms per step | peak memory, MB |",
        "|---|---:|---:|---:|",
    ]
    for row in result["steps"]:
        lines.append(f"| {row['tune']} | {row['learned']:,} | {row['ms']:,} | {row['peak_mb']:,} |")
    lines += ["", f"Steps of {STEP_BATCH} images; the head's are on cached features.", ""]
    return "\n".join(lines)


def mean(entries: list[dict[str, Any]], name: str) -> float:
    return statistics.fmean(entry[name] for entry in entries)


if __name__ == "__main__":
    print(json.dumps(time_steps(*sys.argv[1:])))
