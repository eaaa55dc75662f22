"""The lock of a run folder."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vitrail.errors import UserError
from vitrail.run.storage.lock import lock_folder

HOLD = """
import sys, time
from vitrail.run.storage.lock import lock_folder
with lock_folder(sys.argv[1]):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def test_a_second_process_is_refused_and_learns_who_holds_the_lock(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path, "60"], stdout=subprocess.PIPE
    ) as holder:
        try:
            holder.stdout.readline()
            refused = pytest.raises(UserError, match=f"in use by process {holder.pid} on ")
            with refused, lock_folder(tmp_path):
                pass
        finally:
            holder.kill()


def test_the_lock_of_a_killed_process_does_not_block(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path, "60"], stdout=subprocess.PIPE
    ) as holder:
        holder.stdout.readline()
        holder.send_signal(signal.SIGKILL)
    with lock_folder(tmp_path):
        assert str(os.getpid()) in (tmp_path / ".owner").read_text()


ATTEMPT = """
import sys
from vitrail.errors import UserError
from vitrail.run.storage.lock import lock_folder
for line in sys.stdin:
    try:
        with lock_folder(line.rstrip("\\n")):
            print("held", flush=True)
    except UserError:
        print("refused", flush=True)
"""


@pytest.fixture(scope="module")
def attempt():
    """Whether another process gets the lock, the same one in all tests: `attempt(path)`."""
    with subprocess.Popen(
        [sys.executable, "-c", ATTEMPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:

        def ask(path: Path) -> bool:
            print(path, file=other.stdin, flush=True)
            return {"held": True, "refused": False}[other.stdout.readline().strip()]

        yield ask
        other.stdin.close()


def test_the_lock_holds_while_the_block_runs_and_no_longer(attempt, tmp_path):
    with lock_folder(tmp_path):
        assert not attempt(tmp_path)
    assert attempt(tmp_path)


def test_a_process_cannot_lock_twice(attempt, tmp_path):
    with lock_folder(tmp_path):
        with (
            pytest.raises(UserError, match=f"in use by process {os.getpid()}"),
            lock_folder(tmp_path),
        ):
            pass
        assert not attempt(tmp_path)
    with lock_folder(tmp_path):
        pass


def test_an_error_in_the_block_releases_the_lock_and_is_raised(attempt, tmp_path):
    with pytest.raises(FileNotFoundError), lock_folder(tmp_path):
        (tmp_path / "nothing").read_text()
    assert attempt(tmp_path)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child only waits
def test_workers_that_outlive_the_process_do_not_hold_its_lock(attempt, tmp_path):
    with lock_folder(tmp_path):
        worker = os.fork()
        if worker == 0:
            signal.pause()
    try:
        assert attempt(tmp_path)
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_a_folder_that_cannot_be_locked_is_an_error(tmp_path):
    with (
        pytest.raises(UserError, match=r"cannot lock .*No such file"),
        lock_folder(tmp_path / "none"),
    ):
        pass


FORK = """
import os, signal, sys
from vitrail.run.storage.lock import lock_folder
with lock_folder(sys.argv[1]):
    worker = os.fork()
    if worker == 0:
        signal.pause()
    print(worker, flush=True)
    signal.pause()
"""


def test_workers_of_a_killed_process_do_not_hold_its_lock(attempt, tmp_path):
    with subprocess.Popen([sys.executable, "-c", FORK, tmp_path], stdout=subprocess.PIPE) as holder:
        worker = int(holder.stdout.readline())
        holder.kill()
        holder.wait()
        try:
            assert attempt(tmp_path)
        finally:
            os.kill(worker, signal.SIGKILL)
