"""The contest of accuracies: who takes part, that nothing is done twice, and what is told of it."""

import json
import math
import os
import signal
import subprocess
import threading
from dataclasses import replace
from functools import partial
from itertools import count
from threading import Barrier
from types import SimpleNamespace

import pytest

from bench import accuracy, pupil, report
from bench.accuracy import Contest, Entry
from bench.curves import plot, reached, table
from bench.pupil import Lesson, teach
from bench.recipes import RATES, RECIPES, Recipe, rate
from bench.report import plot as svg
from tests.run.fabricated import images, write_run
from vitrail.data.config import Augment
from vitrail.errors import UserError


def test_every_peer_runs_as_published_and_at_every_rate():
    entries = Contest(minutes=8, set=("digits",), seeds=2).entries()
    for who, recipe in RECIPES.items():
        assert {e.lr for e in entries if e.who == who} == {recipe.lr, *RATES}
    ours = [(e.seed, e.minutes) for e in entries if e.who == "vitrail"]
    assert ours == [(0, 8), (1, 8), (0, 4), (0, 2)]
    short = Contest(minutes=2, set=("digits",), seeds=1).entries()
    assert [e.minutes for e in short if e.who == "vitrail"] == [2, 1]
    assert len({entry.file for entry in entries}) == len(entries)


@pytest.mark.parametrize("wrong", [{"minutes": 0}, {"seeds": 0}, {"jobs": 0}, {"set": ()}])
def test_a_contest_of_nothing_is_refused(wrong):
    with pytest.raises(UserError, match="more than 0"):
        Contest(**wrong)


def test_entries_at_the_same_time_share_the_cores(tmp_path, monkeypatch):
    """Two wait for each other, which one after the other never could."""
    monkeypatch.setattr(accuracy, "CORES", 4)
    meeting = Barrier(2, timeout=30)

    def perform(entry, path, follow):
        assert entry.threads == 2
        meeting.wait()
        path.write_text(json.dumps(made(entry.who)))

    monkeypatch.setattr(accuracy, "ours", perform)
    monkeypatch.setattr(accuracy, "theirs", perform)
    contest = Contest(minutes=2, set=("digits",), jobs=2, seeds=4, work=tmp_path)
    assert len(contest.entries()) % 2 == 0  # nobody is left without another
    found = accuracy.run(contest, lambda share, words: None)
    assert (found["jobs"], found["threads"]) == (2, 2)
    assert "Every entry has 2 threads, 2 entries at a time." in table(result() | found)
    with pytest.raises(UserError, match="5 jobs on 4 cores"):
        Contest(jobs=5)


def made(who, lr=1e-3, val=0.5, minutes=2.0, published=True, seed=0):
    curve = [[30 * i, val * i / 4] for i in range(1, 5)]
    return {
        "who": who,
        "published": published,
        "lr": lr,
        "seed": seed,
        "minutes": minutes,
        "parameters": 1000,
        "origin": f"where {who} is from",
        "curve": curve,
        "val": val,
        "test": val - 0.01,
    }


def result():
    entries = [made("vitrail", val=0.8), made("vitrail", val=0.9, seed=1)]
    entries += [made("vitrail", val=0.7, minutes=1.0)]
    entries += [made("seeds", val=0.4), made("timm", val=0.5)]
    entries += [made("timm", lr=3e-3, val=0.6, published=False)]
    place = {"machine": {"cpu": "a processor", "threads": 2}, "versions": {}, "commit": "abc"}
    found = {"minutes": 2.0, "jobs": 1, "threads": 2, "sets": {"digits": entries}}
    return {"name": "accuracy", **found, **place}


def test_finished_entries_are_not_repeated(tmp_path, monkeypatch):
    done = []

    def perform(entry, path, follow):
        follow(0.5)
        done.append(str(entry))
        path.write_text(json.dumps(made(entry.who)))

    monkeypatch.setattr(accuracy, "ours", perform)
    monkeypatch.setattr(accuracy, "theirs", perform)
    contest = Contest(minutes=1, set=("digits",), seeds=1, work=tmp_path)
    shares = []
    for _ in range(2):
        found = accuracy.run(contest, lambda share, words: shares.append(share))
    assert len(done) == len(set(done)) == len(contest.entries()) == len(found["sets"]["digits"])
    first = shares[: 2 * len(done)]
    assert first == sorted(first) and 0 < first[0] < first[-1] == 1


