"""What is told of a run while it goes on."""

import io
from functools import partial

import pytest
from rich.console import Console

from vitrail.run import live


@pytest.fixture
def clock(monkeypatch):
    """A clock that is moved by hand."""
    now = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    return now


def test_the_bar_knows_the_time_left_though_steps_are_slow(clock, monkeypatch):
    terminal = partial(Console, force_terminal=True, file=io.StringIO(), get_time=lambda: clock[0])
    monkeypatch.setattr(live, "Console", terminal)
    shown = live.Live(10)
    for step in range(1, 4):
        clock[0] += 40
        shown.reach(step)
    assert shown.bar.tasks[0].time_remaining == 280


def test_plain_lines_tell_the_time_left(clock, capsys):
    shown = live.Live(100)
    for step in range(51, 54):  # a run that went on
        clock[0] += 60
        shown.reach(step)
        shown.step(step, 1, 2.0, 3.0)
    shown.epoch({"epoch": 1, "step": 53, "train_loss": 2.0, "val_accuracy": 0.5})
    clock[0] += 60
    shown.epoch({"epoch": 1, "step": 53, "train_loss": 2.0, "val_accuracy": 0.5})
    first, *_, last, epoch = capsys.readouterr().err.splitlines()
    assert first == "step 51 of 100  epoch 1  loss 2.000  3 images/s"
    assert last.endswith("3 images/s  47 minutes left")
    assert epoch.endswith("validation 50.0%  47 minutes left")


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.4, "0 seconds"),
        (1.2, "1 second"),
        (89, "89 seconds"),
        (91, "2 minutes"),
        (9000, "2.5 hours"),
    ],
)
def test_a_duration_is_told_in_the_unit_that_one_would_use(seconds, told):
    assert live.duration(seconds) == told
