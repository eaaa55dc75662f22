"""The number of steps that fits into the minutes."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from vitrail.pretraining.config import JointConfig, PretrainConfig
from vitrail.run import plan
from vitrail.run.fractions import MIN_STEPS, count_labelled_steps
from vitrail.run.plan import StepTiming, list_phases, mean_step_time, trial_seconds
from vitrail.run.recipe import Recipe
from vitrail.run.terminal import Terminal
from vitrail.training.config import TrainConfig


def measure(monkeypatch, steps, seconds):
    """The mean time of steps that take these seconds on a fake clock."""
    clock, stop = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def walk():
        for each in steps:
            if stop:
                return
            clock[0] += each
            yield each

    return mean_step_time(walk(), seconds, stop)


def test_the_slowest_steps_do_not_count(monkeypatch):
    assert measure(monkeypatch, [0.1] * 19 + [1.0] * 2 + [0.1] * 99, 3.8) == pytest.approx(0.1)


def test_drifting_speed_is_averaged(monkeypatch):
    drifting = [0.1, 0.2] * 50
    assert measure(monkeypatch, drifting, 15.0) == pytest.approx(0.1444, abs=1e-3)


def test_timing_takes_3_percent_of_the_minutes_and_at_most_one_minute():
    minutes = (0.5, 1, 10, 100)
    assert [trial_seconds(1, m) for m in minutes] == pytest.approx([0.9, 1.8, 18, 60])
    assert [trial_seconds(2, m) for m in minutes] == pytest.approx([0.45, 0.9, 9, 30])
    assert trial_seconds(1, None) == trial_seconds(2, None) == 3


def test_steps_with_patch_dropout_or_images_without_labels_are_timed_apart():
    def kinds(recipe):
        return [(round(p.share, 6), p.drops, p.unlabelled) for p in list_phases(recipe)]

    dropping = TrainConfig(drop_patches=0.5, drop_until=0.5)
    assert kinds(Recipe()) == [(1.0, False, False)]
    assert kinds(Recipe(joint=JointConfig(ratio=0))) == [(1.0, False, False)]
    assert kinds(Recipe(train=dropping)) == [(0.5, True, False), (0.5, False, False)]
    assert kinds(Recipe(train=dropping, joint=JointConfig())) == [
        *[(0.3, True, False), (0.2, True, True), (0.5, False, True)],
    ]
    short = TrainConfig(drop_patches=0.5, drop_until=0.2)
    assert kinds(Recipe(train=short, joint=JointConfig())) == [
        *[(0.2, True, False), (0.1, False, False), (0.7, False, True)],
    ]
    endless = TrainConfig(drop_patches=0.5, drop_until=1.0)
    assert kinds(Recipe(train=endless)) == [(1.0, True, False)]


@pytest.mark.parametrize("minutes", [1, 10, 60])
def test_a_run_ends_on_time_on_a_steady_machine(monkeypatch, minutes):
    timing = StepTiming(step=0.2, image=0.001)
    monkeypatch.setattr(plan, "measure_timing", lambda *_: timing)
    splits = np.repeat(["train", "val", "test"], [9000, 1000, 1000])
    loader = SimpleNamespace(source=SimpleNamespace(splits=splits), steps=70)
    started = time.monotonic() - 5  # for the start and the timing
    terminal = Terminal(quiet=True)
    made = plan.plan_steps(Recipe(), loader, None, minutes, started, terminal).train
    evaluations = made.steps // (made.evaluate_every * loader.steps)
    seconds = 5 + made.steps * timing.step + 1000 * timing.image * (evaluations + 2) + 1
    assert 0.94 * 60 * minutes < seconds <= 60 * minutes


@pytest.mark.parametrize("minutes", [1.5, 10, 60])
def test_a_pretraining_ends_on_time_with_its_probes_and_trainings(monkeypatch, minutes):
    timing = StepTiming(step=0.1, image=0.001, features=0.001, fits=2.0)
    monkeypatch.setattr(plan, "measure_timing", lambda *_: timing)
    splits = np.repeat(["train", "val", "test"], [9000, 1000, 1000])
    source = SimpleNamespace(
        splits=splits, labels=np.arange(11000) % 10, classes=tuple("0123456789")
    )
    loader, terminal = SimpleNamespace(source=source, steps=140, world_size=1), Terminal(quiet=True)
    recipe = Recipe(pretrain=PretrainConfig(), train=TrainConfig(batch=64))
    started = time.monotonic() - 5
    made = plan.plan_steps(recipe, loader, None, minutes, started, terminal)
    evaluations = made.train.steps // (made.train.evaluate_every * loader.steps) + 1
    probes = 2 * (10.0 + 2.0)  # features of training and validation images, and their fits
    heads = 0.001 * (90 + 900 + 9000) + 2.0
    trained = 6 * (count_labelled_steps(made, 1) * 3 * 0.001 * 64 + 1.0)
    page = 1.0 + 1.0 + 1.0
    steps = made.train.steps * timing.step + 1000 * 0.002 * evaluations
    seconds = 5 + steps + probes + heads + trained + page
    assert 0.9 * 60 * minutes < seconds <= 60 * minutes
    assert evaluations >= min(4, made.train.epochs)


def test_a_pretraining_with_several_processes_measures_for_no_longer():
    """The training runs with labels happen on one of them, with whole batches."""
    recipe = Recipe(pretrain=PretrainConfig(), train=TrainConfig(steps=96_000))
    alone, together = (count_labelled_steps(recipe, processes) for processes in (1, 8))
    assert alone == 8 * together > 8 * MIN_STEPS
