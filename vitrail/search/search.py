"""A search from its plan to the winner, trained again and tested once: owns the search folder."""

import json
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from vitrail import files
from vitrail.data.open import open_data
from vitrail.data.source import fingerprint, indices
from vitrail.data.sources.places import keep_out
from vitrail.errors import Refused, UserError
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
    from multiprocessing.queues import SimpleQueue

    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

PLAN, BEST, RESULT = "search.json", "best.toml", "result.json"
FORMAT = 1
TRIALS = 20
ALIKE = 3  # trials that must have failed for the same reason before the rest is not tried
WAIT = 1.0  # seconds between looks at what other processes do
GRACE = 10.0  # seconds in which processes that were told to end do so by themselves

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
    table = run.asked_table(recipe, changes or {}, minutes, wishes.get("epochs"))
    table.pop("source", None)
    folder, asked = planned(data, out, space, grid, trials, minutes, jobs, table, wishes, quiet)
    with shared.owner(folder) as me:
        study, plan = begin(folder, asked, me)
        most = runs_of(plan, trials)
        deadline = None if minutes is None else began + 60 * minutes
        each = 60 * (plan.minutes or 0)
        stop = None if deadline is None else deadline - each  # the winner needs as much again
        show = watch(most)
        if jobs > 1:
            share(folder, most, stop, jobs, lambda: show(study))
        work(folder, me, most, stop, show=show)  # what is left, when others had their share
        with shared.Lock(folder / ".end.lock"):
            return conclude(study, folder, plan, deadline, quiet)


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
    """The plan that is asked for, and its folder, where it is written if there is none."""
    given = read_space(space) if space else None
    if minutes is not None or wishes.get("epochs") is not None:
        for name in run.LENGTHS:
            if f"train.{name}" in (given or {}):
                raise UserError(f"the space has train.{name}; leave out --minutes and --epochs")
    source = open_data(data, columns=columns_of(table))
    if not len(indices(source, "val")):
        raise UserError(f"{source.name} has no validation images, by which settings are chosen")
    folder = out or Path("runs") / f"search-{source.name}"
    files.check_text(folder)
    keep_out(source, folder, "--out")
    each = share_of(minutes, trials or TRIALS, jobs)
    asked = build(run.Wishes, {**wishes, **({} if each is None else {"minutes": each})})
    place = pick_device(asked.device)
    base, reasons = run.design(source, data, table, asked, place)
    Live(quiet=quiet).say("\n  ".join(reasons))
    wanted = given or default_space(base)
    made = Plan(
        data=base.source,
        fingerprint=fingerprint(source),
        table=table,
        wishes={name: value for name, value in wishes.items() if value is not None},
        base=plain(base),
        space=to_plain(wanted),
        grid=in_grid,
        minutes=None,
    )
    made = replace(made, minutes=share_of(minutes, runs_of(made, trials), jobs))
    if not (folder / PLAN).is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} exists and is no search; choose another --out")
        write_plan(folder, made)
    return folder, made


def share_of(minutes: float | None, trials: int, jobs: int) -> float | None:
    """The minutes of each trial, with as many for the winner."""
    return None if minutes is None else minutes / (math.ceil(trials / jobs) + 1)


def runs_of(plan: Plan, trials: int | None) -> int:
    """How many trials there will be; in a grid at most its points."""
    if not plan.grid:
        return trials or TRIALS
    points = sum(1 for _ in grid(plan.dimensions))
    return min(trials or points, points)


def write_plan(folder: Path, plan: Plan) -> None:
    files.write(folder / PLAN, json.dumps(asdict(plan), indent=1) + "\n")


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


def begin(folder: Path, asked: Plan, me: str) -> tuple["Study", Plan]:
    """The study with its plan. Where nothing was trained yet, what is asked for now is the plan."""
    with shared.asking(folder):
        study = shared.open_study(folder, grid=asked.grid)
        check_runs(study, folder)
        if shared.alone(folder, me) and not any(has_worth(one, folder) for one in study.trials):
            shutil.rmtree(folder / "trials", ignore_errors=True)
            (folder / shared.JOURNAL).unlink()
            write_plan(folder, asked)
            study = shared.open_study(folder, grid=asked.grid)
        plan = same(folder, asked)
        if not study.get_trials(deepcopy=False):
            prepare(study, plan)
    return study, plan


