"""What a run shows while it trains."""

import io
from functools import partial

import pytest
from rich.console import Console

from vitrail.display.text import format_duration
from vitrail.run import terminal


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def test_the_bar_shows_the_remaining_time_of_slow_steps(clock, monkeypatch):
    console = partial(Console, force_terminal=True, file=io.StringIO(), get_time=lambda: clock[0])
    monkeypatch.setattr(terminal, "Console", console)
    shown = terminal.Terminal(10)
    for step in range(1, 4):
        clock[0] += 40
        shown.advance(step)
    assert shown.bar.tasks[0].time_remaining == 280


def test_plain_lines_show_the_remaining_time(clock, capsys):
    shown = terminal.Terminal(100)
    for step in range(51, 54):  # a resumed run
        clock[0] += 60
        shown.advance(step)
        shown.show_step(step, 1, 2.0, 3.0)
    shown.show_epoch(
        {"epoch": 1, "step": 53, "train_loss": 2.0, "val_loss": 1.0, "val_accuracy": 0.5}
    )
    clock[0] += 60
    shown.show_epoch(
        {"epoch": 1, "step": 53, "train_loss": 2.0, "val_loss": 1.0, "val_accuracy": 0.5}
    )
    first, *_, last, epoch = capsys.readouterr().err.splitlines()
    assert first == "step 51 of 100  epoch 1  loss 2.000  3 images/s"
    assert last.endswith("3 images/s  47 minutes left")
    assert epoch.endswith("validation accuracy 50.0%  47 minutes left")


def test_later_steps_may_cost_more(clock, capsys):
    shown = terminal.Terminal(10, work=lambda step: step + 4 * max(0, step - 5))
    for step in range(1, 8):
        clock[0] += 60 if step <= 5 else 300
        shown.advance(step)
        clock[0] += terminal.LINE_INTERVAL if step in (5, 7) else 0
        shown.show_step(step, 1, 2.0, 3.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].endswith("15 minutes left")
    assert next(line for line in lines if line.startswith("step 5 ")).endswith("25 minutes left")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 seconds"),
        (1.2, "1 second"),
        (89, "89 seconds"),
        (91, "2 minutes"),
        (9000, "2.5 hours"),
    ],
)
def test_a_duration_has_the_unit_that_suits_it(seconds, text):
    assert format_duration(seconds) == text
