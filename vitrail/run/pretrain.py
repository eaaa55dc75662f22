"""Pretrains a backbone on images without labels."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vitrail import files
from vitrail.arguments import check_arguments
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.pretraining.config import Method, PretrainConfig
from vitrail.run.recipe import Recipe, check_settings, read_recipe
from vitrail.run.request import AUTO, Options, Request, change_settings, name_data
from vitrail.run.result import Pretraining
from vitrail.run.teacher import Teacher
from vitrail.run.train import start_run
from vitrail.training.distributed import TIMEOUT, join_world


@check_arguments
def pretrain(
    data: str | Path | Source | None = None,
    *,
    method: Method | None = None,
    model: str | None = None,
    weights: str | Path = AUTO,
    minutes: float | None = None,
    epochs: int | None = None,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    report: bool = True,
    tensorboard: bool = False,
    quiet: bool = False,
    timeout: float = TIMEOUT,
    teacher: str | Path | Teacher | None = None,
    on_epoch: Callable[[dict[str, Any]], None] | None = None,
    started: float | None = None,
) -> Pretraining:
    """Pretrains a backbone on images without labels and returns the finished run.

    Test images are never read, and validation images only measure: the held-out loss, the
    effective rank of the features and, if there are labels, k-NN and a linear probe beside those
    of random weights. `vitrail.train(data, weights=run.folder)` then trains a classifier from it.

    Args:
        data: any tree of images, a table of paths (.csv, .tsv or .jsonl), a folder of tar shards,
            the name of a built-in data set, or what `vitrail.open_data` returned. By default the
            data of `recipe`.
        method: "masked" reconstructs masked patches (MAE), the default; "views" maps crops of an
            image to equal features (LeJEPA), four times as slow, for frozen features.
        model: architecture, such as "Nano/4" or "S/16".
        weights: run folder, weight file or folder, or "hf:owner/name" to start from; "auto" and
            "none" start from random weights.
        minutes: time until the results are written; the number of steps is planned to fit.
        epochs: passes over the training split, instead of `minutes`.
        recipe: TOML file with any of the settings.
        settings: settings by section, such as `{"pretrain": {"mask": 0.6}}`.
        seed: random seed of weights, data order, augmentation and masks.
        out: run folder to create, by default runs/<data>-pre-1, -2, ...
        device: "cpu", "cuda", "cuda:1", "mps"; "auto" picks a GPU if there is one.
        report: write report.html at the end.
        tensorboard: also write TensorBoard events to the run folder.
        quiet: print nothing.
        timeout: seconds that the processes of a torchrun wait for each other.
        teacher: run, weight file or folder, "timm:NAME" or `vitrail.Teacher` whose features are
            distilled, instead of a `method`.
        on_epoch: called after each evaluation with its line of log.jsonl and the total `steps`.
        started: reading of `time.monotonic()` from which `minutes` count; by default this call.

    >>> run = vitrail.pretrain("digits", epochs=1, report=False, quiet=True)
    >>> run.metrics["method"], run.backbone.features("digit.png").shape[0]
    ('masked', 1)
    """
    started = time.monotonic() if started is None else started
    given = settings or {}
    check_settings(Recipe, given)
    stored = read_recipe(recipe) if recipe else {}
    check_recipe_kind(stored)
    chosen = choose_method_name(method, given, stored, teacher is not None)
    stored, reasons = drop_other_method(stored, chosen)
    table = change_settings(stored, given, minutes, epochs)
    request = Request(
        data=name_data(data, table),
        model=model,
        weights=str(weights),
        minutes=minutes,
        epochs=epochs,
        seed=seed,
        device=device,
        method=chosen,
        teacher=str(teacher) if isinstance(teacher, Path) else teacher,
        settings=table,
        reasons=tuple(reasons),
    )
    options = Options(
        tensorboard=tensorboard, quiet=quiet, report=report, test=False, on_epoch=on_epoch
    )
    folder = None if out is None else files.expand_user(out)
    with join_world(timeout) as world:
        opened = None if data is None or isinstance(data, str | Path) else data
        run = start_run(request, options.for_rank(world), folder, started, world, opened)
    assert isinstance(run, Pretraining)
    return run


def check_recipe_kind(stored: Mapping[str, Any]) -> None:
    """Raises for the recipe of a training with labels: its model has a head."""
    if "pretrain" not in stored and stored.get("vit", {}).get("head", "none") != "none":
        raise UserError(
            "the recipe is that of a training with labels; repeat it with `vitrail train`"
        )


def choose_method_name(
    method: Method | None, given: Mapping[str, Any], stored: Mapping[str, Any], taught: bool
) -> Method:
    """The method of the caller, of the recipe, or masked; a teacher is a method of its own.

    `given` are the settings of the caller, `stored` those of the recipe.
    """
    named = given.get("pretrain", {}).get("method")
    if method is not None and named not in (None, method):
        raise UserError(f"`method` is {method}, but pretrain.method is {named}; give one of them")
    requested = method or named
    taught = taught or bool(given.get("teacher", {}).get("weights"))
    if requested is None and not taught:
        requested = stored.get("pretrain", {}).get("method")
        taught = bool(stored.get("teacher", {}).get("weights"))
    chosen = requested or ("teacher" if taught else "masked")
    if taught and chosen != "teacher":
        raise UserError(f"a teacher is a method of its own, not {chosen}; omit `method`")
    if chosen == "teacher" and not taught and not stored.get("teacher", {}).get("weights"):
        raise UserError("`method` teacher needs a teacher; give `teacher`")
    return PretrainConfig(method=chosen).method


def drop_other_method(
    stored: Mapping[str, Any], method: Method
) -> tuple[dict[str, Any], list[str]]:
    """The recipe without what was chosen for another method, and the reason."""
    theirs = stored.get("pretrain", {}).get("method", method)
    if theirs == method:
        return dict(stored), []
    kept = {name: value for name, value in stored.items() if name not in ("pretrain", "teacher")}
    kept["data"] = {k: v for k, v in stored.get("data", {}).items() if k != "augment"}
    kept["pretrain"] = {k: v for k, v in stored["pretrain"].items() if k == "comparison"}
    sections = [name for name in ("pretrain", "teacher") if name in stored] + ["data.augment"]
    names = ", ".join(f"[{name}]" for name in sections)
    return kept, [f"recipe: without its {names}, which are for method {theirs}"]
