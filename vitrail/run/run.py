"""A run from its first choice to its results: owns the run folder."""

import json
import logging
import math
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail import files
from vitrail.data.config import Preprocess
from vitrail.data.loader import Loader
from vitrail.data.source import Source, Split, fingerprint, indices, open_data
from vitrail.errors import UserError
from vitrail.evaluation.metrics import accuracy, fit_temperature, interval
from vitrail.run import auto, predictions
from vitrail.run.build import check_sense, make_learner, make_loader, pick_device
from vitrail.run.drive import FRESH, Driver, OnEpoch
from vitrail.run.journal import Journal
from vitrail.run.live import Live
from vitrail.run.plan import plan
from vitrail.run.predictions import Predictions, Seen, ask
from vitrail.run.recipe import Recipe, build, digest, merge, read_recipe, write_toml
from vitrail.run.record import JOURNAL, METRICS, MODEL, RECIPE, asked_instead, with_reasons
from vitrail.training import state
from vitrail.training.learner import Learner, computed_in
from vitrail.zoo import load as zoo
from vitrail.zoo.file import load_model, save_model

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Run:
    folder: Path
    metrics: dict[str, Any]  # as `train --json` prints them


@dataclass(frozen=True, kw_only=True)
class Showing:
    """What is told of a run, and to whom."""

    tensorboard: bool = False
    quiet: bool = False
    test: bool = True  # look at the test images at the end
    on_epoch: OnEpoch = lambda line: None


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What was asked for beside the data; None lets the data decide."""

    model: str | None = None
    weights: str | None = None
    minutes: float | None = None
    epochs: int | None = None
    seed: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise UserError(f"minutes is {self.minutes:g}; give a number above 0")
        if self.minutes is not None and self.epochs is not None:
            raise UserError("minutes and epochs both say how long; give one of them")


def train(
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    recipe: str | Path | None = None,
    changes: Mapping[str, Any] | None = None,
    tensorboard: bool = False,
    report: bool = True,
    test: bool = True,
    quiet: bool = False,
    began: float | None = None,
    on_epoch: OnEpoch = lambda line: None,
    **wishes: Any,
) -> Run:
    """Trains a model on `data` and leaves a run folder.

    `wishes` are those of `Wishes`: model, weights, minutes, epochs, seed, device. `changes` are
    settings by section, such as {"train": {"lr": 3e-4}}; they win over `recipe`, a TOML file,
    which wins over what is chosen from the data. Minutes count from `began`, a reading of
    time.monotonic, until the results are written; by default from this call. After that, and
    unless `report` is false, comes the page `report.html`. With `test` false no test image is
    looked at. `on_epoch` is told of every look at the validation images.
    """
    began = time.monotonic() if began is None else began
    asked = build(Wishes, wishes)
    live = Live(quiet=quiet)
    table = merge(read_recipe(recipe) if recipe else {}, changes or {})
    data = str(data or table.get("source", ""))
    if not data:
        raise UserError("no data was given; give a folder, a table, or a name such as digits")
    source = open_data(data)
    place = pick_device(asked.device)
    settings, reasons = design(source, data, table, asked, place, live)
    folder = fresh_run(out, source)
    with state.lock(folder):
        try:
            loader = make_loader(settings, source, place)
            loader.prepare("train", "val")
            learner = make_learner(settings, place)
            settings = plan(settings, loader, learner, asked.minutes, began, live)
            files.write(folder / RECIPE, with_reasons(reasons, write_toml(settings)))
        except BaseException:
            remove_untouched(folder)
            raise
        facts = {**FRESH, "data": fingerprint(source)}
        live.say(f"run {folder}")
        show = Showing(tensorboard=tensorboard, quiet=quiet, test=test, on_epoch=on_epoch)
        done = go(folder, settings, loader, learner, facts, show)
        return told(done, loader, live) if report else done


def resume(
    folder: str | Path,
    *,
    device: str = "auto",
    report: bool = True,
    test: bool = True,
    quiet: bool = False,
    on_epoch: OnEpoch = lambda line: None,
) -> Run:
    """Goes on with a run where its newest whole state stands."""
    folder = Path(folder)
    if not (folder / RECIPE).is_file():
        raise UserError(f"{folder} is no run: it has no {RECIPE}; give a folder that train made")
    live = Live(quiet=quiet)
    with state.lock(folder):
        if (folder / METRICS).is_file():
            live.say(f"{folder} is finished")
            return Run(folder=folder, metrics=json.loads((folder / METRICS).read_text()))
        settings = build(Recipe, read_recipe(folder / RECIPE))
        source, place = open_data(settings.source), pick_device(device)
        loader, learner = make_loader(settings, source, place), make_learner(settings, place)
        facts = {**FRESH, "data": fingerprint(source)}
        if (saved := state.load(folder / "state")) is not None:
            for warning in saved.warnings:
                live.say(warning)
            if saved.facts["data"] != facts["data"]:
                raise UserError(
                    f"{settings.source} is not the data this run began with: images were added, "
                    f"removed, renamed or changed; put them back, or start a new run"
                )
            learner.restore(saved.tensors)
            facts |= saved.facts
        live.say(f"run {folder}: going on from step {facts['step']} of {settings.train.steps}")
        loader.prepare("train", "val")
        show = Showing(quiet=quiet, test=test, on_epoch=on_epoch)
        done = go(folder, settings, loader, learner, facts, show)
        return told(done, loader, live) if report else done


def design(
    source: Source,
    data: str,
    table: Mapping[str, Any],
    asked: Wishes,
    place: torch.device,
    live: Live,
) -> tuple[Recipe, list[str]]:
    """The whole recipe, chosen from the data, changed by recipe file and flags; and why."""
    facts = auto.look(source)
    reasons = [f"{source.name}: {facts}"]
    given = dict(table.get("train", {}))
    if asked.seed is not None:
        given["seed"] = asked.seed
    if asked.epochs is not None:
        given |= {"epochs": asked.epochs, "steps": 0}
    if asked.minutes is not None:
        given["steps"] = 0
    epochs = None if asked.minutes else given.get("epochs")
    weights = asked.weights or table.get("weights")
    if weights:
        loaded = zoo.load(weights)
        view = loaded.view or Preprocess(size=loaded.model.config.image)
        name = loaded.facts.get("name") or Path(weights).name
        choice = auto.fine_tune(facts, name, loaded.model.config, view, epochs)
        choice.settings["weights"] = (
            str(Path(weights).resolve()) if Path(weights).exists() else weights
        )
    else:
        model = asked.model or table.get("model")
        choice = auto.choose(
            facts, model=model, minutes=asked.minutes, epochs=epochs, device=place.type
        )
    changes = {**table, "train": given}
    if instead := asked_instead(choice.settings, changes):
        choice.reasons.append(f"asked for: {', '.join(instead)}")
    reasons += choice.reasons
    live.say("\n  ".join(reasons))
    settings = merge(choice.settings, changes)
    settings["source"] = str(Path(data).expanduser().resolve()) if source.path else data
    if "size" not in table.get("view", {}):
        settings["view"] = merge(settings["view"], {"size": settings["vit"]["image"]})
    made = build(Recipe, settings)
    check_sense(made, facts)
    return made, reasons


def fresh_run(out: str | Path | None, source: Source) -> Path:
    """A new run folder; of one that holds a run, how to go on with it."""
    if out is not None and (Path(out) / RECIPE).exists():
        raise UserError(
            f"{out} holds a run; go on with `vitrail resume {out}`, or choose another --out"
        )
    return files.fresh_folder(out, Path("runs") / source.name)


def remove_untouched(folder: Path) -> None:
    """Nothing was trained: nothing stays behind."""
    (folder / ".lock").unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def go(
    folder: Path,
    recipe: Recipe,
    loader: Loader,
    learner: Learner,
    facts: dict[str, Any],
    show: Showing,
) -> Run:
    """Trains to the end, then judges the best weights."""
    about = describe(recipe, loader, facts)

    def keep(best: dict[str, Any]) -> None:
        save_model(folder / MODEL, learner.result, {**about, "best": best})  # type: ignore[arg-type]

    journal = Journal(folder / JOURNAL, facts["step"], show.tensorboard)
    with closing(journal), Live(recipe.train.steps, show.quiet) as live:
        on_epoch = show.on_epoch
        Driver(folder, recipe, loader, learner, facts, live, journal, keep, on_epoch).drive()
    return judge(folder, recipe, loader, about, facts, ("val", "test") if show.test else ("val",))


def told(done: Run, loader: Loader, live: Live) -> Run:
    """Makes the page of a finished run; whatever goes wrong with it, the run stays finished."""
    from vitrail.run.report import make

    live.say("finished; making the report")
    try:
        make(done.folder, loader)
    except Exception as error:
        again = f"`vitrail report {done.folder}` tries again"
        log.warning(f"the run is finished, but its report was not made: {error}; {again}")
    return done


def describe(recipe: Recipe, loader: Loader, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a model file says of itself beside its architecture."""
    source = loader.source
    return {
        "name": recipe.model,
        "classes": list(source.classes),
        "channels": recipe.view.channels,
        "preprocess": recipe.view.plain(),
        "data": {"name": source.name, "source": recipe.source, "fingerprint": facts["data"]},
        "recipe": digest(recipe),
        "temperature": None,
        "metrics": {},
    }


