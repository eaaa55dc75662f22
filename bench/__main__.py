"""`python -m bench [NAME ...]`: measures, prints tables, writes JSON, Markdown and SVG."""

import json
import signal
import sys
import time
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import Progress

from bench import report
from bench.accuracy import AccuracySettings
from bench.finetune import FinetuneSettings
from bench.measure import Budget, OnProgress
from bench.process import report_errors
from vitrail.errors import UserError

Name = Literal[
    "inference",
    "engines",
    "step",
    "input",
    "remote",
    "load",
    "knn",
    "start-up",
    "start",
    "memory",
    "serve",
    "processes",
    "batch",
    "plan",
    "accuracy",
    "finetune",
]
MINUTES: dict[Name, float] = {  # rough durations, for the progress bar
    "input": 2.5,
    "inference": 6.75,
    "step": 3,
    "knn": 0.5,
    "start-up": 1.5,
    "memory": 4,
    "load": 2.5,
    "start": 4,
    "engines": 6,
    "serve": 3.5,
    "processes": 4,
    "batch": 4,
    "plan": 4,
    "remote": 1,
}
# `make bench` stays under twenty minutes without these
ONLY_ON_REQUEST = ("load", "start", "engines", "serve", "processes", "batch", "plan", "remote")
DEFAULT = tuple(name for name in MINUTES if name not in ONLY_ON_REQUEST)
LIBRARIES = ("timm", "transformers", "vit_pytorch", "torchvision")
REQUIRED: dict[Name, tuple[str, ...]] = {  # import names
    "inference": (*LIBRARIES, "onnx", "onnxscript", "onnxruntime"),
    "engines": ("timm", "onnx", "onnxscript", "onnxruntime", "openvino"),
    "step": LIBRARIES,
    "input": ("timm", "torchvision"),
    "remote": ("s3fs", "moto", "flask", "flask_cors"),
    "load": ("timm", "transformers", "torchvision"),
    "knn": ("sklearn",),
    "start-up": (*LIBRARIES, "onnx", "onnxscript", "onnxruntime"),
    "start": (),
    "processes": (),
    "serve": ("litserve", "bentoml", "uvicorn", "httptools"),
    "batch": ("ray", "pyarrow"),
    "plan": (),
    "memory": LIBRARIES,
    "accuracy": LIBRARIES,
    "finetune": ("timm", "torchvision"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    names: Annotated[tuple[Name, ...], tyro.conf.Positional] = DEFAULT  # benchmarks to run
    rounds: int = 100  # maximum number of rounds per case in each of two repeats
    seconds: float = 5  # time per case and repeat; the minimum number of rounds may take longer
    out: Path = report.RESULTS  # output folder for JSON, tables and plots
    json: bool = False  # print one JSON document with all results instead of the tables
    # only for start: an earlier checkout to compare with
    before: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = None
    accuracy: Annotated[AccuracySettings, tyro.conf.OmitArgPrefixes] = field(
        default_factory=AccuracySettings
    )  # only for accuracy
    finetune: Annotated[FinetuneSettings, tyro.conf.OmitArgPrefixes] = field(
        default_factory=FinetuneSettings
    )  # only for finetune

    def __post_init__(self) -> None:
        if self.rounds < 1 or not self.seconds > 0:
            raise UserError(
                f"{self.rounds} rounds, {self.seconds:g} seconds; both must be greater than 0"
            )


def main(settings: Settings) -> None:
    """Measures the speed, memory and accuracy of Vitrail and its peers."""
    required = dict.fromkeys(package for name in settings.names for package in REQUIRED[name])
    if missing := [package for package in required if find_spec(package) is None]:
        raise UserError(f"{', '.join(missing)} not installed; `make bench` installs all peers")
    tuned = sum(entry.minutes for entry in settings.finetune.entries())
    requested: dict[Name, float] = {"accuracy": settings.accuracy.total, "finetune": tuned}
    if "accuracy" in settings.names:
        print(settings.accuracy.describe_cost(), file=sys.stderr)
    minutes = {name: (MINUTES | requested)[name] for name in settings.names}
    results: dict[Name, dict[str, Any]] = {}
    pages: list[str] = []
    with Progress(console=Console(stderr=True)) as progress:
        bar, before = progress.add_task("", total=sum(minutes.values())), 0.0
        for name in settings.names:

            def show(done: float, activity: str, name: Name = name, before: float = before) -> None:
                completed = before + done * minutes[name]
                progress.update(bar, completed=completed, description=f"{name}: {activity}")

            results[name] = run(name, settings, show)
            pages.append(report.write_result(results[name], settings.out))
            before += minutes[name]
    print(json.dumps(results, indent=1) if settings.json else "\n".join(pages))


def run(name: Name, settings: Settings, progress: OnProgress) -> dict[str, Any]:
    import torch

    bench = import_module(f"bench.{name.replace('-', '_')}")
    budget = Budget(rounds=settings.rounds, seconds=settings.seconds)
    environment = report.describe_environment(torch.get_num_threads())
    start = time.monotonic()
    if name == "accuracy":
        result = bench.run(settings.accuracy, progress)
    elif name == "finetune":
        result = bench.run(settings.finetune, progress)
    elif name == "start":
        result = bench.run(budget, progress, settings.before)
    else:
        result = bench.run(budget, progress)
    return {"name": name, **environment, "seconds": round(time.monotonic() - start), **result}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with report_errors():
        main(tyro.cli(Settings, prog="python -m bench"))
