"""A lock that keeps two processes out of one run folder."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from vitrail.errors import UserError
from vitrail.training.checkpoint import report_disk_errors

LOCK = ".lock"
OWNER = ".owner"  # names the process that holds the lock; on Windows nobody can read a locked file


@contextmanager
def lock_folder(folder: str | Path) -> Iterator[None]:
    """Holds the lock of a folder during the block; raises if another process holds it.

    The system releases it if this process is killed, and forked workers do not inherit it.
    """
    folder = Path(folder).resolve()
    lock = FileLock(folder / LOCK)
    with report_disk_errors(f"cannot lock {folder}", "nothing was changed"):
        folder.stat()  # raises if it does not exist; filelock would create it
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise UserError(
                f"{folder} is in use by process {read_owner(folder)}; "
                f"wait until it ends, or choose another `out`"
            ) from error
    try:
        with report_disk_errors(f"cannot lock {folder}", "nothing was changed"):
            (folder / OWNER).write_text(
                f"{os.getpid()} on {socket.gethostname()}", encoding="utf-8"
            )
        yield
    finally:
        lock.release()


def read_owner(folder: Path) -> str:
    """The process that holds the lock, as it has described itself."""
    try:
        return (folder / OWNER).read_text(encoding="utf-8", errors="replace")[:200]
    except OSError:
        return "unknown"
