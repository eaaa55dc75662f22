"""`python -m bench [NAME]`: measures, prints the table, writes JSON, Markdown and SVG."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import Progress

from bench import alone, inference, report, step
from bench.limit import limit
from bench.measure import compare, interleave
from bench.peers import PEERS
from vitrail.files import write
from vitrail.zoo.presets import preset

BENCHES = {"inference": inference, "step": step}


@dataclass(frozen=True, kw_only=True)
class Settings:
    names: Annotated[tuple[Literal["inference", "step"], ...], tyro.conf.Positional] = (
        "inference",
        "step",
    )  # what to measure
    rounds: int = 200  # of a case, at most
    seconds: float = 45  # for a case; it takes longer only if it has too few rounds by then
    out: Path = Path(__file__).parent / "results"  # folder for JSON, table and plot
    json: bool = False  # print the JSON instead of the table


def main(settings: Settings) -> None:
    """Speed and memory of Vitrail and its peers, in one run."""
    os.chdir(Path(__file__).parent.parent)  # the processes that alone.py starts import from here
    with Progress(console=Console(stderr=True)) as progress:
        for name in settings.names:
            result = run(name, BENCHES[name], settings, progress)
            text, page = json.dumps(result, indent=1) + "\n", report.table(result)
            write(settings.out / f"{name}.json", text)
            write(settings.out / f"{name}.md", page)
            write(settings.out / f"{name}.svg", report.plot(result))
            sys.stdout.write(text if settings.json else page + "\n")


def run(name: str, bench: ModuleType, settings: Settings, progress: Progress) -> dict[str, Any]:
    result = {
        "name": name,
        **report.surroundings(torch.get_num_threads()),
        "cases": [],
        "alone": [],
    }
    for model, batch in bench.CASES:
        tick = follow(progress, f"{name} {label(model, batch)}")
        config = preset(model)
        torch.manual_seed(0)
        tasks = {peer: bench.prepare(peer, config, batch) for peer in PEERS}
        tasks[report.LIMIT] = limit(config, batch, training=bench is step)
        times = interleave(tasks, settings.rounds, settings.seconds, tick)
        rows = {
            peer: asdict(row) | {"steady": row.steady, "rounds": len(times[peer])}
            for peer, row in compare(times).items()
        }
        result["cases"].append({"label": label(model, batch), "rows": rows})
    for model, batch in bench.ALONE:
        tick = follow(progress, f"{name} {label(model, batch)}, alone")
        rows = alone.measure(name, list(PEERS), model, batch, tick)
        result["alone"].append({"label": label(model, batch), "rows": rows})
    return result


def follow(progress: Progress, title: str) -> Callable[[float], object]:
    task = progress.add_task(title, total=1)
    return lambda share: progress.update(task, completed=share)


def label(model: str, batch: int) -> str:
    return f"{model}, {preset(model).image} px, batch {batch}"


if __name__ == "__main__":
    main(tyro.cli(Settings, prog="python -m bench"))
