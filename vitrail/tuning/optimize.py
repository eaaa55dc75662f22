"""Runs a search: from its plan to the best settings, trained again and tested once."""

import json
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail import files
from vitrail.arguments import check_arguments
from vitrail.decoding import parse_json
from vitrail.display.text import format_percent
from vitrail.errors import UserError
from vitrail.run.recipe import Recipe, read_recipe, recipe_to_toml, settings_from_dict
from vitrail.run.request import AUTO, Request, name_data, read_settings
from vitrail.run.result import Run
from vitrail.run.resume import resume
from vitrail.run.storage.record import METRICS, RECIPE, prepend_reasons
from vitrail.run.terminal import Terminal
from vitrail.run.train import train
from vitrail.tuning import page
from vitrail.tuning.locks import is_only_worker, lock_study, register_worker
from vitrail.tuning.plan import (
    Plan,
    check_same_plan,
    count_trials,
    decode_plan,
    make_plan,
    write_plan,
)
from vitrail.tuning.result import BestTrial, SearchResult, accuracy_from_dict
from vitrail.tuning.space import initial_params, iterate_grid
from vitrail.tuning.storage import (
    JOURNAL,
    damaged_study_error,
    find_locks,
    name_driver,
    report_storage_errors,
)
from vitrail.tuning.study import (
    STARTED,
    best_trial,
    finished_trials,
    open_study,
    require_optuna,
)
from vitrail.tuning.trials import (
    OnTrial,
    final_folder,
    no_result_error,
    run_trials,
    trial_folder,
)
from vitrail.tuning.workers import run_workers

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

BEST, RESULT = "best.toml", "result.json"
FINAL, SHARED_PLAN = "final", "plan"  # attributes of a shared study; the first is also a lock


@check_arguments
def search(
    data: str | Path,
    *,
    space: str | Path | Mapping[str, Any] | None = None,
    grid: bool = False,
    trials: int | None = None,
    minutes: float | None = None,
    jobs: int = 1,
    model: str | None = None,
    weights: str | Path = AUTO,
    epochs: int | None = None,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    storage: str | None = None,
    device: str = "auto",
    quiet: bool = False,
    started: float | None = None,
    on_trial: OnTrial | None = None,
) -> SearchResult:
    """Searches for the settings with the highest validation accuracy; resumes an existing search.

    Every trial is a training run that starts from the recipe `train` would choose. The best
    settings are trained once more and evaluated once on the test split.

    >>> space = {"train.lr": {"low": 1e-3, "high": 1e-1, "log": True}, "size": ["Pico", "Nano"]}
    >>> result = vitrail.search("digits", space=space, minutes=30)  # doctest: +SKIP
    >>> result.best.settings, result.test.accuracy  # doctest: +SKIP

    Args:
        data: folder of class folders, table, tar shards, or the name of a built-in data set
        space: TOML file, or mapping of settings such as "train.lr" to {"low": 1e-4, "high": 1e-2,
            "log": True} or a list of choices; `size`, `augment` and `strength` are settings too.
            By default learning rate, weight decay, drop path, augmentation, size and patch
        grid: try every combination instead of sampling with TPE
        trials: number of trials, by default 20, or all points of a grid
        minutes: time for everything, divided equally among the trials and the final run
        jobs: processes that run trials at the same time and share the CPU threads
        model: architecture such as "Nano/4" or "S/16"
        weights: run, weight file, or name of published weights to fine-tune; "auto" and "none" as
            for `train`
        epochs: length of a trial, instead of minutes
        recipe: TOML file with settings
        settings: settings by section, such as {"train": {"batch": 64}}; they override the recipe
        seed: random seed of the sampler and of every run
        out: folder of the search, by default runs/search-DATA; an existing search is resumed
        storage: URL of a database, or a journal file on a shared disk, through which machines share
            the search that has the name of `out`; each keeps its own runs
        device: "cpu", "cuda", "cuda:1", "mps", or "auto"
        quiet: print nothing
        started: reading of time.monotonic() from which the minutes count, by default now
        on_trial: called with the Optuna study and the number of trials, first before any trial
            and then after each one
    """
    require_optuna()
    started = time.monotonic() if started is None else started
    check_search_limits(trials, minutes, jobs)
    table = read_settings(recipe, settings or {}, minutes, epochs)
    data = name_data(data, {})
    table.pop("source", None)
    request = Request(
        data=data,
        model=model,
        weights=str(weights),
        minutes=minutes,
        epochs=epochs,
        seed=seed,
        device=device,
        settings=table,
    )
    path = None if out is None else Path(out)
    folder, requested = make_plan(
        request, out=path, space=space, grid=grid, trials=trials, jobs=jobs, quiet=quiet
    )
    deadline = None if minutes is None else started + 60 * minutes
    storage = None if storage is None else name_driver(storage)
    with report_storage_errors(storage):
        place = find_locks(folder, storage)
        with register_worker(place) as worker:
            study, plan = open_search(folder, requested, worker, storage)
            limit = count_trials(plan, trials)
            show = on_trial or (lambda study, trials: None)
            optimize_study(study, folder, plan, worker, limit, deadline, jobs, show, storage)
            with lock_study(place, FINAL):  # of several commands, one trains the final run
                return finish_search(study, folder, plan, deadline, quiet)


