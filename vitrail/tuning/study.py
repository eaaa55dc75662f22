"""The Optuna study that all processes of a search share."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.errors import UserError
from vitrail.tuning.locks import is_alive, lock_study
from vitrail.tuning.space import Choice, Params, Space
from vitrail.tuning.storage import JOURNAL, Database, damaged_study_error, open_storage

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

PRUNER_STARTUP = 5  # completed trials before the pruner prunes any
PRUNER_WARMUP = 3  # tenths of a trial during which it is not pruned
REPORTS = 10  # a trial reports its accuracy at every tenth of its steps
MAX_RANDOM_TRIALS = 10  # TPE's default number of random trials before it models the objective
WORKER = "worker"  # attribute of a trial: the process that runs it
STARTED = "started"  # attribute of a trial, set before its run folder is created


def require_optuna() -> None:
    """Raises a UserError if Optuna is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise UserError(
            "a search needs optuna, which is not installed; pip install 'vitrail[search]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def open_study(folder: Path, *, grid: bool = False, url: str | None = None) -> "Study":
    """The study of a search, created if it does not exist; a damaged one is an error."""
    require_optuna()
    import optuna

    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if not grid:
        pruner = optuna.pruners.MedianPruner(
            n_startup_trials=PRUNER_STARTUP, n_warmup_steps=PRUNER_WARMUP
        )
    storage, name = open_storage(folder, url)
    try:
        return optuna.create_study(
            storage=storage,
            study_name=name,
            direction="maximize",
            load_if_exists=True,
            pruner=pruner,
        )
    except (KeyError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise damaged_study_error(Path(url or folder / JOURNAL), repr(error)) from error


def others_are_running(study: "Study", place: Path | Database, worker: str) -> bool:
    """Whether another process still runs a trial."""
    with lock_study(place):
        workers = {trial.user_attrs.get(WORKER, "") for trial in running_trials(study)}
        return any(is_alive(place, other) for other in workers - {worker})


def running_trials(study: "Study") -> "list[FrozenTrial]":
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


def ask_trial(
    study: "Study", place: Path | Database, worker: str, limit: int, seed: int
) -> "Trial | None":
    """A trial that a dead process left unfinished, else a new one; None beyond `limit` trials."""
    import optuna
    from optuna.trial import TrialState

    with lock_study(place):
        for trial in running_trials(study):
            if not is_alive(place, trial.user_attrs.get(WORKER, "")):
                study._storage.set_trial_user_attr(trial._trial_id, WORKER, worker)
                return optuna.Trial(study, trial._trial_id)
        trials = study.get_trials(deepcopy=False)
        if sum(trial.state != TrialState.WAITING for trial in trials) >= limit:
            return None
        # the seed depends on the number of trials: processes and restarts sample different points
        study.sampler = optuna.samplers.TPESampler(
            seed=(1000 * seed + len(trials)) % 2**32,
            n_startup_trials=min(MAX_RANDOM_TRIALS, max(PRUNER_STARTUP, limit // 3)),
        )
        new = study.ask()
        new.set_user_attr(WORKER, worker)
        return new


def suggest_params(trial: "Trial", space: Space) -> Params:
    """The sampler's value for every dimension of the space."""
    params: Params = {}
    for name, dimension in space.items():
        if isinstance(dimension, Choice):
            params[name] = trial.suggest_categorical(name, dimension.values)
            continue
        low, high, log = dimension.low, dimension.high, dimension.log
        if dimension.is_integer:
            params[name] = trial.suggest_int(name, int(low), int(high), log=log)
        else:
            params[name] = trial.suggest_float(name, low, high, log=log)
    return params


def report_to_study(trial: "Trial") -> Callable[[dict[str, Any]], None]:
    """A callback for `on_epoch` that reports the best validation accuracy so far to the study.

    It reports at every tenth of the steps, and raises TrialPruned if the trial should be pruned.
    """
    import optuna

    reported = trial.storage.get_trial(trial._trial_id).intermediate_values
    best, last = max(reported.values(), default=0.0), max(reported, default=0)

    def on_epoch(line: dict[str, Any]) -> None:
        nonlocal best, last
        best = max(best, line["val_accuracy"])
        # the last tenth is not reported: the trial is complete then
        tenth = min(REPORTS * line["step"] // max(1, line["steps"]), REPORTS - 1)
        if tenth <= last:
            return
        for number in range(last + 1, tenth + 1):
            trial.report(best, number)
        last = tenth
        if trial.should_prune():
            percent = 100 * last // REPORTS
            raise optuna.TrialPruned(f"below the median of other trials after {percent} % of steps")

    return on_epoch


def finished_trials(study: "Study") -> "list[FrozenTrial]":
    """Trials that are complete, pruned or failed."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]


def best_trial(study: "Study") -> "FrozenTrial | None":
    """The complete trial with the highest validation accuracy; of equal ones the lowest loss."""
    from optuna.trial import TrialState

    complete = [trial for trial in finished_trials(study) if trial.state == TrialState.COMPLETE]
    return max(
        complete,
        key=lambda trial: (trial.value, -trial.user_attrs.get("val_loss", 0.0), -trial.number),
        default=None,
    )
