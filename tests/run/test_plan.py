"""How many steps fit into the minutes."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from vitrail.run import plan
from vitrail.run.live import Live
from vitrail.run.plan import Timing, paced, timed
from vitrail.run.recipe import Recipe
from vitrail.training.config import TrainConfig


def pace(monkeypatch, steps, seconds):
    """What is told of steps that take so long, by a clock of their own."""
    clock, enough = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def walk():
        for each in steps:
            if enough:
                return
            clock[0] += each
            yield each

    return paced(walk(), seconds, enough)


def test_a_program_that_wakes_for_a_moment_does_not_count(monkeypatch):
    assert pace(monkeypatch, [0.1] * 19 + [1.0] * 2 + [0.1] * 99, 3.8) == pytest.approx(0.1)


def test_a_machine_that_drifts_counts_on_average(monkeypatch):
    drifting = [0.1, 0.2] * 50
    assert pace(monkeypatch, drifting, 15.0) == pytest.approx(0.1444, abs=1e-3)


def test_the_timing_takes_a_twentieth_of_the_minutes_and_a_minute_at_most():
    plain, dropping = TrainConfig(), TrainConfig(drop_patches=0.5)
    assert [timed(plain, minutes) for minutes in (0.5, 1, 10, 100)] == [1.5, 3, 30, 60]
    assert [timed(dropping, minutes) for minutes in (0.5, 1, 10, 100)] == [0.75, 1.5, 15, 30]
    assert timed(plain, None) == timed(dropping, None) == 3


@pytest.mark.parametrize("minutes", [1, 10, 60])
def test_on_a_steady_machine_a_run_is_punctual(monkeypatch, minutes):
    timing = Timing(step=0.2, image=0.001)
    monkeypatch.setattr(plan, "measure", lambda *_: timing)
    splits = np.repeat(["train", "val", "test"], [9000, 1000, 1000])
    loader = SimpleNamespace(source=SimpleNamespace(splits=splits), steps=70)
    began = time.monotonic() - 5  # what start and timing took
    made = plan.plan(Recipe(), loader, None, minutes, began, Live(quiet=True)).train
    looks = made.steps // (made.evaluate_every * loader.steps)
    seconds = 5 + made.steps * timing.step + 1000 * timing.image * (looks + 2) + 1
    assert 0.94 * 60 * minutes < seconds <= 60 * minutes