def optimize_study(
    study: "Study",
    folder: Path,
    plan: Plan,
    worker: str,
    limit: int,
    deadline: float | None,
    jobs: int,
    on_trial: OnTrial,
    url: str | None = None,
) -> None:
    """Runs trials up to `limit`, or until only the time of the final run is left."""
    # the final run needs as much time as a trial
    last_end = None if deadline is None else deadline - 60 * (plan.minutes or 0)
    on_trial(study, limit)
    if jobs > 1:
        run_workers(folder, limit, last_end, jobs, lambda: on_trial(study, limit), url)
    # after workers, this only runs trials that they left unfinished
    run_trials(folder, worker, limit, last_end, url=url, on_trial=on_trial)


def check_search_limits(trials: int | None, minutes: float | None, jobs: int) -> None:
    for name, number in (("trials", trials), ("jobs", jobs)):
        if number is not None and number < 1:
            raise UserError(f"{name} is {number}; give a positive integer")
    if minutes is not None and not 0 < minutes < math.inf:
        raise UserError(f"minutes is {minutes:g}; give a positive number")


def open_search(
    folder: Path, requested: Plan, worker: str, url: str | None = None
) -> tuple["Study", Plan]:
    """The study and its plan.

    The requested plan replaces the stored one while no trial has a result and no other process
    works on the search. A shared study has the plan with it.
    """
    with lock_study(find_locks(folder, url)):
        study = open_study(folder, grid=requested.grid, url=url)
        if url is not None:
            share_plan(study, folder, requested)
        check_all_runs_known(study, folder)
        unused = not any(has_result(trial, folder) for trial in study.trials)
        if url is None and unused and is_only_worker(folder, worker):
            shutil.rmtree(folder / "trials", ignore_errors=True)
            (folder / JOURNAL).unlink()
            write_plan(folder, requested)
            study = open_study(folder, grid=requested.grid)
        plan = check_same_plan(folder, requested)
        if not study.get_trials(deepcopy=False):
            enqueue_first_trials(study, plan)
    return study, plan


def share_plan(study: "Study", folder: Path, requested: Plan) -> None:
    """Stores the plan in the study, or takes over the one that is there, with this disk's paths."""
    if SHARED_PLAN not in study.user_attrs:
        study.set_user_attr(SHARED_PLAN, json.dumps(asdict(requested)))
    shared = decode_plan(parse_json(study.user_attrs[SHARED_PLAN]), study.study_name)
    source = {"source": requested.base["source"]}
    write_plan(folder, replace(shared, data=requested.data, base={**shared.base, **source}))


def check_all_runs_known(study: "Study", folder: Path) -> None:
    """Raises if the journal has lost lines: every run must belong to a trial."""
    runs = [*folder.glob(f"trials/*/{RECIPE}"), *folder.glob(f"final-*/{RECIPE}")]
    known = set()
    # trials are read after the runs are listed, because other processes may start one now
    for trial in study.get_trials(deepcopy=False):
        if trial.state.is_finished() or STARTED in trial.user_attrs:
            known.add(trial_folder(trial, folder))
        if trial.state.name == "COMPLETE":
            known.add(final_folder(trial, folder))
    if unknown := sorted({path.parent for path in runs} - known):
        why = f"it has no trial for {unknown[0].relative_to(folder)}"
        raise damaged_study_error(folder / JOURNAL, why)


def has_result(trial: "FrozenTrial", folder: Path) -> bool:
    """Whether a trial is complete or pruned, or its training has started."""
    if trial.state.name == "RUNNING":
        return (trial_folder(trial, folder) / RECIPE).is_file()
    return trial.state.name in ("COMPLETE", "PRUNED")


