"""The accuracy benchmark: its entries, no repeated work, tables and plots."""

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
import torch

from bench import accuracy, report, train_peer
from bench.accuracy import AccuracySettings, Entry
from bench.curves import accuracy_table, plot_accuracy, seconds_to, total_seconds
from bench.recipes import LEARNING_RATES, RECIPES, Recipe, learning_rate
from bench.report import render_plot
from bench.resnet9 import ResNet9
from bench.train_peer import PeerJob, train_peer_model
from tests.run.fabricated import images, write_run
from vitrail.data.config import Augment
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig


def test_every_peer_trains_as_published_and_at_every_learning_rate():
    entries = AccuracySettings(minutes=8, set=("digits",), seeds=2).entries()
    for peer, recipe in RECIPES.items():
        rates = () if peer == "resnet-9" else LEARNING_RATES
        assert {e.lr for e in entries if e.contender == peer} == {recipe.lr, *rates}
    assert [(e.seed, e.minutes) for e in entries if e.contender == "vitrail, plain ViT"] == [(0, 8)]
    ours = [(e.seed, e.minutes) for e in entries if e.contender == "vitrail"]
    assert ours == [(0, 8), (1, 8), (0, 4), (0, 2)]
    short = AccuracySettings(minutes=2, set=("digits",), seeds=1).entries()
    assert [e.minutes for e in short if e.contender == "vitrail"] == [2, 1]
    assert len({entry.file for entry in entries}) == len(entries)


@pytest.mark.parametrize("wrong", [{"minutes": 0}, {"seeds": 0}, {"jobs": 0}, {"set": ()}])
def test_settings_that_measure_nothing_are_rejected(wrong):
    with pytest.raises(UserError, match="greater than 0"):
        AccuracySettings(**wrong)


def test_parallel_entries_share_the_cores(tmp_path, monkeypatch):
    """Two entries wait for each other, which would time out one after the other."""
    monkeypatch.setattr(accuracy, "CORES", 4)
    meeting = Barrier(2, timeout=30)

    def train(entry, path, on_progress):
        assert entry.threads == 2
        meeting.wait()
        path.write_text(json.dumps(make_entry(entry.contender)))

    monkeypatch.setattr(accuracy, "train_vitrail", train)
    monkeypatch.setattr(accuracy, "train_peer", train)
    settings = AccuracySettings(minutes=2, set=("digits",), jobs=2, seeds=4, work=tmp_path)
    assert len(settings.entries()) % 2 == 0  # an even number, so that every entry has a partner
    found = accuracy.run(settings, lambda done, activity: None)
    assert (found["jobs"], found["threads"]) == (2, 2)
    assert "Every entry uses 2 threads; 2 entries at a time." in accuracy_table(
        make_result() | found
    )
    with pytest.raises(UserError, match="5 jobs on 4 cores"):
        AccuracySettings(jobs=5)


def make_entry(contender, lr=1e-3, val=0.5, minutes=2.0, published=True, seed=0):
    curve = [[30 * i, val * i / 4] for i in range(1, 5)]
    return {
        "contender": contender,
        "published": published,
        "lr": lr,
        "seed": seed,
        "minutes": minutes,
        "parameters": 1000,
        "origin": f"origin of {contender}",
        "curve": curve,
        "val": val,
        "test": val - 0.01,
    }


def make_result():
    entries = [make_entry("vitrail", val=0.8), make_entry("vitrail", val=0.9, seed=1)]
    entries += [make_entry("vitrail", val=0.7, minutes=1.0)]
    entries += [make_entry("tutorial", val=0.4), make_entry("timm", val=0.5)]
    entries += [make_entry("timm", lr=3e-3, val=0.6, published=False)]
    entries += [make_entry("resnet-9", lr=0.4, val=0.95), make_entry("vitrail, plain ViT", val=0.7)]
    environment = {"machine": {"cpu": "a processor", "threads": 2}, "versions": {}, "commit": "abc"}
    found = {"minutes": 2.0, "jobs": 1, "threads": 2, "sets": {"digits": entries}}
    return {"name": "accuracy", **found, **environment}


