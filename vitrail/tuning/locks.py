"""Locks of a search, in a folder or a database, and which of its worker processes are alive."""

import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from filelock import FileLock, Timeout

if TYPE_CHECKING:
    from vitrail.tuning.storage import Database

WORKERS = "workers"  # folder with one file for each worker, locked as long as it lives


def lock_study(place: "Path | Database", name: str = "study") -> AbstractContextManager[object]:
    """Held by a process while it reads the trials and decides what to run next."""
    return FileLock(place / f".{name}.lock") if isinstance(place, Path) else place.lock(name)


class JournalLock:
    """Optuna's lock of a journal file, held for each appended record.

    The operating system releases it when its process dies, while a killed process leaves Optuna's
    own locks behind. It also removes the partial line that a kill or a full disk leaves at the end.
    """

    def __init__(self, journal: Path):
        self.journal = journal
        self.lock = FileLock(journal.with_name(".journal.lock"))

    def acquire(self) -> bool:
        self.lock.acquire()
        try:
            if self.journal.exists():
                with self.journal.open("r+b") as file:
                    drop_partial_line(file)
        except BaseException:
            self.lock.release()
            raise
        return True

    def release(self) -> None:
        self.lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


def drop_partial_line(file: BinaryIO) -> None:
    """Truncates a file after its last complete line."""
    end = file.seek(0, os.SEEK_END)
    if not end:
        return
    file.seek(end - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


@contextmanager
def register_worker(place: "Path | Database") -> Iterator[str]:
    """A unique name for this process; `is_alive` tells other processes whether it still runs."""
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    if not isinstance(place, Path):
        with place.lock(name):
            yield name
        return
    path = place / WORKERS / name
    path.parent.mkdir(exist_ok=True)
    lock = FileLock(path)
    with lock_study(place):  # `is_alive` runs under this lock, so it never sees the file unlocked
        lock.acquire()
    try:
        yield name
    finally:
        lock.release()
        path.unlink(missing_ok=True)


def is_alive(place: "Path | Database", worker: str) -> bool:
    """Whether a worker holds its lock; the caller holds the lock of the study."""
    if not isinstance(place, Path):
        return bool(worker) and not place.is_free(worker)
    path = place / WORKERS / worker
    if not worker or not path.exists():
        return False
    try:
        with FileLock(path, blocking=False):
            pass
    except (Timeout, PermissionError):  # PermissionError: another user's process
        return True
    path.unlink(missing_ok=True)  # the worker was killed before it could remove its file
    return False


def is_only_worker(place: "Path | Database", worker: str) -> bool:
    """Whether no other process works on this search; a database does not list who does."""
    if not isinstance(place, Path):
        return False
    names = [path.name for path in (place / WORKERS).iterdir() if path.name != worker]
    return not any(is_alive(place, name) for name in names)