def check_runs(study: "Study", folder: Path) -> None:
    """Refuses a study that lost lines: every run that is there must be of a trial it knows."""
    runs = [*folder.glob(f"trials/*/{RECIPE}"), *folder.glob(f"final-*/{RECIPE}")]
    known = set()
    for one in study.get_trials(deepcopy=False):  # read last: others may begin a run just now
        if one.state.is_finished() or shared.BEGUN in one.user_attrs:
            known.add(place_of(one, folder))
        if one.state.name == "COMPLETE":
            known.add(final_of(one, folder))
    if lost := sorted({path.parent for path in runs} - known):
        why = f"it knows nothing of {lost[0].relative_to(folder)}"
        raise shared.damaged(folder / shared.JOURNAL, why)


def has_worth(trial: "FrozenTrial", folder: Path) -> bool:
    """Whether something was learned by it; of one that is left, whether its training began."""
    if trial.state.name == "RUNNING":
        return (place_of(trial, folder) / RECIPE).is_file()
    return trial.state.name in ("COMPLETE", "PRUNED")


def prepare(study: "Study", plan: Plan) -> None:
    """The first trials: all points of a grid, or the recipe that is chosen without a search."""
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
    told = spawn.SimpleQueue()
    arguments = (folder, most, left, threads, told)
    workers = [spawn.Process(target=join, args=arguments) for _ in range(jobs)]
    try:
        with unheard(signal.SIGINT):
            for worker in workers:
                worker.start()
        while told.empty() and any(worker.is_alive() for worker in workers):
            for worker in workers:
                worker.join(timeout=1.0 / jobs)
            show()
    except SystemExit:  # SIGTERM; if all heard it, a second one would keep them from saving
        ending = time.monotonic() + GRACE
        while time.monotonic() < ending and any(worker.is_alive() for worker in workers):
            time.sleep(0.1)
        raise
    finally:
        started = [worker for worker in workers if worker.is_alive()]
        for worker in started:
            worker.terminate()  # it saves its run first
        for worker in started:
            worker.join()
    if not told.empty():
        raise UserError(told.get())


@contextmanager
def unheard(number: signal.Signals) -> Iterator[None]:
    """Processes that are started in here never hear the signal; this one does so afterwards.

    Ctrl-C goes to all processes of a terminal, but the first one tells the others to end.
    """
    resource_tracker.ensure_running()  # its own start would open the ears again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def join(
    folder: Path, most: int, left: float | None, threads: int, told: "SimpleQueue[str]"
) -> None:
    """What another process does; `told` gets what keeps it from going on."""
    signal.signal(signal.SIGTERM, leave)
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=follow, args=(parent,), daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    try:
        with shared.owner(folder) as me:
            work(folder, me, most, None if left is None else time.monotonic() + left)
    except UserError as error:
        told.put(str(error))
    except OSError as error:
        if error.errno not in files.ADVICE:
            raise
        told.put(f"cannot go on: {files.refusal(error)}")


def follow(parent: BaseProcess) -> None:
    """Ends this process, which saves its run first, when the one that started it is gone."""
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def work(
    folder: Path,
    me: str,
    most: int,
    stop: float | None = None,
    *,
    show: Watch = lambda study: None,
) -> None:
    """One trial after the other until there are `most`, or until no other fits before `stop`.

    Then waits for those of other processes, and takes over what one that dies leaves.
    """
    plan = read_plan(folder)
    study = shared.open_study(folder, grid=plan.grid)
    seed, each = plan.wishes.get("seed", 0), 60 * (plan.minutes or 0)
    while True:
        late = stop is not None and time.monotonic() + 0.9 * each > stop
        trial = None if late else shared.next_trial(study, folder, me, most, seed)
        if trial is not None:
            attempt(study, trial, plan, folder)
            show(study)
            check_hope(study, plan)
        elif shared.busy(study, folder, me):
            time.sleep(WAIT)
            show(study)
        else:
            return


def check_hope(study: "Study", plan: Plan) -> None:
    """Ends this process if the first trials failed alike; of a grid every point is tried."""
    done = shared.finished(study)
    reasons = {one.user_attrs.get("reason", "") for one in done}
    failed = all(one.state.name == "FAIL" for one in done)
    if failed and len(done) >= ALIKE and len(reasons) == 1 and not plan.grid:
        raise nothing(plan, f"the first {len(done)} trials failed alike: {reasons.pop()}")


