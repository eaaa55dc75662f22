"""The signals that end a program, in one place: a run saves once, and no process is left behind."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

# Ctrl-C, kill, a closed terminal, Ctrl-\, a used-up CPU limit, and what batch systems send before
# they kill. Not all systems have all of them.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGXCPU", "SIGUSR1", "SIGUSR2")
ENDING = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))


def handle_ending_signals(handler: Handler | signal.Handlers) -> dict[int, Any]:
    """Sets a handler for every signal that ends a program; returns the previous ones.

    A signal that is ignored stays ignored: `nohup` ignores SIGHUP so that a run outlives its
    terminal, and shells ignore Ctrl-C for programs in the background.
    """
    handled = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in handled}


def ignore_ending_signals() -> None:
    """For a worker process, which its parent ends."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def exit_on_signal(number: int, frame: FrameType | None = None) -> None:
    """Exits with the code that shells report for the signal."""
    raise SystemExit(128 + number)


@contextmanager
def ending_signals_handled(handler: Handler) -> Iterator[None]:
    """Handles the signals inside a block, and restores the previous handlers afterwards."""
    previous = handle_ending_signals(handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
