"""Locks of a search folder, on systems with and without POSIX signals."""

import multiprocessing
import signal
import threading

import pytest

from vitrail.tuning import workers
from vitrail.tuning.locks import (
    WORKERS,
    drop_partial_line,
    is_alive,
    is_only_worker,
    register_worker,
)


def test_a_worker_is_alive_until_it_leaves(tmp_path):
    with register_worker(tmp_path) as me:
        assert is_alive(tmp_path, me) and is_only_worker(tmp_path, me)
        with register_worker(tmp_path) as other:
            assert is_alive(tmp_path, other) and not is_only_worker(tmp_path, me)
        assert not is_alive(tmp_path, other) and is_only_worker(tmp_path, me)
    assert list((tmp_path / WORKERS).iterdir()) == []


def test_the_file_of_a_killed_worker_is_removed(tmp_path):
    path = tmp_path / WORKERS / "host-1-killed"
    path.parent.mkdir()
    path.touch()
    assert not is_alive(tmp_path, path.name)
    assert not path.exists()


@pytest.mark.parametrize(
    ("before", "after"), [(b"", b""), (b"a\n", b"a\n"), (b"a\nb", b"a\n"), (b"a", b"")]
)
def test_a_partial_line_is_truncated(tmp_path, before, after):
    path = tmp_path / "journal"
    path.write_bytes(before)
    with path.open("r+b") as file:
        drop_partial_line(file)
    assert path.read_bytes() == after


def test_workers_start_without_signal_masks(monkeypatch):
    monkeypatch.delattr(signal, "pthread_sigmask")
    with workers.block_interrupts():
        pass


@pytest.mark.parametrize("has_pthread_kill", [True, False])
def test_a_closed_pipe_raises_sigterm_in_the_worker(monkeypatch, has_pthread_kill):
    if not has_pthread_kill:
        monkeypatch.delattr(signal, "pthread_kill", raising=False)
    received = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.set())
    try:
        reader, writer = multiprocessing.Pipe(duplex=False)
        thread = threading.Thread(target=workers.exit_with_parent, args=(reader,))
        thread.start()
        writer.close()
        thread.join()
        assert received.wait(10)
    finally:
        signal.signal(signal.SIGTERM, before)