def test_who_stops_the_contest_stops_the_process_that_trains(tmp_path, monkeypatch):
    started = []

    def popen(*words, **settings):
        started.append(subprocess.Popen(*words, **settings))
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        return started[-1]

    sleep = ["timeit", "-n1", "-r1", "import time; time.sleep(600)"]
    train = partial(accuracy.perform, sleep)
    monkeypatch.setattr(accuracy, "ours", train)
    monkeypatch.setattr(accuracy, "theirs", train)
    monkeypatch.setattr(accuracy, "subprocess", SimpleNamespace(Popen=popen, STDOUT=-2))
    contest = Contest(minutes=1, set=("digits",), seeds=1, work=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        accuracy.run(contest, lambda share, words: None)
    assert [process.returncode for process in started] == [-signal.SIGTERM]


def test_every_entry_carries_the_commit_it_was_made_at(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "commit", iter(["first", "second"]).__next__)
    entry = Entry(data="digits", who="vitrail", minutes=1, threads=1)
    path = tmp_path / entry.file

    def perform(words, entry, path, follow):
        write_run(path.with_suffix(""), images(["a", "b"], each=8))

    monkeypatch.setattr(accuracy, "perform", perform)
    accuracy.ours(entry, path, lambda share: None)
    assert json.loads(path.read_text())["commit"] == "first"
    monkeypatch.setattr(pupil, "teach", lambda lesson: {"who": lesson.peer})
    pupil.main(json.dumps({"data": "digits", "peer": "timm", "minutes": 1, "lr": 1}), str(path))
    found = json.loads(path.read_text())
    assert (found["who"], found["commit"]) == ("timm", "second") and "torch" in found["versions"]


def test_entries_of_several_commits_are_told():
    found = result()
    ours, *others = found["sets"]["digits"]
    ours |= {"commit": "old", "versions": {"torch": "1"}}
    for entry in others:
        entry |= {"commit": "new", "versions": {"torch": "2"}}
    assert "2 threads; torch 1 or torch 2; commits old, new." in report.table(found)
    del ours["commit"]
    assert "commits unknown, new." in report.table(found)


def test_an_entry_that_fails_is_told_with_its_log(tmp_path):
    entry = Entry(data="digits", who="nobody", minutes=1, threads=1, lr=1e-3)
    with pytest.raises(UserError, match=r"code 1; .*\.log says why"):
        accuracy.perform(["bench.nothing"], entry, tmp_path / entry.file, lambda share: None)


def test_table_has_ours_with_spread_and_the_peers_twice():
    page = table(result())
    assert "| digits, 2 min | parameters | rate | test accuracy | seconds to the best" in page
    assert "the best peer's 60.0% | to the seeds' 40.0% |" in page
    assert "| vitrail | 1,000 | 0.001 | 84.0% (79.0% to 89.0%, 2 seeds) |" in page
    assert "| vitrail in 1 min | 1,000 | 0.001 | 69.0% |" in page
    assert "| timm, published | 1,000 | 0.001 | 49.0% | not reached |" in page
    assert "| timm, best rate | 1,000 | 0.003 | 59.0% | 120 |" in page
    assert "where timm is from" in page


def test_best_rate_is_chosen_on_validation_images():
    found = result()
    found["sets"]["digits"][-1]["test"] = 0.1  # whatever the test says
    assert "| timm, best rate | 1,000 | 0.003 | 10.0% |" in table(found)


def test_level_is_reached_between_two_looks():
    curve = [[10, 0.2], [20, 0.4], [30, 0.3]]
    assert reached(curve, 0.3) == pytest.approx(15)
    assert reached(curve, 0.1) == 10
    assert reached(curve, 0.5) == math.inf


@pytest.mark.slow
def test_curves_are_drawn():
    assert plot(result()) is not None
    assert svg(result()).startswith("<?xml")


def recipe(**more):
    some = {"lr": 1.0, "batch": 8, "optimizer": "adamw", "augment": Augment(), "origin": ""}
    return Recipe(**{**some, "schedule": "cosine", **more})


def test_rates_rise_and_fall_as_published():
    cosine = recipe(warmup=0.2, final=0.1)
    assert [rate(done, cosine, 1.0) for done in (0.1, 0.2, 0.6, 1.0)] == pytest.approx(
        [0.5, 1, 0.55, 0.1]
    )
    assert rate(0.25, recipe(schedule="linear"), 2.0) == pytest.approx(1.5)
    assert rate(0.9, recipe(schedule="constant"), 2.0) == 2


@pytest.fixture
def hurried(monkeypatch):
    """Every step takes five seconds of the clock, and little of ours."""
    monkeypatch.setattr(pupil, "time", SimpleNamespace(perf_counter=count(step=5).__next__))
    seeds = replace(RECIPES["seeds"], batch=16)
    monkeypatch.setitem(pupil.RECIPES, "seeds", seeds)


@pytest.mark.slow
def test_a_lesson_is_looked_at_at_equal_distances_and_tested_once(hurried):
    found = teach(Lesson(data="digits", peer="seeds", minutes=1, lr=1e-3))
    assert found["published"] and not found["diverged"]
    assert (found["steps"], found["seconds"]) == (12, 60)
    assert len(found["curve"]) == pupil.LOOKS and found["curve"][-1][0] == 60
    assert found["val"] == max(right for _, right in found["curve"])
    assert 0 < found["test"] <= 1


def test_one_step_past_many_marks_is_looked_at_once(hurried, monkeypatch):
    monkeypatch.setattr(pupil, "time", SimpleNamespace(perf_counter=count(step=30).__next__))
    assert len(teach(Lesson(data="digits", peer="seeds", minutes=1, lr=1e-3))["curve"]) == 2


def test_a_lesson_that_diverges_ends_and_says_so(hurried):
    found = teach(Lesson(data="digits", peer="seeds", minutes=1, lr=1e30))
    assert found["diverged"] and found["steps"] < 12


def test_a_peer_of_another_size_is_refused(hurried, monkeypatch):
    monkeypatch.setattr(pupil, "ALIKE", 1e-9)
    with pytest.raises(UserError, match=r"seeds has [\d,]+ parameters, we have"):
        teach(Lesson(data="digits", peer="seeds", minutes=1, lr=1e-3))
