"""A run from its first choice to its results: owns the run folder."""

import glob
import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vitrail import files
from vitrail.data.config import Columns
from vitrail.data.loader import Loader
from vitrail.data.open import address, open_data
from vitrail.data.source import Source, Split, fingerprint
from vitrail.data.sources.places import keep_out
from vitrail.errors import UserError
from vitrail.evaluation.metrics import accuracy, fit_temperature, interval
from vitrail.model.vit import ViT
from vitrail.run import auto, predictions
from vitrail.run.build import check_sense, make_learner, make_loader, pick_device, weights_for
from vitrail.run.drive import FRESH, Driver, OnEpoch
from vitrail.run.journal import Journal, summary_writer
from vitrail.run.live import Live
from vitrail.run.plan import plan
from vitrail.run.predictions import Predictions, Seen, ask_together
from vitrail.run.recipe import (
    Recipe,
    build,
    check,
    columns_of,
    digest,
    merge,
    plain,
    read_recipe,
    write_toml,
)
from vitrail.run.record import (
    JOURNAL,
    METRICS,
    MODEL,
    RECIPE,
    REPORT,
    asked_instead,
    read_metrics,
    read_reasons,
    with_reasons,
)
from vitrail.training import checkpoint
from vitrail.training.distributed import TIMEOUT, Together, joined
from vitrail.training.learner import Learner, computed_in
from vitrail.zoo.file import load_model, save_model

log = logging.getLogger(__name__)

LAUNCH = ".launch"  # in a run folder: which torchrun began it
DATA = ".data"  # there too: the checksum of the data it began with
LENGTHS = ("epochs", "steps")  # settings that say how long a run is
MARKS = (".lock", LAUNCH, DATA)  # all that a run leaves before it begins


@dataclass(frozen=True, kw_only=True)
class Run:
    folder: Path
    metrics: dict[str, Any]  # as `train --json` prints them
    first: bool = True  # of the processes that trained it; the others stay silent


