"""The Optuna study that all processes of a search share, in one journal file."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.decoding import parse_json
from vitrail.errors import UserError
from vitrail.tuning.locks import JournalLock, is_alive, lock_study
from vitrail.tuning.space import Choice, Params, Space

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

JOURNAL, STUDY_NAME = "study.journal", "vitrail"
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


def open_study(folder: Path, *, grid: bool = False) -> "Study":
    """The study in a search folder, created if it does not exist; a damaged one is an error."""
    require_optuna()
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = folder / JOURNAL
    with JournalLock(path):
        check_journal(path)
    lock: Any = JournalLock(path)
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if not grid:
        pruner = optuna.pruners.MedianPruner(
            n_startup_trials=PRUNER_STARTUP, n_warmup_steps=PRUNER_WARMUP
        )
    try:
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
        return optuna.create_study(
            storage=storage,
            study_name=STUDY_NAME,
            direction="maximize",
            load_if_exists=True,
            pruner=pruner,
        )
    except (KeyError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise damaged_study_error(path, repr(error)) from error


def check_journal(path: Path) -> None:
    """Raises a UserError for a line that is not a JSON object."""
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            valid = isinstance(parse_json(line), dict)
        except UserError:
            valid = False
        if not valid:
            raise damaged_study_error(path, f"line {number}")


def damaged_study_error(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} is damaged ({why:.100}), but the runs in {path.parent / 'trials'} are not; "
        f"restore it from a copy, or start a new search with another `out`"
    )


def others_are_running(study: "Study", folder: Path, worker: str) -> bool:
    """Whether another process still runs a trial."""
    with lock_study(folder):
        workers = {trial.user_attrs.get(WORKER, "") for trial in running_trials(study)}
        return any(is_alive(folder, other) for other in workers - {worker})


def running_trials(study: "Study") -> "list[FrozenTrial]":
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


def ask_trial(study: "Study", folder: Path, worker: str, limit: int, seed: int) -> "Trial | None":
    """A trial that a dead process left unfinished, else a new one; None beyond `limit` trials."""
    import optuna
    from optuna.trial import TrialState

    with lock_study(folder):
        for trial in running_trials(study):
            if not is_alive(folder, trial.user_attrs.get(WORKER, "")):
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
