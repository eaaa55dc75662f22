"""A run folder read back: its recipe and reasons, journal, numbers and predictions."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.display.text import printable
from vitrail.errors import UserError
from vitrail.run import predictions
from vitrail.run.journal import read_journal
from vitrail.run.predictions import Predictions
from vitrail.run.recipe import Recipe, build, plain, read_recipe

RECIPE, JOURNAL = "recipe.toml", "log.jsonl"
MODEL, METRICS = "model.safetensors", "metrics.json"
REPORT, FIGURES = "report.html", "figures"

Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Record:
    folder: Path
    recipe: Recipe
    reasons: tuple[str, ...]  # for what was chosen, as the run told them
    lines: list[Line]  # of the journal
    metrics: dict[str, Any] | None  # None: the run is not finished
    predictions: Predictions | None

    @property
    def name(self) -> str:
        """What the data set is called."""
        if self.predictions is not None:
            return str(self.predictions.facts["data"]["name"])
        return Path(self.recipe.source).name or self.recipe.source

    @property
    def epochs(self) -> list[Line]:
        return [line for line in self.lines if line.get("kind") == "epoch"]

    @property
    def steps(self) -> list[Line]:
        return [line for line in self.lines if line.get("kind") == "step"]


def read_run(folder: str | Path) -> Record:
    """Whatever a run has left so far; a folder that is no run is refused."""
    folder = Path(folder)
    if not (folder / RECIPE).is_file():
        raise UserError(f"{folder} is no run: it has no {RECIPE}; give a folder that train made")
    return Record(
        folder=folder,
        recipe=build(Recipe, read_recipe(folder / RECIPE)),
        reasons=read_reasons(folder / RECIPE),
        lines=read_journal(folder / JOURNAL),
        metrics=read_metrics(folder),
        predictions=predictions.read(folder),
    )


def read_metrics(folder: Path) -> dict[str, Any] | None:
    path = folder / METRICS
    if not path.is_file():
        return None
    try:
        metrics: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        check_metrics(metrics)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged: {error!r:.80}; `vitrail evaluate {folder} DATA` counts anew"
        ) from error
    return metrics


def check_metrics(metrics: dict[str, Any]) -> None:
    """Fails, in whatever way, where a number of a finished run is missing or none."""
    if not all(isinstance(metrics[key], str) for key in ("run", "model")):
        raise TypeError("a name is no text")
    numbers = [metrics[key] for key in ("epochs", "steps", "seconds")]
    for split in ("val", "test"):
        if metrics[split] is not None:
            low, high = metrics[split]["interval"]
            numbers += [metrics[split]["accuracy"], low, high]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise TypeError("a number is none")


def with_reasons(reasons: Sequence[str], recipe: str) -> str:
    """A recipe whose first lines, comments, say why it is so."""
    return "".join(f"# {printable(reason)}\n" for reason in reasons) + recipe


def read_reasons(path: Path) -> tuple[str, ...]:
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        found.append(line.removeprefix("# "))
    return tuple(found)


def asked_instead(chosen: Mapping[str, Any], changes: Mapping[str, Any]) -> list[str]:
    """Settings that a recipe file or a flag changed, such as "train.batch 64"."""
    ours = flat(plain(Recipe())) | flat(chosen)
    asked = flat(changes)
    asked.pop("source", None)
    return [f"{key} {value}" for key, value in asked.items() if ours.get(key) != value]


def flat(table: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{where}{key}.")
        else:
            found[f"{where}{key}"] = tuple(value) if isinstance(value, list) else value
    return found