@dataclass(frozen=True, kw_only=True)
class Showing:
    """What is told of a run, and to whom."""

    tensorboard: bool = False
    quiet: bool = False
    report: bool = True
    test: bool = True  # look at the test images at the end
    on_epoch: OnEpoch = lambda line: None

    @property
    def judged(self) -> tuple[Split, ...]:
        """What the final weights are asked about."""
        return ("val", "test") if self.test else ("val",)

    def by(self, together: Together) -> "Showing":
        """Only the first of the processes speaks."""
        return self if together.first else replace(self, quiet=True, report=False)


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What was asked for beside the data; None lets the data decide."""

    model: str | None = None
    weights: str | Path | None = None
    minutes: float | None = None
    epochs: int | None = None
    seed: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.minutes is not None and not 0 < self.minutes <= 1e7:
            raise UserError(f"minutes is {self.minutes:g}; give a number above 0, at most 1e7")


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
    timeout: float = TIMEOUT,
    **wishes: Any,
) -> Run:
    """Trains a model on `data` and leaves a run folder.

    `wishes` are those of `Wishes`: model, weights, minutes, epochs, seed, device. `changes` are
    settings by section, such as {"train": {"lr": 3e-4}}; they win over `recipe`, a TOML file,
    which wins over what is chosen from the data. Minutes count from `began`, a reading of
    time.monotonic, until the results are written; by default from this call. After that, and
    unless `report` is false, comes the page `report.html`. With `test` false no test image is
    looked at. `on_epoch` is told of every look at the validation images.

    The processes of a torchrun train together, and wait `timeout` seconds for each other. When it
    starts them again after a failure, they go on with the run they began.
    """
    began = time.monotonic() if began is None else began
    asked = build(Wishes, wishes)
    table = asked_table(recipe, changes or {}, asked.minutes, asked.epochs)
    if isinstance(data, Path):  # a folder is meant, whatever built-in set has its name
        data = str(files.expanded(data).absolute())
    data = data or table.get("source", "")
    out = None if out is None else files.expanded(out)
    if not data:
        raise UserError("no data was given; give a folder, a table, or a name such as digits")
    show = Showing(
        tensorboard=tensorboard, quiet=quiet, report=report, test=test, on_epoch=on_epoch
    )
    with joined(timeout) as together:
        show = show.by(together)
        live = Live(quiet=show.quiet)
        if tensorboard and together.first:
            summary_writer()  # not installed, it is told before anything is written
        if together.first and out is not None and not began_here(out, together):
            check_free(out)
        source = opened(data, columns_of(table), together)
        earlier = together.tell(begun(out, source, together))
        if earlier and together.tell((Path(earlier) / RECIPE).is_file()):
            return go_on(Path(earlier), asked.device, show, together)
        place = pick_device(asked.device, together.local)
        settings, reasons, folder = Recipe(), [""], Path()
        if together.first:
            settings, reasons = design(source, data, table, asked, place, together.world)
            folder = Path(earlier) if earlier else fresh_run(out, source)
        settings, folder = agreed(settings, together), Path(together.tell(str(folder)))
        with owned(folder, together):
            live.say("\n  ".join(reasons))
            try:
                if together.first:
                    claim(folder, together.launch)
                loader = make_loader(settings, source, place, together)
                facts = {**FRESH, "data": same_data(source, together)}
                loader.prepare("train", *show.judged)
                learner = make_learner(settings, place)
                planned = plan(settings, loader, learner, asked.minutes, began, live, together)
                settings = agreed(planned, together)
                if together.first:
                    dated = fingerprint(source, dates=True)
                    files.write(folder / DATA, f"{facts['data']}\n{dated}")
                    files.write(folder / RECIPE, with_reasons(reasons, write_toml(settings)))
            except BaseException:
                if together.first:
                    remove_untouched(folder)
                raise
            live.say(f"run {folder}")
            return go(folder, settings, loader, learner, facts, show, together)


def resume(
    folder: str | Path,
    *,
    device: str = "auto",
    skip_broken: bool = False,
    report: bool = True,
    test: bool = True,
    quiet: bool = False,
    on_epoch: OnEpoch = lambda line: None,
    timeout: float = TIMEOUT,
) -> Run:
    """Goes on with a run where its newest whole state stands.

    With `skip_broken` it leaves out images that cannot be read from here on.
    """
    show = Showing(quiet=quiet, report=report, test=test, on_epoch=on_epoch)
    with joined(timeout) as together:
        return go_on(files.expanded(folder), device, show.by(together), together, skip_broken)


def go_on(
    folder: Path, device: str, show: Showing, together: Together, skip_broken: bool = False
) -> Run:
    """Only the first process needs to see the run folder: it hands out what it reads there."""
    if together.first and not (folder / RECIPE).is_file():
        raise UserError(f"{folder} is no run: it has no {RECIPE}; give a folder that train made")
    live = Live(quiet=show.quiet)
    with owned(folder, together):
        metrics = together.tell(read_metrics(folder) if together.first else None)
        if metrics is not None:
            live.say(f"{folder} is finished")
            done = Run(folder=folder, metrics=metrics, first=together.first)
            missing = show.report and not (folder / REPORT).is_file()
            return told(done, None, live) if missing else done
        settings = Recipe()
        if together.first:
            files.sweep(folder, RECIPE, JOURNAL, MODEL, METRICS, predictions.FILE)
            settings = build(Recipe, read_recipe(folder / RECIPE))
            if skip_broken:
                settings = replace(settings, data=replace(settings.data, skip_broken=True))
        settings = agreed(settings, together)
        source = opened(settings.source, settings.data.columns, together)
        place = pick_device(device, together.local)
        loader = make_loader(settings, source, place, together)
        facts = {**FRESH, "data": same_data(source, together)}
        saved = checkpoint.load(folder / "checkpoints") if together.first else None
        if together.first:
            check_data(folder, settings, source, facts["data"], saved, live)
        if saved is not None:
            for warning in saved.warnings:
                live.say(warning)
            facts |= saved.facts
            if facts["best"] and not holds_model(folder):
                live.say(f"{MODEL} is missing or damaged; the best weights from here on are kept")
                facts["best"] = None
        facts = together.tell(facts)
        tensors = together.hand_out(saved.tensors if saved else {})
        # a state holds every tensor: the weights that it all began from may be gone by now
        learner = make_learner(replace(settings, weights="") if tensors else settings, place)
        if tensors:
            learner.restore(tensors)
        if together.first and skip_broken:
            reasons = read_reasons(folder / RECIPE)
            files.write(folder / RECIPE, with_reasons(reasons, write_toml(settings)))
        show = replace(show, tensorboard=together.first and goes_on_board(folder, show, live))
        live.say(f"run {folder}: going on from step {facts['step']} of {settings.train.steps}")
        loader.prepare("train", *show.judged)
        return go(folder, settings, loader, learner, facts, show, together)


def goes_on_board(folder: Path, show: Showing, live: Live) -> bool:
    """Whether a run writes TensorBoard's events further; without TensorBoard it goes on too."""
    if not show.tensorboard and not (folder / "tensorboard").is_dir():
        return False
    try:
        summary_writer()
    except UserError as error:
        live.say(f"{error}; the run goes on without its events")
        return False
    return True


