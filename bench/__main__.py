"""`python -m bench [NAME ...]`: measures, prints the table, writes JSON, Markdown and SVG."""

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
from bench.accuracy import Contest
from bench.measure import Budget, Tick
from vitrail.errors import UserError

Name = Literal[
    "inference", "step", "input", "load", "knn", "start-up", "start", "memory", "accuracy"
]
MINUTES: dict[Name, float] = {  # about; how the bar is shared
    "input": 2.5,
    "inference": 6.75,
    "step": 3,
    "knn": 0.5,
    "start-up": 1.5,
    "memory": 4,
    "load": 2.5,
    "start": 4,
}
APART = ("load", "start")  # not part of `make bench`, which takes under twenty minutes
WHOLE = tuple(name for name in MINUTES if name not in APART)
LIBRARIES = ("timm", "transformers", "vit_pytorch", "torchvision")
NEEDED: dict[Name, tuple[str, ...]] = {  # as they are imported
    "inference": (*LIBRARIES, "onnx", "onnxscript", "onnxruntime"),
    "step": LIBRARIES,
    "input": ("timm", "torchvision"),
    "load": ("timm", "transformers", "torchvision"),
    "knn": ("sklearn",),
    "start-up": (*LIBRARIES, "onnx", "onnxscript", "onnxruntime"),
    "start": (),
    "memory": LIBRARIES,
    "accuracy": LIBRARIES,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    names: Annotated[tuple[Name, ...], tyro.conf.Positional] = WHOLE  # what to measure
    rounds: int = 100  # of a case in each of two repeats, at most
    seconds: float = 5  # for it; it takes longer only if it has too few rounds by then
    out: Path = report.RESULTS  # folder for JSON, table and plot
    json: bool = False  # print one JSON document, by name, instead of the tables
    before: Path | None = None  # only for start: an earlier checkout to measure beside this one
    contest: Annotated[Contest, tyro.conf.OmitArgPrefixes] = field(
        default_factory=Contest
    )  # only for accuracy

    def __post_init__(self) -> None:
        if self.rounds < 1 or not self.seconds > 0:
            raise UserError(f"{self.rounds} rounds, {self.seconds:g} seconds; give more than 0")


def main(settings: Settings) -> None:
    """Speed, memory and accuracy of Vitrail and its peers, in one run."""
    needed = dict.fromkeys(package for name in settings.names for package in NEEDED[name])
    if lacking := [package for package in needed if find_spec(package) is None]:
        raise UserError(f"{', '.join(lacking)} not installed; `make bench` brings all the peers")
    shares = {name: MINUTES.get(name, settings.contest.total) for name in settings.names}
    found: dict[Name, dict[str, Any]] = {}
    pages: list[str] = []
    with Progress(console=Console(stderr=True)) as progress:
        bar, before = progress.add_task("", total=sum(shares.values())), 0.0
        for name in settings.names:

            def tick(share: float, words: str, name: Name = name, before: float = before) -> None:
                done = before + share * shares[name]
                progress.update(bar, completed=done, description=f"{name}: {words}")

            result = run(name, settings, tick)
            pages.append(report.keep(result, settings.out))
            found[name] = result
            before += shares[name]
    print(json.dumps(found, indent=1) if settings.json else "\n".join(pages))


def run(name: Name, settings: Settings, tick: Tick) -> dict[str, Any]:
    import torch

    bench = import_module(f"bench.{name.replace('-', '_')}")
    budget = Budget(rounds=settings.rounds, seconds=settings.seconds)
    place = report.surroundings(torch.get_num_threads())
    start = time.monotonic()
    if name == "accuracy":
        found = bench.run(settings.contest, tick)
    elif name == "start":
        found = bench.run(budget, tick, settings.before)
    else:
        found = bench.run(budget, tick)
    return {"name": name, **place, "seconds": round(time.monotonic() - start), **found}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        main(tyro.cli(Settings, prog="python -m bench"))
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
