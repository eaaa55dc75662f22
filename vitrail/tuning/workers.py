"""Several processes that run the trials of one search."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vitrail import files
from vitrail.errors import UserError
from vitrail.signals import exit_on_signal, handle_ending_signals, ignore_ending_signals
from vitrail.tuning.locks import register_worker
from vitrail.tuning.storage import find_locks, report_storage_errors
from vitrail.tuning.trials import run_trials

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

GRACE_SECONDS = 10.0  # for workers that received a SIGTERM themselves to save their runs and exit
POLL_SECONDS = 1.0  # between two updates of the progress


def run_workers(
    folder: Path,
    limit: int,
    deadline: float | None,
    jobs: int,
    on_progress: Callable[[], None],
    url: str | None = None,
) -> None:
    """Runs the trials in `jobs` processes, which share the CPU threads.

    Raises the first UserError of a worker. The workers save their runs and exit when the pipe to
    this process is closed, which also happens if this process is killed.
    """
    threads = max(1, torch.get_num_threads() // jobs)
    spawn = multiprocessing.get_context("spawn")
    seconds = None if deadline is None else deadline - time.monotonic()
    errors = spawn.SimpleQueue()
    reader, writer = spawn.Pipe(duplex=False)
    arguments = (folder, limit, seconds, threads, errors, reader, url)
    workers = [spawn.Process(target=worker_main, args=arguments) for _ in range(jobs)]
    try:
        with block_interrupts():
            for worker in workers:
                worker.start()
        while errors.empty() and any(worker.is_alive() for worker in workers):
            for worker in workers:
                worker.join(timeout=POLL_SECONDS / jobs)
            on_progress()
    except SystemExit:  # on SIGTERM; workers that got it too must be able to save their runs
        grace_end = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < grace_end and any(worker.is_alive() for worker in workers):
            time.sleep(0.1)
        raise
    finally:
        writer.close()
        reader.close()
        for worker in workers:
            if worker.pid is not None:
                worker.join()
    if not errors.empty():
        raise UserError(errors.get())


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Processes started in the block inherit a blocked SIGINT.

    A terminal sends Ctrl-C to all processes, but the workers must outlive it to save their runs.
    Windows has no signal masks: there `worker_main` ignores the signal.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # its own start would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def worker_main(
    folder: Path,
    limit: int,
    seconds: float | None,
    threads: int,
    errors: "SimpleQueue[str]",
    parent: Connection,
    url: str | None = None,
) -> None:
    """The main function of a worker; `errors` gets the message of a UserError."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handle_ending_signals(exit_on_signal)
    threading.Thread(target=exit_with_parent, args=(parent,), daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    try:
        deadline = None if seconds is None else time.monotonic() + seconds
        with report_storage_errors(url), register_worker(find_locks(folder, url)) as worker:
            run_trials(folder, worker, limit, deadline, url=url)
    except UserError as error:
        errors.put(str(error))
    except OSError as error:
        if error.errno not in files.ADVICE:
            raise
        errors.put(f"cannot continue: {files.describe_os_error(error)}")
    finally:  # a signal from here on would only interrupt the exit
        ignore_ending_signals()


def exit_with_parent(parent: Connection) -> None:
    """Waits until the parent closes its end of the pipe, then raises SIGTERM in this process."""
    with suppress(EOFError, OSError):
        parent.recv()
    if hasattr(signal, "pthread_kill") and (main := threading.main_thread().ident) is not None:
        signal.pthread_kill(main, signal.SIGTERM)  # interrupts a blocking call in the main thread
    else:
        signal.raise_signal(signal.SIGTERM)