def asked_table(
    recipe: str | Path | None,
    changes: Mapping[str, Any],
    minutes: float | None,
    epochs: int | None,
) -> dict[str, Any]:
    """What a recipe file and flags set; one flag may say how long, and wins over the file."""
    check(Recipe, changes)
    table = read_recipe(recipe) if recipe else {}
    wishes = {"minutes": minutes, "epochs": epochs}
    lengths = [name for name, wish in wishes.items() if wish is not None]
    lengths += [f"train.{one}" for one in LENGTHS if changes.get("train", {}).get(one)]
    if len(lengths) > 1:
        raise UserError(f"{lengths[0]} and {lengths[1]} both say how long; give one of them")
    if lengths:
        for name in LENGTHS:
            table.get("train", {}).pop(name, None)
    return merge(table, changes)


def opened(data: str, columns: Columns, together: Together) -> Source:
    """The data set; a download is the first process's."""
    source = open_data(data, columns=columns) if together.first else None
    together.tell(None)
    return source or open_data(data, columns=columns, progress=False)


def same_data(source: Source, together: Together) -> str:
    """The checksum of the data, which machines may have copied wrongly."""
    mine = fingerprint(source)
    if together.tell(mine) != mine:
        raise UserError(
            f"{source.name} at rank {together.rank} is not what rank 0 has; "
            f"give all machines the same files"
        )
    return mine


def agreed(recipe: Recipe, together: Together) -> Recipe:
    """The first process's recipe."""
    return recipe if together.world == 1 else build(Recipe, together.tell(plain(recipe)))


def begun(out: Path | None, source: Source, together: Together) -> str:
    """The run folder that an earlier attempt of the same torchrun began; empty if none did."""
    folders = [out] if out else Path("runs").glob(f"{glob.escape(source.name)}-*")
    return next((str(folder) for folder in folders if began_here(folder, together)), "")


def began_here(folder: Path, together: Together) -> bool:
    mark = folder / LAUNCH
    return bool(together.launch) and mark.is_file() and mark.read_text() == together.launch


@contextmanager
def owned(folder: Path, together: Together) -> Iterator[None]:
    """Nobody else writes into the folder while the first process is here."""
    with checkpoint.lock(folder) if together.first else nullcontext():
        yield