def enqueue_first_trials(study: "Study", plan: Plan) -> None:
    """Enqueues all points of a grid, or the recipe that `train` would choose."""
    if plan.grid:
        for point in iterate_grid(plan.dimensions):
            study.enqueue_trial(point)
    elif params := initial_params(plan.dimensions, plan.recipe):
        study.enqueue_trial(params)


def finish_search(
    study: "Study", folder: Path, plan: Plan, deadline: float | None, quiet: bool
) -> SearchResult:
    """Writes the best recipe, trains and tests it, and writes the report."""
    best = best_trial(study)
    finished = finished_trials(study)
    if best is None:
        reasons = [trial.user_attrs.get("reason", "") for trial in finished]
        unfinished = "no trial finished" + ("; raise `minutes`" if deadline else "")
        raise no_result_error(plan, next(filter(None, reasons), unfinished))
    recipe = read_best_recipe(best, folder, plan)
    value = best.value or 0.0
    comment = (
        f"trial {best.number}, the best of {len(finished)}: "
        f"validation accuracy {format_percent(value)}"
    )
    files.write_file(folder / BEST, prepend_reasons([comment], recipe_to_toml(recipe)))
    final = find_shared_final(study, best)
    if final is None:
        final = train_final(folder, best, recipe, plan, deadline, quiet)
        share_final(study, best, final)
    result = SearchResult(
        trials=len(finished),
        pruned=sum(trial.state.name == "PRUNED" for trial in finished),
        failed=sum(trial.state.name == "FAIL" for trial in finished),
        best=BestTrial(value=value, settings=dict(best.params), trial=best.number),
        recipe=folder / BEST,
        val=accuracy_from_dict(final.metrics["val"]),
        test=accuracy_from_dict(final.metrics["test"]),
        tests=max(1, len(list(folder.glob(f"final-*/{METRICS}")))),
        run=final.folder,
        folder=folder,
        report=folder / page.PAGE,
    )
    page.write_search_page(folder, study, plan.dimensions, result)
    files.write_file(folder / RESULT, json.dumps(result.to_dict(), indent=1) + "\n")
    return result


def read_best_recipe(best: "FrozenTrial", folder: Path, plan: Plan) -> Recipe:
    """The recipe of the best trial, which another machine may have run."""
    path = trial_folder(best, folder) / RECIPE
    if path.is_file():
        return settings_from_dict(Recipe, read_recipe(path))
    files.write_file(folder / BEST, best.user_attrs["recipe"])
    recipe = settings_from_dict(Recipe, read_recipe(folder / BEST))
    return replace(recipe, source=plan.recipe.source)


def find_shared_final(study: "Study", best: "FrozenTrial") -> Run | None:
    """The final run, if another machine has trained it already."""
    final = study.user_attrs.get(FINAL, {})
    if final.get("trial") != best.number:
        return None
    return Run(folder=Path(final["folder"]), metrics=final["metrics"])


def share_final(study: "Study", best: "FrozenTrial", final: Run) -> None:
    """Tells the machines of a shared search that the final run is trained."""
    if SHARED_PLAN in study.user_attrs:
        shared = {"trial": best.number, "folder": str(final.folder), "metrics": final.metrics}
        study.set_user_attr(FINAL, shared)


def train_final(
    folder: Path,
    best: "FrozenTrial",
    recipe: Recipe,
    plan: Plan,
    deadline: float | None,
    quiet: bool,
) -> Run:
    """Trains with the best settings again, in all the remaining time, and tests the result."""
    out = final_folder(best, folder)
    device = plan.request.get("device", "auto")
    if (out / RECIPE).is_file():
        if not have_same_settings(settings_from_dict(Recipe, read_recipe(out / RECIPE)), recipe):
            raise UserError(
                f"{out} has different settings from the best trial in {folder / BEST}; "
                f"move it away, or start a new search with another `out`"
            )
        return resume(out, device=device, quiet=True)
    minutes = plan.minutes
    if minutes is not None and deadline is not None:
        minutes = max(minutes, (deadline - time.monotonic()) / 60)
    Terminal(quiet=quiet).print(f"training again with the settings of trial {best.number}")
    return train(recipe=folder / BEST, out=out, minutes=minutes, device=device, quiet=True)


def have_same_settings(first: Recipe, second: Recipe) -> bool:
    """Whether two recipes are equal except for training length and `skip_broken`."""
    train = replace(first.train, steps=second.train.steps, epochs=second.train.epochs)
    data = replace(first.data, skip_broken=second.data.skip_broken)
    return replace(first, train=train, data=data) == second
