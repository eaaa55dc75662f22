"""One training of a tournament, in its own process: the default recipe with one idea."""

import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import vitrail
from bench.ideas import IDEAS
from bench.process import report_errors
from bench.report import describe_code
from vitrail.data.source import Source
from vitrail.files import write_file
from vitrail.model.config import ViTConfig
from vitrail.run import auto
from vitrail.run.recipe import merge_settings, settings_from_dict
from vitrail.training import loop

RECIPE_CORES = 2  # for which `recipe` minutes are meant
WARM_STEPS = 5  # not counted in the cost of a step: they allocate memory


@dataclass(frozen=True, kw_only=True)
class Trial:
    data: str
    idea: str
    seed: int
    steps: int
    recipe: float  # minutes on two cores whose recipe is changed
    plain: bool = False  # the plain ViT Nano/4 instead of the chosen model

    @property
    def file(self) -> str:
        name = f"{Path(self.data).name}_{self.idea}_{self.recipe:g}-min-recipe"
        plain = "_plain" if self.plain else ""
        return f"{name}{plain}_{self.steps}-steps_seed-{self.seed}.json"


def choose_settings(source: Source, minutes: float, plain: bool = False) -> dict[str, Any]:
    """The settings that `vitrail train` chooses for these minutes on two cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(RECIPE_CORES)
    summary = auto.summarise(source)
    name, vit = ("Nano/4", auto.small_vit("Nano", summary.side, 4)) if plain else (None, None)
    try:
        return auto.choose_from_scratch(summary, model=name, vit=vit, minutes=minutes).settings
    finally:
        torch.set_num_threads(threads)


def expected_steps(source: Source, recipe: float, minutes: float, plain: bool = False) -> int:
    """Steps of the recipe that one quiet core does in these minutes, by its multiply-adds."""
    chosen = choose_settings(source, recipe, plain)
    rate = auto.images_per_second(settings_from_dict(ViTConfig, chosen["vit"]), auto.CPU_RATE)
    return max(1, round(60 * minutes * rate / chosen["train"]["batch"]))


def run_trial(trial: Trial, folder: Path) -> dict[str, Any]:
    """Trains without the test split, which no idea is judged by."""
    idea = IDEAS[trial.idea]
    if idea.patch is not None:
        idea.patch()
    source = vitrail.open_data(trial.data, progress=False)
    settings = merge_settings(choose_settings(source, trial.recipe, trial.plain), idea.settings)
    settings = merge_settings(settings, {"train": {"steps": trial.steps}})
    seconds = time_steps()
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted trial
    run = vitrail.train(
        source,
        weights="none",
        settings=settings,
        seed=trial.seed,
        out=folder,
        test=False,
        report=False,
        quiet=True,
    )
    counted = seconds[WARM_STEPS:] or seconds
    return {
        "idea": trial.idea,
        "seed": trial.seed,
        "steps": trial.steps,
        "accuracy": run.metrics["val"]["accuracy"],
        "step_seconds": sum(counted) / len(counted),
    }


def time_steps() -> list[float]:
    """From now on, the processor time of every training step is appended to the list."""
    seconds: list[float] = []
    train = loop.train_steps

    def train_timed(*arguments: Any, **more: Any) -> Iterator[loop.Step]:
        start = time.process_time()
        for step in train(*arguments, **more):
            seconds.append(time.process_time() - start)
            yield step
            start = time.process_time()

    loop.train_steps = train_timed
    return seconds


def main(trial: str, out: str) -> None:
    """The process itself: takes a trial as JSON, and writes the result to a file."""
    torch.set_num_threads(1)
    code, path = describe_code(), Path(out)
    result = run_trial(Trial(**json.loads(trial)), path.with_suffix(""))
    write_file(path, json.dumps({**result, **code}, indent=1) + "\n")


if __name__ == "__main__":
    with report_errors():
        main(*sys.argv[1:])