def test_finished_entries_are_not_repeated(tmp_path, monkeypatch):
    done = []

    def train(entry, path, on_progress):
        on_progress(0.5)
        done.append(str(entry))
        path.write_text(json.dumps(make_entry(entry.contender)))

    monkeypatch.setattr(accuracy, "train_vitrail", train)
    monkeypatch.setattr(accuracy, "train_peer", train)
    settings = AccuracySettings(minutes=1, set=("digits",), seeds=1, work=tmp_path)
    fractions = []
    for _ in range(2):
        found = accuracy.run(settings, lambda done, activity: fractions.append(done))
    assert len(done) == len(set(done)) == len(settings.entries()) == len(found["sets"]["digits"])
    first = fractions[: 2 * len(done)]
    assert first == sorted(first) and 0 < first[0] < first[-1] == 1


def test_an_interrupt_terminates_the_training_process(tmp_path, monkeypatch):
    started = []

    def popen(*arguments, **options):
        started.append(subprocess.Popen(*arguments, **options))
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        return started[-1]

    sleep = ["timeit", "-n1", "-r1", "import time; time.sleep(600)"]
    train = partial(accuracy.run_module, sleep)
    monkeypatch.setattr(accuracy, "train_vitrail", train)
    monkeypatch.setattr(accuracy, "train_peer", train)
    monkeypatch.setattr(accuracy, "subprocess", SimpleNamespace(Popen=popen, STDOUT=-2))
    settings = AccuracySettings(minutes=1, set=("digits",), seeds=1, work=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        accuracy.run(settings, lambda done, activity: None)
    assert [process.returncode for process in started] == [-signal.SIGTERM]


def test_every_entry_records_the_commit_at_its_start(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "current_commit", iter(["first", "second"]).__next__)
    entry = Entry(data="digits", contender="vitrail", minutes=1, threads=1)
    path = tmp_path / entry.file

    def write(command, entry, path, on_progress):
        write_run(path.with_suffix(""), images(["a", "b"], each=8))

    monkeypatch.setattr(accuracy, "run_module", write)
    accuracy.train_vitrail(entry, path, lambda done: None)
    assert json.loads(path.read_text())["commit"] == "first"
    monkeypatch.setattr(train_peer, "train_peer_model", lambda job: {"contender": job.peer})
    job = {"data": "digits", "peer": "timm", "minutes": 1, "lr": 1}
    train_peer.main(json.dumps(job), str(path))
    found = json.loads(path.read_text())
    assert (found["contender"], found["commit"]) == ("timm", "second") and "torch" in found[
        "versions"
    ]


def test_the_table_lists_the_commits_of_all_entries():
    found = make_result()
    ours, *others = found["sets"]["digits"]
    ours |= {"commit": "old", "versions": {"torch": "1"}}
    for entry in others:
        entry |= {"commit": "new", "versions": {"torch": "2"}}
    assert "2 threads; torch 1 or torch 2; commits old, new." in report.render_table(found)
    del ours["commit"]
    assert "commits unknown, new." in report.render_table(found)


def test_the_error_of_a_failed_entry_names_its_log(tmp_path):
    entry = Entry(data="digits", contender="nobody", minutes=1, threads=1, lr=1e-3)
    with pytest.raises(UserError, match=r"exit code 1; see .*\.log"):
        accuracy.run_module(["bench.nothing"], entry, tmp_path / entry.file, lambda done: None)


def test_table_has_vitrail_with_its_range_and_every_peer_twice():
    page = accuracy_table(make_result())
    assert (
        "| digits, 2 min | parameters | learning rate | test accuracy | seconds to the best" in page
    )
    assert "the best peer's 60.0% | seconds to the tutorial's 40.0% |" in page
    assert "| times our seconds to our 80.0% |" in page
    assert "| vitrail | 1,000 | 0.001 | 84.0% (79.0% to 89.0%, 2 seeds) |" in page
    assert "| vitrail in 1 min | 1,000 | 0.001 | 69.0% |" in page
    assert "| timm, published | 1,000 | 0.001 | 49.0% | not reached |" in page
    assert "| timm, best learning rate | 1,000 | 0.003 | 59.0% | 120 |" in page
    assert "origin of timm" in page


def test_the_best_learning_rate_is_chosen_by_validation_accuracy():
    found = make_result()
    found["sets"]["digits"][-3]["test"] = 0.1  # the test accuracy must not matter
    assert "| timm, best learning rate | 1,000 | 0.003 | 10.0% |" in accuracy_table(found)


def test_seconds_to_a_level_are_interpolated_between_evaluations():
    curve = [[10, 0.2], [20, 0.4], [30, 0.3]]
    assert seconds_to(curve, 0.3) == pytest.approx(15)
    assert seconds_to(curve, 0.1) == 10
    assert seconds_to(curve, 0.5) == math.inf


def test_time_to_our_accuracy_is_a_multiple_of_our_time():
    page = accuracy_table(make_result())
    rows = {
        line.split(" | ")[0].strip("| "): line.split(" | ")[-1].strip(" |")
        for line in page.split("\n")
    }
    ours, convnet = 113.3333, 101.0526  # seconds to 80 %: the median of two seeds, and read off
    assert rows["resnet-9"] == f"{convnet / ours:.2f}"
    assert rows["timm, best learning rate"] == f"over {120 / ours:.2f}"
    assert rows["vitrail, plain ViT"] == f"over {120 / ours:.2f}"


def test_a_sentence_says_how_many_times_longer_the_others_need():
    found = make_result()
    ours = 113.3333  # seconds to 80 %, see above
    page = accuracy_table(found)
    assert "For the 80.0% of `vitrail` in 2 minutes, the best ViT peer (timm) " in page
    assert f"needs over {120 / ours:.2f} times the time, with which it reaches 60.0%" in page
    assert f"and the ConvNet needs {101.0526 / ours:.2f} times the time." in page
    longer = make_entry("timm", lr=3e-3, val=0.9, minutes=8.0, published=False)
    longer["curve"] = [[240, 0.5], [480, 0.9]]
    found["sets"]["digits"].append(longer)
    page = accuracy_table(found)
    assert f"the best ViT peer (timm) needs {420 / ours:.2f} times the time" in page
    assert f"| timm in 8 min | 1,000 | 0.003 | 89.0% | 300 | 240 | {420 / ours:.2f} |" in page


def test_our_time_includes_start_planning_and_test():
    ours = make_entry("vitrail", minutes=3.0)  # trains for two minutes
    assert total_seconds(ours, 0.25) == seconds_to(ours["curve"], 0.25) + 60
    peer = make_entry("timm", minutes=3.0)
    assert total_seconds(peer, 0.25) == seconds_to(peer["curve"], 0.25)


@pytest.mark.parametrize("reached", [False, True])
def test_contenders_below_our_accuracy_train_for_longer(tmp_path, monkeypatch, reached):
    """Only the best ViT peer, at its best learning rate, and the ConvNet."""
    val = {"vitrail": 0.8, "tutorial": 0.5, "timm": 0.9 if reached else 0.6}

    def train(entry, path, on_progress):
        score = val.get(entry.contender, 0.4) - (0.1 if entry.lr == 1e-3 else 0)
        path.write_text(json.dumps(make_entry(entry.contender, val=score)))

    monkeypatch.setattr(accuracy, "train_vitrail", train)
    monkeypatch.setattr(accuracy, "train_peer", train)
    settings = AccuracySettings(
        minutes=1, set=("digits",), seeds=1, peers=("tutorial", "timm", "resnet-9"), work=tmp_path
    )
    accuracy.run(settings, lambda done, activity: None)
    longer = sorted(path.name for path in tmp_path.glob("*_4-min_*"))
    convnet = "digits_resnet-9_4-min_lr-0.4"
    names = [convnet] if reached else [convnet, "digits_timm_4-min_lr-0.003"]
    assert [name.rpartition("_")[0] for name in longer] == names


def test_peers_are_chosen_by_name():
    entries = AccuracySettings(set=("digits",), peers=("resnet-9",)).entries()
    assert {e.contender for e in entries} == {"vitrail", "vitrail, plain ViT", "resnet-9"}
    with pytest.raises(UserError, match="unknown peer 'keras'; choose from tutorial"):
        AccuracySettings(peers=("keras",))
    with pytest.raises(UserError, match="give at least 1"):
        AccuracySettings(longer=0.5)


def test_the_convnet_has_the_published_size_and_learns(fast_clock):
    found = train_peer_model(PeerJob(data="digits", peer="resnet-9", minutes=1, lr=0.4))
    assert found["published"] and not found["diverged"]
    model = ResNet9(ViTConfig(classes=10))
    assert sum(parameter.numel() for parameter in model.parameters()) == 412_944
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.slow
def test_curves_are_drawn():
    assert plot_accuracy(make_result()) is not None
    assert render_plot(make_result()).startswith("<?xml")


def make_recipe(**more):
    defaults = {"lr": 1.0, "batch": 8, "optimizer": "adamw", "augment": Augment(), "origin": ""}
    return Recipe(**{**defaults, "schedule": "cosine", **more})


def test_learning_rates_follow_the_published_schedule():
    cosine = make_recipe(warmup=0.2, final=0.1)
    assert [learning_rate(done, cosine, 1.0) for done in (0.1, 0.2, 0.6, 1.0)] == pytest.approx(
        [0.5, 1, 0.55, 0.1]
    )
    assert learning_rate(0.25, make_recipe(schedule="linear"), 2.0) == pytest.approx(1.5)
    assert learning_rate(0.9, make_recipe(schedule="constant"), 2.0) == 2


@pytest.fixture
def fast_clock(monkeypatch):
    """Every step takes five seconds of a fake clock."""
    monkeypatch.setattr(train_peer, "time", SimpleNamespace(perf_counter=count(step=5).__next__))
    for peer in ("tutorial", "resnet-9"):
        monkeypatch.setitem(train_peer.RECIPES, peer, replace(RECIPES[peer], batch=16))


@pytest.mark.slow
def test_a_peer_is_evaluated_at_equal_intervals_and_tested_once(fast_clock):
    found = train_peer_model(PeerJob(data="digits", peer="tutorial", minutes=1, lr=1e-3))
    assert found["published"] and not found["diverged"]
    assert (found["steps"], found["seconds"]) == (12, 60)
    assert len(found["curve"]) == train_peer.EVALUATIONS and found["curve"][-1][0] == 60
    assert found["val"] == max(accuracy for _, accuracy in found["curve"])
    assert 0 < found["test"] <= 1


def test_a_step_past_several_evaluations_is_evaluated_once(fast_clock, monkeypatch):
    monkeypatch.setattr(train_peer, "time", SimpleNamespace(perf_counter=count(step=30).__next__))
    assert (
        len(train_peer_model(PeerJob(data="digits", peer="tutorial", minutes=1, lr=1e-3))["curve"])
        == 2
    )


def test_a_training_that_diverges_ends_and_is_marked(fast_clock):
    found = train_peer_model(PeerJob(data="digits", peer="tutorial", minutes=1, lr=1e30))
    assert found["diverged"] and found["steps"] < 12


def test_a_peer_of_another_size_is_rejected(fast_clock, monkeypatch):
    monkeypatch.setattr(train_peer, "SIZE_TOLERANCE", -1)
    with pytest.raises(UserError, match=r"tutorial has [\d,]+ parameters, vitrail has"):
        train_peer_model(PeerJob(data="digits", peer="tutorial", minutes=1, lr=1e-3))
