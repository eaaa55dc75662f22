"""One trial of a search: a training run, whose validation accuracy is the objective."""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.errors import OutOfResources, UserError
from vitrail.run.recipe import merge_settings
from vitrail.run.result import Run
from vitrail.run.resume import resume
from vitrail.run.storage.record import MODEL, RECIPE
from vitrail.run.train import train
from vitrail.training.loop import Diverged
from vitrail.tuning.plan import Plan, read_plan
from vitrail.tuning.space import params_to_settings
from vitrail.tuning.storage import find_locks
from vitrail.tuning.study import (
    STARTED,
    ask_trial,
    finished_trials,
    open_study,
    others_are_running,
    report_to_study,
    suggest_params,
)
from vitrail.zoo.file import read_metadata
from vitrail.zoo.files.open import open_weight_file

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

OnTrial = Callable[["Study", int], None]  # the study, and the total number of trials

MAX_EQUAL_FAILURES = 3  # the search stops if its first trials all fail with the same error
POLL_SECONDS = 1.0  # between two checks of the trials of other processes
MIN_TIME_FRACTION = 0.9  # of a trial's minutes that must remain for it to start


def run_trials(
    folder: Path,
    worker: str,
    limit: int,
    deadline: float | None = None,
    *,
    url: str | None = None,
    on_trial: OnTrial = lambda study, trials: None,
) -> None:
    """Runs trials until there are `limit`, or until another would not finish before `deadline`.

    Then it waits for the trials of other processes, and takes over those of a process that dies.
    """
    plan = read_plan(folder)
    study, place = open_study(folder, grid=plan.grid, url=url), find_locks(folder, url)
    seed, seconds = plan.request.get("seed", 0), 60 * (plan.minutes or 0)
    while True:
        needed = MIN_TIME_FRACTION * seconds
        too_late = deadline is not None and time.monotonic() + needed > deadline
        trial = None if too_late else ask_trial(study, place, worker, limit, seed)
        if trial is not None:
            run_trial(study, trial, plan, folder)
            on_trial(study, limit)
            check_failures(study, plan)
        elif others_are_running(study, place, worker):
            time.sleep(POLL_SECONDS)
            on_trial(study, limit)
        else:
            return


def check_failures(study: "Study", plan: Plan) -> None:
    """Stops a search whose first trials failed with the same error; a grid tries every point."""
    finished = finished_trials(study)
    reasons = {trial.user_attrs.get("reason", "") for trial in finished}
    failed = all(trial.state.name == "FAIL" for trial in finished)
    if failed and len(finished) >= MAX_EQUAL_FAILURES and len(reasons) == 1 and not plan.grid:
        raise no_result_error(
            plan, f"the first {len(finished)} trials failed with the same error: {reasons.pop()}"
        )


def no_result_error(plan: Plan, why: str) -> UserError:
    minutes = plan.minutes
    limit = "" if minutes is None else f" (each trial had {minutes:.2g} minutes)"
    return UserError(f"the search has no result: {why}{limit}")


def run_trial(study: "Study", trial: "Trial", plan: Plan, folder: Path) -> None:
    """Trains one trial and reports its state and value to the study.

    A system error, such as a full disk, says nothing about the settings: it propagates, and the
    trial stays in the state "running", to be resumed later.
    """
    from optuna import TrialPruned
    from optuna.trial import TrialState

    params = suggest_params(trial, plan.dimensions)
    trial.set_user_attr(STARTED, True)
    start = time.monotonic()
    try:
        run = train_trial(trial, params, plan, folder)
    except TrialPruned as error:
        set_attributes(trial, start, reason=str(error))
        study.tell(trial, state=TrialState.PRUNED)
    except Diverged as error:
        set_attributes(trial, start, reason=f"diverged: {error}")
        study.tell(trial, state=TrialState.PRUNED)
    except UserError as error:
        if is_system_error(error):
            raise
        set_attributes(trial, start, reason=str(error))
        study.tell(trial, state=TrialState.FAIL)
    else:
        loss = best_val_loss(run.folder)
        recipe = (run.folder / RECIPE).read_text(encoding="utf-8")  # for those without this disk
        set_attributes(trial, start, seconds=run.metrics["seconds"], val_loss=loss, recipe=recipe)
        study.tell(trial, run.metrics["val"]["accuracy"])


def is_system_error(error: BaseException | None) -> bool:
    """Whether the operating system is the cause, such as a full disk."""
    if error is None:
        return False
    return isinstance(error, OutOfResources | OSError) or is_system_error(error.__cause__)


def set_attributes(trial: "Trial", start: float, **attributes: Any) -> None:
    for name, value in {"seconds": time.monotonic() - start, **attributes}.items():
        trial.set_user_attr(name, value)


def train_trial(trial: "Trial", params: Mapping[str, Any], plan: Plan, folder: Path) -> Run:
    """A training run in the trial's folder, without an evaluation on the test split.

    Resumes the run if a process died during it.
    """
    out = trial_folder(trial, folder)
    on_epoch = report_to_study(trial)
    device = plan.request.get("device", "auto")
    if (out / RECIPE).is_file():
        return resume(out, device=device, report=False, test=False, quiet=True, on_epoch=on_epoch)
    settings, model = params_to_settings(params, plan.recipe)
    request = {**plan.request, **({"model": model} if model else {})}
    return train(
        plan.data,
        out=out,
        settings=merge_settings(plan.settings, settings),
        minutes=plan.minutes,
        report=False,
        test=False,
        quiet=True,
        on_epoch=on_epoch,
        **request,
    )


def trial_folder(trial: "Trial | FrozenTrial", folder: Path) -> Path:
    return folder / "trials" / f"{trial.number:03d}"


def final_folder(trial: "FrozenTrial", folder: Path) -> Path:
    """The folder of the run that is trained again with the trial's settings."""
    return folder / f"final-{trial.number:03d}"


def best_val_loss(folder: Path) -> float:
    """Validation loss of the weights that a run kept."""
    metadata = read_metadata(open_weight_file(folder / MODEL), str(folder / MODEL))
    return metadata.best.val_loss if metadata and metadata.best else math.inf