def design(
    source: Source,
    data: str,
    table: Mapping[str, Any],
    asked: Wishes,
    place: torch.device,
    processes: int = 1,
) -> tuple[Recipe, list[str]]:
    """The whole recipe, chosen from the data, changed by recipe file and flags; and why."""
    check(Recipe, table)
    facts = auto.look(source)
    reasons = [f"{source.name}: {facts}"]
    there = "there is no GPU" if place.type == "cpu" else "there is one"
    reasons.append(f"device {place.type}: {there if asked.device == 'auto' else 'asked for'}")
    given = dict(table.get("train", {}))
    if asked.seed is not None:
        given["seed"] = asked.seed
    if asked.epochs is not None:
        given["epochs"] = asked.epochs
    epochs, steps = given.get("epochs"), given.get("steps", 0)
    changes = {**table, "train": given}
    weights = str(asked.weights or table.get("weights", ""))
    if weights and asked.model:
        raise UserError(f"model {asked.model} and weights {weights} are two models; give one")
    if weights:
        loaded = weights_for(facts, weights, table)
        name = loaded.facts.get("name") or Path(weights).name
        timed = asked.minutes is not None or steps > 0
        choice = auto.fine_tune(facts, name, loaded.model.config, loaded.view, epochs, timed)
        changes["weights"] = str(Path(weights).resolve()) if Path(weights).exists() else weights
        choice.settings["weights"] = changes["weights"]
    else:
        model = asked.model or table.get("model")
        choice = auto.choose(
            facts,
            model=model,
            minutes=asked.minutes,
            epochs=epochs,
            steps=steps,
            batch=given.get("batch"),
            device=place.type,
            processes=processes,
        )
    if instead := asked_instead(choice.settings, changes):
        choice.reasons.append(f"asked for: {', '.join(instead)}")
    reasons += choice.reasons
    settings = merge(choice.settings, changes)
    settings["source"] = address(data)
    if "size" not in table.get("view", {}):
        settings["view"] = merge(settings["view"], {"size": settings["vit"]["image"]})
    made = build(Recipe, settings)
    check_sense(made, facts)
    return made, reasons


def check_free(out: Path) -> None:
    """Refuses a folder in which something lies; of a run, says how to go on."""
    if (out / RECIPE).exists():
        raise UserError(
            f"{out} holds a run; go on with `vitrail resume {out}`, or choose another --out"
        )
    if not never_began(out):
        files.check_empty(out)


def fresh_run(out: Path | None, source: Source) -> Path:
    """A new run folder outside of the data."""
    usual = Path("runs") / source.name
    files.check_text(out or usual)
    keep_out(source, out or usual, "--out")
    return out if out is not None and never_began(out) else files.fresh_folder(out, usual)


def never_began(folder: Path) -> bool:
    """Whether all that lies here is what a run leaves that is killed in its first seconds."""
    torn = tuple(f".{name}." for name in (RECIPE, *MARKS))
    return folder.is_dir() and all(
        path.name in MARKS or (path.name.startswith(torn) and path.suffix == ".tmp")
        for path in folder.iterdir()
    )


def claim(folder: Path, launch: str) -> None:
    """Clears what a killed run left, and says which torchrun is here now."""
    files.sweep(folder, RECIPE, *MARKS)
    (folder / LAUNCH).unlink(missing_ok=True)
    if launch:
        files.write(folder / LAUNCH, launch)


def check_data(
    folder: Path,
    recipe: Recipe,
    source: Source,
    now: str,
    saved: checkpoint.State | None,
    live: Live,
) -> None:
    """Stops unless the data has the checksum that it had when the run began.

    An edit that leaves sizes alone shows in the dates only, but so does a copy: that is just said.
    """
    then, dated = now, ""  # older versions wrote them down with the first state only, or not at all
    if (folder / DATA).is_file():
        then, _, dated = (folder / DATA).read_text(errors="replace").partition("\n")
    if saved is not None:
        then = saved.facts["data"]
    if then != now or len(source.classes) != recipe.vit.classes:
        raise UserError(
            f"{recipe.source} is not the data this run began with: images were added, "
            f"removed, renamed or changed; put them back, or start a new run"
        )
    if dated and dated != fingerprint(source, dates=True):
        live.say(
            f"files of {recipe.source} were written or copied since this run began; "
            f"if images were changed, it no longer is the same run"
        )