def nothing(plan: Plan, why: str) -> UserError:
    each = "" if plan.minutes is None else f" (each trial had {plan.minutes:.2g} of the minutes)"
    return UserError(f"the search found nothing: {why}{each}")


def attempt(study: "Study", trial: "Trial", plan: Plan, folder: Path) -> None:
    """One trial as a run; what came of it goes into the study.

    What the system refused says nothing of the settings: the trial is left, to be gone on with.
    """
    from optuna import TrialPruned
    from optuna.trial import TrialState

    params = shared.suggest(trial, plan.dimensions)
    trial.set_user_attr(shared.BEGUN, True)
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
        if refused(error):
            raise
        note(trial, start, reason=str(error))
        study.tell(trial, state=TrialState.FAIL)
    else:
        loss = done.metrics["val"]["loss"]
        note(trial, start, seconds=done.metrics["seconds"], val_loss=loss)
        study.tell(trial, done.metrics["val"]["accuracy"])


def refused(error: BaseException | None) -> bool:
    """Whether a disk, or another part of the system, is at the bottom of it."""
    if error is None:
        return False
    by_system = isinstance(error, Refused | OSError)
    by_disk = isinstance(error, SafetensorError) and "os error" in str(error)
    return by_system or by_disk or refused(error.__cause__)


def note(trial: "Trial", start: float, **facts: Any) -> None:
    for name, value in {"seconds": time.monotonic() - start, **facts}.items():
        trial.set_user_attr(name, value)


def train(trial: "Trial", params: Mapping[str, Any], plan: Plan, folder: Path) -> run.Run:
    """A real run with its folder, which never looks at a test image."""
    place = place_of(trial, folder)
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


def place_of(trial: "Trial | FrozenTrial", folder: Path) -> Path:
    return folder / "trials" / f"{trial.number:03d}"


def final_of(trial: "FrozenTrial", folder: Path) -> Path:
    return folder / f"final-{trial.number:03d}"


def kept_loss(place: Path) -> float:
    """Validation loss of the weights that a run kept."""
    from vitrail.run.journal import read_journal
    from vitrail.zoo.file import read_tensors

    facts, _ = read_tensors(place / "model.safetensors")
    lines = [one for one in read_journal(place / "log.jsonl") if one["kind"] == "epoch"]
    return float(
        next((one["val_loss"] for one in lines if one["step"] == facts["best"]["step"]), math.inf)
    )


def conclude(
    study: "Study", folder: Path, plan: Plan, deadline: float | None, quiet: bool
) -> Found:
    """The winner's recipe, its run on its own, its one test, and the page."""
    best = shared.winner(study)
    if best is None:
        reasons = [one.user_attrs.get("reason", "") for one in shared.finished(study)]
        late = "no trial was finished" + ("; give more --minutes" if deadline else "")
        raise nothing(plan, next(filter(None, reasons), late))
    recipe = build(Recipe, read_recipe(place_of(best, folder) / RECIPE))
    value, count = best.value or 0.0, len(shared.finished(study))
    told = f"trial {best.number} of {count}: {value:.1%} of the validation images right"
    files.write(folder / BEST, with_reasons([f"the best of a search, {told}"], write_toml(recipe)))
    final = tested(folder, best, recipe, plan, deadline, quiet)
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
    folder: Path,
    best: "FrozenTrial",
    recipe: Recipe,
    plan: Plan,
    deadline: float | None,
    quiet: bool,
) -> run.Run:
    """The winner trained anew, with all the time that is left, and judged on the test images."""
    place = final_of(best, folder)
    device = plan.wishes.get("device", "auto")
    if (place / RECIPE).is_file():
        if not alike(build(Recipe, read_recipe(place / RECIPE)), recipe):
            raise UserError(
                f"{place} has other settings than the winner, {folder / BEST}; "
                f"move it away, or search anew with another --out"
            )
        return run.resume(place, device=device, quiet=True)
    minutes = plan.minutes
    if minutes is not None and deadline is not None:
        minutes = max(minutes, (deadline - time.monotonic()) / 60)
    if not quiet:
        Live().say(f"trial {best.number} is the best: trained once more, then tested")
    return run.train(recipe=folder / BEST, out=place, minutes=minutes, device=device, quiet=True)


def alike(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes differ in nothing but how long they train, and what is left out."""
    train = replace(one.train, steps=other.train.steps, epochs=other.train.epochs)
    data = replace(one.data, skip_broken=other.data.skip_broken)
    return replace(one, train=train, data=data) == other