def judge(
    folder: Path,
    recipe: Recipe,
    loader: Loader,
    about: dict[str, Any],
    facts: Mapping[str, Any],
    splits: tuple[Split, ...],
) -> Run:
    """The best weights on validation and test images; writes what a finished run leaves."""
    model, kept = load_model(folder / MODEL)
    model.to(loader.device)
    dtype = computed_in(recipe.train.precision, loader.device)
    scores: dict[str, Any] = {"val": None, "test": None}
    temperature = None
    seen: dict[Split, Seen] = {}
    for split in splits:
        if not len(indices(loader.source, split)):
            continue
        answers = ask(model, loader, split, dtype)
        rate = accuracy(answers.logits, answers.labels)
        scores[split] = {"accuracy": rate, "interval": list(interval(rate, len(answers.labels)))}
        if split == "val":
            temperature = fit_temperature(answers.logits, answers.labels)
        seen[split] = answers.judged(temperature)
    metrics = {
        "run": str(folder),
        "model": recipe.model,
        "epochs": -(-facts["step"] // loader.steps),
        "steps": facts["step"],
        "seconds": round(facts["seconds"], 1),
        **scores,
    }
    ending = {**about, "best": kept["best"], "temperature": temperature, "metrics": scores}
    save_model(folder / MODEL, model, ending)
    origin = predictions.about(loader.source, facts["data"], seen, temperature)
    origin["made"] = predictions.made()
    predictions.keep(folder, Predictions(splits=seen, facts=origin))
    files.write(folder / METRICS, json.dumps(metrics, indent=1) + "\n")
    return Run(folder=folder, metrics=metrics)
