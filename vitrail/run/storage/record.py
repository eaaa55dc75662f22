"""Reads a run folder: its recipe with the reasons, log, metrics and predictions."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.decoding import decode_table
from vitrail.display.text import printable
from vitrail.errors import UserError
from vitrail.evaluation.calibration import TrustQuality
from vitrail.run.recipe import Recipe, read_recipe, settings_from_dict
from vitrail.run.storage import predictions
from vitrail.run.storage.journal import read_journal
from vitrail.run.storage.predictions import Predictions

RECIPE, LOG, CHECKPOINTS = "recipe.toml", "log.jsonl", "checkpoints"
MODEL, METRICS = "model.safetensors", "metrics.json"
ADAPTER = "adapter.safetensors"  # what a fine-tuning of few parameters has changed
REPORT, FIGURES = "report.html", "figures"

Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Record:
    """The contents of a run folder, of a finished run or of one in progress."""

    folder: Path
    recipe: Recipe
    reasons: tuple[str, ...]  # why the settings were chosen, as the run printed them
    lines: list[Line]  # of the log
    metrics: dict[str, Any] | None  # None: the run is not finished
    predictions: Predictions | None

    @property
    def name(self) -> str:
        """The name of the data set."""
        if self.predictions is not None:
            return str(self.predictions.metadata["data"]["name"])
        return Path(self.recipe.source).name or self.recipe.source

    @property
    def epochs(self) -> list[Line]:
        return [line for line in self.lines if line.get("kind") == "epoch"]

    @property
    def steps(self) -> list[Line]:
        return [line for line in self.lines if line.get("kind") == "step"]


def read_run(folder: str | Path) -> Record:
    """The record of a run, finished or not."""
    folder = Path(folder)
    check_is_run(folder)
    return Record(
        folder=folder,
        recipe=settings_from_dict(Recipe, read_recipe(folder / RECIPE)),
        reasons=read_reasons(folder / RECIPE),
        lines=read_journal(folder / LOG),
        metrics=read_metrics(folder),
        predictions=predictions.load_predictions(folder),
    )


def check_is_run(folder: Path) -> None:
    """Raises unless the folder has a recipe."""
    if not (folder / RECIPE).is_file():
        raise UserError(
            f"{folder} is not a run folder: it has no {RECIPE}; give a folder that train created"
        )


def read_metrics(folder: Path) -> dict[str, Any] | None:
    """The metrics of a finished run; None if the run is not finished."""
    path = folder / METRICS
    if not path.is_file():
        return None
    try:
        metrics: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        check_metrics(metrics)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged: {error!r:.80}; "
            f"`vitrail evaluate {folder} DATA` computes the metrics again"
        ) from error
    return metrics


def read_trust(record: Record) -> TrustQuality | None:
    """Sets, abstention and odd images as measured at the end of a run; None if they were not."""
    if record.metrics is None or not record.metrics.get("trust"):
        return None
    try:
        return decode_table(TrustQuality, record.metrics["trust"], "trust")
    except UserError as error:
        raise UserError(f"{record.folder / METRICS} is damaged: {error}") from error


def check_metrics(metrics: dict[str, Any]) -> None:
    """Raises TypeError or LookupError if a metric is missing or has the wrong type."""
    if not all(isinstance(metrics[key], str) for key in ("run", "model")):
        raise TypeError("a name is not a string")
    numbers = [metrics[key] for key in ("epochs", "steps", "seconds")]
    if "method" in metrics:
        numbers += [metrics["loss"], metrics["rank"]]
        metrics = {"val": None, "test": None}
    for split in ("val", "test"):
        if metrics[split] is not None:
            low, high = metrics[split]["interval"]
            numbers += [metrics[split]["accuracy"], low, high]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise TypeError("a metric is not a finite number")


def prepend_reasons(reasons: Sequence[str], recipe: str) -> str:
    """The TOML of a recipe, with the reasons as comments in its first lines."""
    return "".join(f"# {printable(reason)}\n" for reason in reasons) + recipe


def read_reasons(path: Path) -> tuple[str, ...]:
    """The comments in the first lines of a recipe."""
    reasons = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        reasons.append(line.removeprefix("# "))
    return tuple(reasons)
