"""The study that all processes of a search share: one journal file, safe against kills."""

import fcntl
import json
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from vitrail.errors import UserError
from vitrail.search.space import Choice, Params, Space

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

JOURNAL, NAME = "study.journal", "vitrail"
STARTUP = 5  # trials before others are pruned against them
WARMUP = 3  # tenths of a run in which nothing is pruned
OWNER, OWNERS = "owner", "owners"  # the process that works on a trial; a file for each that lives
BEGUN = "begun"  # said of a trial before its run folder is made


def needed() -> None:
    try:
        import optuna
    except ImportError as error:
        raise UserError(
            "a search needs optuna, which is not installed; pip install 'vitrail[search]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)


class Lock:
    """Held by one process at a time; the system takes it back from a process that dies."""

    def __init__(self, path: Path):
        self.path = path
        self.file: TextIO | None = None

    def acquire(self) -> bool:
        self.file = self.path.open("a")
        fcntl.lockf(self.file, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class Writing(Lock):
    """Held for each line of the journal; drops what a kill or a full disk left of another."""

    def __init__(self, journal: Path):
        super().__init__(journal.with_name(".journal.lock"))
        self.journal = journal

    def acquire(self) -> bool:
        super().acquire()
        if self.journal.exists():
            with self.journal.open("r+b") as file:
                drop_torn(file)
        return True


def drop_torn(file: BinaryIO) -> None:
    """Cuts a file behind its last whole line."""
    end = file.seek(0, os.SEEK_END)
    if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
        file.truncate(os.pread(file.fileno(), end, 0).rfind(b"\n") + 1)


def open_study(folder: Path, *, grid: bool = False) -> "Study":
    """The study in a search folder, made where there is none; a damaged one is refused."""
    needed()
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = folder / JOURNAL
    with Writing(path):
        check(path)
    lock: Any = Writing(path)  # optuna's own may outlive a killed process
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if not grid:
        pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=WARMUP)
    try:
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
        return optuna.create_study(
            storage=storage,
            study_name=NAME,
            direction="maximize",
            load_if_exists=True,
            pruner=pruner,
        )
    except (KeyError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise damaged(path, repr(error)) from error


def check(path: Path) -> None:
    """Tells of a line that is damaged."""
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            fine = isinstance(json.loads(line), dict)
        except ValueError:
            fine = False
        if not fine:
            raise damaged(path, f"line {number}")


def damaged(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} is damaged ({why:.100}); the runs in {path.parent / 'trials'} are whole: "
        f"bring a copy of it back, or search anew with another --out"
    )


def asking(folder: Path) -> Lock:
    """Held by who looks at the trials and decides what comes next."""
    return Lock(folder / ".ask.lock")


@contextmanager
def owner(folder: Path) -> Iterator[str]:
    """A name for this process that others can see the life of."""
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    path = folder / OWNERS / name
    path.parent.mkdir(exist_ok=True)
    with ExitStack() as stack:
        with asking(folder):  # nobody sees it before it lives
            file = stack.enter_context(path.open("w"))
            fcntl.lockf(file, fcntl.LOCK_EX)
        try:
            yield name
        finally:
            path.unlink(missing_ok=True)


def alive(folder: Path, name: str, me: str) -> bool:
    if name == me:
        return True  # to open the file would let go of the lock
    if not name:
        return False
    try:
        with (folder / OWNERS / name).open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except (BlockingIOError, PermissionError):
        return True
    return False


def alone(folder: Path, me: str) -> bool:
    """Whether no other process works on this search."""
    names = [path.name for path in (folder / OWNERS).iterdir() if path.name != me]
    return not any(alive(folder, name, me) for name in names)


def busy(study: "Study", folder: Path, me: str) -> bool:
    """Whether another process is still at a trial."""
    with asking(folder):
        return any(alive(folder, one.user_attrs.get(OWNER, ""), me) for one in running(study))


def running(study: "Study") -> "list[FrozenTrial]":
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


def next_trial(study: "Study", folder: Path, me: str, most: int, seed: int) -> "Trial | None":
    """One that a dead process left, else a new one; None if there are enough."""
    import optuna
    from optuna.trial import TrialState

    with asking(folder):
        for left in running(study):
            if not alive(folder, left.user_attrs.get(OWNER, ""), me):
                study._storage.set_trial_user_attr(left._trial_id, OWNER, me)
                return optuna.Trial(study, left._trial_id)
        trials = study.get_trials(deepcopy=False)
        if sum(one.state != TrialState.WAITING for one in trials) >= most:
            return None
        # a function of what is known, not a state: two processes, or a restart, draw other numbers
        count = len(trials)
        random = min(10, max(STARTUP, most // 3))
        study.sampler = optuna.samplers.TPESampler(
            seed=(1000 * seed + count) % 2**32, n_startup_trials=random
        )
        trial = study.ask()
        trial.set_user_attr(OWNER, me)
        return trial


def suggest(trial: "Trial", space: Space) -> Params:
    found: Params = {}
    for name, one in space.items():
        if isinstance(one, Choice):
            found[name] = trial.suggest_categorical(name, one.values)
        elif one.whole:
            found[name] = trial.suggest_int(name, int(one.low), int(one.high), log=one.log)
        else:
            found[name] = trial.suggest_float(name, one.low, one.high, log=one.log)
    return found


def reporting(trial: "Trial") -> Callable[[dict[str, Any]], None]:
    """Tells the study the best validation accuracy at each tenth of the run, and may end it."""
    import optuna

    before = trial.storage.get_trial(trial._trial_id).intermediate_values
    best, told = max(before.values(), default=0.0), max(before, default=0)

    def on_epoch(line: dict[str, Any]) -> None:
        nonlocal best, told
        best = max(best, line["val_accuracy"])
        done = 10 * line["step"] // max(1, line["steps"])
        for tenth in range(told + 1, min(done, 9) + 1):
            trial.report(best, tenth)
        if min(done, 9) > told:
            told = min(done, 9)
            if trial.should_prune():
                raise optuna.TrialPruned(
                    f"worse than half of the others after {told} tenths of the run"
                )

    return on_epoch


def finished(study: "Study") -> "list[FrozenTrial]":
    return [one for one in study.get_trials(deepcopy=False) if one.state.is_finished()]


def winner(study: "Study") -> "FrozenTrial | None":
    """The highest validation accuracy; of equal ones the lowest loss."""
    from optuna.trial import TrialState

    complete = [one for one in finished(study) if one.state == TrialState.COMPLETE]
    return max(
        complete,
        key=lambda one: (one.value, -one.user_attrs.get("val_loss", 0.0), -one.number),
        default=None,
    )