def remove_untouched(folder: Path) -> None:
    """Nothing was trained: nothing stays behind."""
    for name in MARKS:
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def go(
    folder: Path,
    recipe: Recipe,
    loader: Loader,
    learner: Learner,
    facts: dict[str, Any],
    show: Showing,
    together: Together,
) -> Run:
    """Trains to the end, then judges the best weights."""
    about = describe(recipe, loader, facts)

    def keep(best: dict[str, Any] | None) -> None:
        if not folder.is_dir():
            raise checkpoint.gone(folder, "the best model")
        save_model(folder / MODEL, learner.result, {**about, "best": best})  # type: ignore[arg-type]

    with ExitStack() as stack:
        live = stack.enter_context(Live(recipe.train.steps, show.quiet))
        journal = None
        if together.first:
            journal = Journal(folder / JOURNAL, facts["step"], show.tensorboard)
            stack.enter_context(closing(journal))
        Driver(
            folder,
            recipe,
            loader,
            learner,
            facts,
            live,
            journal,
            keep,
            on_epoch=show.on_epoch,
            together=together,
        ).drive()
    if facts["best"] is None and together.first:  # no look was left after the model was lost
        keep(None)
    done = judge(folder, recipe, loader, about, facts, show.judged, together)
    return told(done, loader.alone(), live) if show.report else done


def holds_model(folder: Path) -> bool:
    try:
        load_model(folder / MODEL)
    except UserError:
        return False
    return True


def told(done: Run, loader: Loader | None, live: Live) -> Run:
    """Makes the page of a finished run; whatever goes wrong with it, the run stays finished."""
    from vitrail.run.report.make import make

    live.say("making the report")
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
        "data": {
            "name": source.name,
            "source": recipe.source,
            "columns": plain(recipe.data.columns),
            "fingerprint": facts["data"],
        },
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
    together: Together,
) -> Run:
    """The best weights on validation and test images; writes what a finished run leaves."""
    model, kept = load_model(folder / MODEL) if together.first else (ViT(recipe.vit).eval(), {})
    model.load_state_dict(together.hand_out(model.state_dict()))
    model.to(loader.device)
    dtype = computed_in(recipe.train.precision, loader.device)
    scores: dict[str, Any] = {"val": None, "test": None}
    temperature = None
    seen: dict[Split, Seen] = {}
    for split in splits:
        if not len(loader.alone().share(split)):
            continue
        answers = ask_together(model, loader, split, dtype, together)
        if answers is None:
            continue
        rate = accuracy(answers.logits, answers.labels)
        scores[split] = {"accuracy": rate, "interval": list(interval(rate, len(answers.labels)))}
        if split == "val":
            temperature = fit_temperature(answers.logits, answers.labels)
        seen[split] = answers.judged(temperature)
    if not together.first:
        return Run(folder=folder, metrics=together.tell({}), first=False)
    metrics = {
        "run": str(folder),
        "model": recipe.model,
        "epochs": -(-facts["step"] // loader.steps),
        "steps": facts["step"],
        "seconds": round(facts["seconds"], 1),
        **scores,
    }
    made = predictions.made()
    ending = {**about, "best": kept["best"], "temperature": temperature, "metrics": scores}
    save_model(folder / MODEL, model, {**ending, "made": made})
    origin = predictions.about(loader.source, facts["data"], seen, temperature) | {"made": made}
    predictions.keep(folder, Predictions(splits=seen, facts=origin))
    files.write(folder / METRICS, json.dumps(metrics, indent=1) + "\n")
    return Run(folder=folder, metrics=together.tell(metrics))
