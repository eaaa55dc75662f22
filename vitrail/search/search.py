"""A search from its plan to the winner, trained again and tested once: owns the search folder."""

import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitrail import files
from vitrail.data.source import fingerprint, indices, open_data
from vitrail.errors import UserError
from vitrail.run import run
from vitrail.run.build import pick_device
from vitrail.run.live import Live
from vitrail.run.recipe import Recipe, build, columns_of, merge, plain, read_recipe, write_toml
from vitrail.run.record import METRICS, RECIPE, with_reasons
from vitrail.search import study as shared
from vitrail.search.space import (
    Space,
    changes,
    default_space,
    grid,
    parse,
    read_space,
    starting_point,
    to_plain,
)
from vitrail.training.loop import Diverged

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

PLAN, BEST, RESULT = "search.json", "best.toml", "result.json"
FORMAT = 1
TRIALS = 20

Watch = Callable[["Study"], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that a process needs to know to take part."""

    data: str
    fingerprint: str
    table: dict[str, Any]  # settings that were asked for: recipe file and flags
    wishes: dict[str, Any]  # model, weights, epochs, seed, device
    base: dict[str, Any]  # the whole recipe that the search starts from
    space: dict[str, Any]
    grid: bool
    minutes: float | None  # of each trial; None: the recipe's epochs
    format: int = FORMAT

    @property
    def recipe(self) -> Recipe:
        return build(Recipe, self.base)

    @property
    def dimensions(self) -> Space:
        return parse(self.space)


@dataclass(frozen=True, kw_only=True)
class Found:
    folder: Path
    facts: dict[str, Any]  # as `--json` prints them


def search(
    data: str,
    *,
    out: Path | None = None,
    space: Path | None = None,
    grid: bool = False,
    trials: int | None = None,
    minutes: float | None = None,
    jobs: int = 1,
    recipe: Path | None = None,
    changes: Mapping[str, Any] | None = None,
    began: float | None = None,
    quiet: bool = False,
    watch: Callable[[int], Watch] = lambda most: lambda study: None,
    **wishes: Any,
) -> Found:
    """Searches, or goes on with the search in `out`; then trains and tests the winner.

    `minutes` are for all of it. `watch` is given the number of trials, and what it returns is
    shown the study after each of them.
    """
    shared.needed()
    began = time.monotonic() if began is None else began
    check(trials, minutes, jobs)
    table = merge(read_recipe(recipe) if recipe else {}, changes or {})
    table.pop("source", None)
    folder, made = planned(data, out, space, grid, trials, minutes, jobs, table, wishes, quiet)
    most = trials or (count_grid(made) if grid else TRIALS)
    study = shared.open_study(folder, grid=grid)
    prepare(study, made, folder)
    deadline = None if minutes is None else began + 60 * minutes
    each = 60 * (made.minutes or 0)
    stop = None if deadline is None else deadline - each  # the winner needs as much again
    show = watch(most)
    if jobs == 1:
        work(folder, most, stop, show=show)
    else:
        share(folder, most, stop, jobs, lambda: show(study))
    return conclude(study, folder, made, most, deadline, quiet)


def check(trials: int | None, minutes: float | None, jobs: int) -> None:
    for name, number in (("trials", trials), ("jobs", jobs)):
        if number is not None and number < 1:
            raise UserError(f"{name} is {number}; give a whole number of at least 1")
    if minutes is not None and not 0 < minutes < math.inf:
        raise UserError(f"minutes is {minutes:g}; give a number above 0")


def planned(
    data: str,
    out: Path | None,
    space: Path | None,
    in_grid: bool,
    trials: int | None,
    minutes: float | None,
    jobs: int,
    table: dict[str, Any],
    wishes: dict[str, Any],
    quiet: bool,
) -> tuple[Path, Plan]:
    """The plan, written into its folder; or the one that is there, if it is of this search."""
    given = read_space(space) if space else None
    source = open_data(data, columns=columns_of(table))
    if not len(indices(source, "val")):
        raise UserError(f"{source.name} has no validation images, by which settings are chosen")
    folder = out or Path("runs") / f"search-{source.name}"
    rounds = math.ceil((trials or TRIALS) / jobs) + 1  # and one for the winner
    each = None if minutes is None else minutes / rounds
    asked = build(run.Wishes, {**wishes, **({} if each is None else {"minutes": each})})
    place = pick_device(asked.device)
    base, _ = run.design(source, data, table, asked, place, Live(quiet=quiet))
    wanted = given or default_space(base)
    if in_grid and trials is None and minutes is not None:
        each = minutes / (math.ceil(sum(1 for _ in grid(wanted)) / jobs) + 1)
    made = Plan(
        data=base.source,
        fingerprint=fingerprint(source),
        table=table,
        wishes={name: value for name, value in wishes.items() if value is not None},
        base=plain(base),
        space=to_plain(wanted),
        grid=in_grid,
        minutes=each,
    )
    if (folder / PLAN).is_file():
        return folder, same(folder, made)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is no search; choose another --out")
    files.write(folder / PLAN, json.dumps(asdict(made), indent=1) + "\n")
    return folder, read_plan(folder)


def read_plan(folder: Path) -> Plan:
    try:
        table = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        made = Plan(**table)
        fine = made.format == FORMAT and bool(made.recipe) and bool(made.dimensions)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{folder / PLAN} is damaged: {error!s:.100}; search anew with another --out"
        ) from error
    if not fine:
        raise UserError(f"{folder / PLAN} has format {made.format}, this version reads {FORMAT}")
    return made


def same(folder: Path, made: Plan) -> Plan:
    """The plan that is there, unless something else was asked for than what it says."""
    there, now = read_plan(folder), asdict(made)
    for name in ("data", "fingerprint", "table", "wishes", "space", "grid"):
        if json.loads(json.dumps(now[name])) != getattr(there, name):
            words = {"fingerprint": "images", "table": "settings"}.get(name, name)
            raise UserError(
                f"{folder} holds a search with other {words}; "
                f"ask for the same to go on with it, or choose another --out"
            )
    return there


def count_grid(plan: Plan) -> int:
    return sum(1 for _ in grid(plan.dimensions))


def prepare(study: "Study", plan: Plan, folder: Path) -> None:
    """The first trials: all points of a grid, or the recipe that is chosen without a search."""
    with shared.Lock(folder / ".ask.lock"):
        if study.get_trials(deepcopy=False):
            return
        if plan.grid:
            for point in grid(plan.dimensions):
                study.enqueue_trial(point)
        elif start := starting_point(plan.dimensions, plan.recipe):
            study.enqueue_trial(start)


def share(folder: Path, most: int, stop: float | None, jobs: int, show: Callable[[], None]) -> None:
    """Several processes on one study, each with its part of the threads."""
    threads = max(1, torch.get_num_threads() // jobs)
    spawn = multiprocessing.get_context("spawn")
    left = None if stop is None else stop - time.monotonic()
    workers = [spawn.Process(target=join, args=(folder, most, left, threads)) for _ in range(jobs)]
    try:
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            for worker in workers:
                worker.join(timeout=1.0 / jobs)
            show()
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()  # it saves its run first
        for worker in workers:
            worker.join()


def join(folder: Path, most: int, left: float | None, threads: int) -> None:
    """What another process does; also how one on another machine takes part."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    work(folder, most, None if left is None else time.monotonic() + left)


def work(
    folder: Path, most: int, stop: float | None = None, *, show: Watch = lambda study: None
) -> None:
    """One trial after the other until there are `most`, or until no other fits before `stop`."""
    plan = read_plan(folder)
    study = shared.open_study(folder, grid=plan.grid)
    seed = plan.wishes.get("seed", 0)
    with shared.owner(folder) as me:
        while not study.user_attrs.get("stopped"):
            each = 60 * (plan.minutes or 0)
            if stop is not None and time.monotonic() + 0.9 * each > stop:
                return
            trial = shared.next_trial(study, folder, me, most, seed)
            if trial is None:
                return
            attempt(study, trial, plan, folder)
            show(study)


def attempt(study: "Study", trial: "Trial", plan: Plan, folder: Path) -> None:
    """One trial as a run; what came of it goes into the study."""
    from optuna import TrialPruned
    from optuna.trial import TrialState

    params = shared.suggest(trial, plan.dimensions)
    start = time.monotonic()
    try:
        done = train(trial, params, plan, folder)
    except TrialPruned as error:
        note(trial, start, reason=str(error))
        study.tell(trial, state=TrialState.PRUNED)
    except Diverged as error:
        note(trial, start, reason=f"diverged: {error}")
        study.tell(trial, state=TrialState.PRUNED)
    except UserError as error:
        note(trial, start, reason=str(error))
        study.tell(trial, state=TrialState.FAIL)
        if shared.winner(study) is None and trial.number == 0:
            study.set_user_attr("stopped", str(error))
    else:
        loss = done.metrics["val"]["loss"]
        note(trial, start, seconds=done.metrics["seconds"], val_loss=loss)
        study.tell(trial, done.metrics["val"]["accuracy"])


def note(trial: "Trial", start: float, **facts: Any) -> None:
    for name, value in {"seconds": time.monotonic() - start, **facts}.items():
        trial.set_user_attr(name, value)


def train(trial: "Trial", params: Mapping[str, Any], plan: Plan, folder: Path) -> run.Run:
    """A real run with its folder, which never looks at a test image."""
    place = folder / "trials" / f"{trial.number:03d}"
    told: dict[str, Any] = {"report": False, "test": False, "quiet": True}
    told["on_epoch"] = shared.reporting(trial)
    device = plan.wishes.get("device", "auto")
    if (place / RECIPE).is_file():  # a process died here
        done = run.resume(place, device=device, **told)
    else:
        table, model = changes(params, plan.recipe)
        wishes = {**plan.wishes, **({"model": model} if model else {})}
        done = run.train(
            plan.data,
            out=place,
            changes=merge(plan.table, table),
            minutes=plan.minutes,
            **wishes,
            **told,
        )
    done.metrics["val"]["loss"] = kept_loss(place)
    return done


def kept_loss(place: Path) -> float:
    """Validation loss of the weights that a run kept."""
    from vitrail.run.journal import read_journal
    from vitrail.zoo.file import read_tensors

    facts, _ = read_tensors(place / "model.safetensors")
    lines = [one for one in read_journal(place / "journal.jsonl") if one["kind"] == "epoch"]
    return float(
        next((one["val_loss"] for one in lines if one["step"] == facts["best"]["step"]), math.inf)
    )


def conclude(
    study: "Study", folder: Path, plan: Plan, most: int, deadline: float | None, quiet: bool
) -> Found:
    """The winner's recipe, its run on its own, its one test, and the page."""
    best = shared.winner(study)
    if best is None:
        reasons = [one.user_attrs.get("reason", "") for one in shared.finished(study)]
        why = study.user_attrs.get("stopped") or next(
            filter(None, reasons), "no trial was finished"
        )
        raise UserError(f"the search found nothing: {why}")
    recipe = build(Recipe, read_recipe(folder / "trials" / f"{best.number:03d}" / RECIPE))
    value, count = best.value or 0.0, len(shared.finished(study))
    told = f"trial {best.number} of {count}: {value:.1%} of the validation images right"
    files.write(folder / BEST, with_reasons([f"the best of a search, {told}"], write_toml(recipe)))
    final = tested(folder, best, plan, deadline, quiet)
    facts = {
        "trials": count,
        "best": {"value": value, "settings": dict(best.params), "trial": best.number},
        "recipe": str(folder / BEST),
        "test": final.metrics["test"],
        "val": final.metrics["val"],
        "run": str(final.folder),
        "tests": len(list(folder.glob(f"final-*/{METRICS}"))),  # earlier winners were tested too
        **{
            name: sum(one.state.name == state for one in shared.finished(study))
            for name, state in (("pruned", "PRUNED"), ("failed", "FAIL"))
        },
    }
    from vitrail.search.page import make

    page = make(folder, study, plan.dimensions, facts)
    facts["page"] = str(page)
    files.write(folder / RESULT, json.dumps(facts, indent=1) + "\n")
    return Found(folder=folder, facts=facts)


def tested(
    folder: Path, best: "FrozenTrial", plan: Plan, deadline: float | None, quiet: bool
) -> run.Run:
    """The winner trained anew, with all the time that is left, and judged on the test images."""
    place = folder / f"final-{best.number:03d}"
    device = plan.wishes.get("device", "auto")
    if (place / RECIPE).is_file():
        return run.resume(place, device=device, quiet=True)
    minutes = plan.minutes
    if minutes is not None and deadline is not None:
        minutes = max(minutes, (deadline - time.monotonic()) / 60)
    if not quiet:
        Live().say(f"trial {best.number} is the best: trained once more, then tested")
    return run.train(recipe=folder / BEST, out=place, minutes=minutes, device=device, quiet=True)
