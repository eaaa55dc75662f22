"""What `train` would do with a data set: the one place that composes its recipe."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail.data.open import resolve_data
from vitrail.data.source import Source
from vitrail.data.sources.catalogue import DATASETS
from vitrail.errors import UserError
from vitrail.run import auto
from vitrail.run.build import check_recipe, load_for_fine_tuning
from vitrail.run.recipe import (
    Recipe,
    check_settings,
    flatten_settings,
    merge_settings,
    settings_from_dict,
    settings_to_dict,
)
from vitrail.run.request import Request


@dataclass(frozen=True, kw_only=True)
class Design:
    recipe: Recipe
    reasons: list[str]  # one line per choice; the first two describe the data and the device
    settings: dict[str, Any]  # what was chosen from the data, without the request's own settings


def design_recipe(
    source: Source, request: Request, device: torch.device, processes: int = 1
) -> Design:
    """The complete recipe: chosen from the data, changed by the request; and why.

    Raises the `UserError` that training would end with, if it cannot work.
    """
    check_settings(Recipe, request.settings)
    summary = auto.summarise(source)
    requested = requested_settings(request)
    choice = choose_settings(summary, request, requested, device, processes)
    reasons = [f"{source.name}: {summary}", explain_device(device, request.device)]
    reasons += choice.reasons
    if changed := list_changes(choice.settings, requested):
        reasons.append(f"requested: {', '.join(changed)}")
    settings = merge_settings(choice.settings, requested)
    settings["source"] = locate_source(source, request.data)
    if "size" not in request.settings.get("preprocess", {}):
        size = {"size": settings["vit"]["image"]}
        settings["preprocess"] = merge_settings(settings["preprocess"], size)
    recipe = settings_from_dict(Recipe, settings)
    check_recipe(recipe, summary)
    return Design(recipe=recipe, reasons=reasons, settings=choice.settings)


def locate_source(source: Source, data: str) -> str:
    """The path or built-in name that opens the data again; images in memory have neither."""
    if source.path is None and source.name not in DATASETS:
        return f"{source.name} (in memory)"
    return resolve_data(data)


def requested_settings(request: Request) -> dict[str, Any]:
    """The settings of the request, with its seed, epochs and weights among them."""
    train = dict(request.settings.get("train", {}))
    if request.seed is not None:
        train["seed"] = request.seed
    if request.epochs is not None:
        train["epochs"] = request.epochs
    requested = {**request.settings, "train": train}
    if weights := request.start_from:
        requested["weights"] = str(Path(weights).resolve()) if Path(weights).exists() else weights
    return requested


def choose_settings(
    summary: auto.DataSummary,
    request: Request,
    requested: Mapping[str, Any],
    device: torch.device,
    processes: int,
) -> auto.Choice:
    """What the data determines: fine-tuning if there are weights, else training from scratch."""
    train, weights = requested["train"], request.start_from
    epochs, steps = train.get("epochs"), train.get("steps", 0)
    if not weights:
        return auto.choose_from_scratch(
            summary,
            model=request.model or request.settings.get("model"),
            minutes=request.minutes,
            epochs=epochs,
            steps=steps,
            batch=train.get("batch"),
            device=device.type,
            processes=processes,
        )
    if request.model:
        raise UserError(
            f"`model` {request.model} and `weights` {weights} both name a model; give one of them"
        )
    loaded = load_for_fine_tuning(summary, weights, request.settings)
    name = loaded.metadata.name or Path(weights).name
    timed = request.minutes is not None or steps > 0
    choice = auto.choose_fine_tuning(
        summary, name, loaded.model.config, loaded.preprocess, epochs, timed
    )
    choice.settings["weights"] = requested["weights"]
    return choice


def explain_device(device: torch.device, requested: str) -> str:
    why = "requested"
    if requested == "auto":
        why = "no GPU is available" if device.type == "cpu" else "a GPU is available"
    return f"device {device.type}: {why}"


def list_changes(chosen: Mapping[str, Any], requested: Mapping[str, Any]) -> list[str]:
    """Settings in which a request differs from what was chosen, such as "train.batch 64"."""
    ours = flatten_settings(settings_to_dict(Recipe())) | flatten_settings(chosen)
    theirs = flatten_settings(requested)
    theirs.pop("source", None)
    return [f"{key} {value}" for key, value in theirs.items() if ours.get(key) != value]
