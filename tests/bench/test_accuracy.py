"""The accuracy benchmark: its entries, no repeated work, tables and plots."""

import json
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

from bench import accuracy, pairs, report, train_peer
from bench.accuracy import AccuracySettings, Entry, next_time
from bench.curves import accuracy_table, plot_accuracy, times_to
from bench.recipes import LEARNING_RATES, RECIPES, Recipe, learning_rate
from bench.report import render_plot
from bench.resnet9 import ResNet9
from bench.train_peer import PeerJob, train_peer_model
from tests.run.fabricated import images, write_run
from vitrail.data.config import Augment
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.training import learner


def test_every_peer_trains_as_published_and_with_the_best_learning_rate():
    for data, best in (("cifar10", 1e-3), ("fashion-mnist", 3e-3)):
        for rates, wanted in (
            (("published", "best"), {5e-4, best}),
            (("best",), {best}),
            (("all",), {5e-4, *LEARNING_RATES}),
        ):
            entries = AccuracySettings(set=(data,), rates=rates).entries()
            assert {e.lr for e in entries if e.contender == "timm"} == wanted
            assert [e.lr for e in entries if e.contender == "resnet-9"] == [0.4]
    for recipe in RECIPES.values():
        assert set(recipe.best.values()) <= {recipe.lr, *LEARNING_RATES}


def test_a_best_learning_rate_that_is_not_known_is_searched_for():
    entries = AccuracySettings(minutes=8, set=("digits",), seeds=2).entries()
    assert {e.lr for e in entries if e.contender == "timm"} == {5e-4, *LEARNING_RATES}
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
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    meeting, used = Barrier(2, timeout=30), []

    def train(entry, path, cores, on_progress):
        used.append(tuple(cores))
        meeting.wait()
        assert entry.threads == 2 and set(used[-2:]) == {(0, 1), (2, 3)}
        meeting.wait()
        path.write_text(json.dumps(make_entry(entry.contender)))

    monkeypatch.setattr(accuracy, "train_vitrail", train)
    monkeypatch.setattr(accuracy, "train_peer", train)
    settings = AccuracySettings(
        minutes=2, set=("digits",), jobs=2, seeds=4, times=(), work=tmp_path
    )
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
        "precision": "bfloat16" if contender == "resnet-9" else "float32",
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

    def train(entry, path, cores, on_progress):
        on_progress(0.5)
        done.append(str(entry))
        path.write_text(json.dumps(make_entry(entry.contender)))

    monkeypatch.setattr(accuracy, "train_vitrail", train)
    monkeypatch.setattr(accuracy, "train_peer", train)
    settings = AccuracySettings(minutes=1, set=("digits",), seeds=1, times=(), work=tmp_path)
    fractions = []
    assert f"accuracy: {len(settings.entries())} entries take about" in settings.describe_cost()
    for _ in range(2):
        found = accuracy.run(settings, lambda done, activity: fractions.append(done))
    assert len(done) == len(set(done)) == len(settings.entries()) == len(found["sets"]["digits"])
    assert settings.describe_cost().startswith("accuracy: 0 entries take about 0.0 hours")
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
    monkeypatch.setattr(pairs, "subprocess", SimpleNamespace(Popen=popen, STDOUT=-2))
    settings = AccuracySettings(minutes=1, set=("digits",), seeds=1, work=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        accuracy.run(settings, lambda done, activity: None)
    assert [process.returncode for process in started] == [-signal.SIGTERM]


def test_every_entry_records_the_commit_at_its_start(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "current_commit", iter(["first", "second"]).__next__)
    entry = Entry(data="digits", contender="vitrail", minutes=1, threads=1)
    path = tmp_path / entry.file

    def write(command, entry, path, cores, on_progress):
        write_run(path.with_suffix(""), images(["a", "b"], each=8))

    monkeypatch.setattr(accuracy, "run_module", write)
    accuracy.train_vitrail(entry, path, [0], lambda done: None)
    found = json.loads(path.read_text())
    assert found["commit"] == "first" and found["machine"]["threads"] == 1
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
    ours["machine"] = {"cpu": "another processor", "threads": 2}
    assert "another processor or a processor, 2 threads;" in report.render_table(found)


def test_the_error_of_a_failed_entry_names_its_log(tmp_path):
    entry = Entry(data="digits", contender="nobody", minutes=1, threads=1, lr=1e-3)
    with pytest.raises(UserError, match=r"exit code 1; see .*\.log"):
        accuracy.run_module(["bench.nothing"], entry, tmp_path / entry.file, [0], lambda done: None)


def test_table_has_vitrail_with_its_range_and_every_peer_twice():
    page = accuracy_table(make_result())
    assert "| digits, 2 min | parameters | precision | learning rate | test accuracy | " in page
    assert "| times our minutes to our 84.0% |" in page
    assert "| vitrail | 1,000 | float32 | 0.001 | 84.0% (79.0% to 89.0%, 2 seeds) | 1.00 |" in page
    assert "| vitrail in 1 min | 1,000 | float32 | 0.001 | 69.0% |  |" in page
    assert "| timm, published | 1,000 | float32 | 0.001 | 49.0% | over 1 |" in page
    assert "| timm, best learning rate | 1,000 | float32 | 0.003 | 59.0% | over 1 |" in page
    assert "| resnet-9 | 1,000 | bfloat16 | 0.4 | 94.0% | at most 1 |" in page
    assert "origin of timm" in page


def test_without_published_rates_the_table_has_only_the_best():
    found = make_result()
    found["sets"]["digits"] = [e for e in found["sets"]["digits"] if e["lr"] != 1e-3 or e["seed"]]
    page = accuracy_table(found)
    assert "timm, published" not in page and "| timm, best learning rate |" in page


def test_the_best_learning_rate_is_chosen_by_validation_accuracy():
    found = make_result()
    found["sets"]["digits"][-3]["test"] = 0.1  # the test accuracy must not matter
    assert "| timm, best learning rate | 1,000 | float32 | 0.003 | 10.0% |" in accuracy_table(found)


def final(minutes, test, lr=1e-3):
    return {"contender": "timm", "minutes": minutes, "test": test, "lr": lr}


def test_times_are_interpolated_between_final_accuracies_over_log_minutes():
    runs = [final(20, 0.8), final(5, 0.5), final(10, 0.7), final(10, 0.5)]  # 0.6 in 10 minutes
    assert times_to(runs, 0.55, 10) == f"{2**-0.5:.2f}"
    assert times_to(runs, 0.7, 10) == f"{2**0.5:.2f}"
    assert times_to(runs, 0.4, 10) == "at most 0.5"
    assert times_to(runs, 0.9, 10) == "over 2"
    assert times_to([final(10, None), final(20, 0.8)], 0.4, 10) == f"{2**0.5:.2f}"  # diverged


def test_a_curve_within_a_run_does_not_count():
    """It rises late, when the learning rate falls: only runs that end at a time are compared."""
    found = make_result()
    shorter = make_entry("resnet-9", lr=0.4, val=0.81, minutes=1.0)
    found["sets"]["digits"].append(shorter)
    times = 2 ** -((0.94 - 0.84) / (0.94 - 0.80))
    assert f"the ConvNet needs {times:.2f} times the minutes" in accuracy_table(found)
    shorter["curve"] = [[1, 1.0], [60, 0.81]]
    assert f"the ConvNet needs {times:.2f} times the minutes" in accuracy_table(found)


def test_sentences_say_how_many_times_longer_the_others_need():
    found = make_result()
    page = accuracy_table(found)
    assert "For the 84.0% of `vitrail` in 2 minutes, the best ViT peer (timm) needs over 1 " in page
    assert "For the 59.0% of the best ViT peer, `vitrail` needs at most 0.5 times." in page
    # a run with another learning rate does not count
    found["sets"]["digits"].append(make_entry("timm", lr=1e-3, val=0.95, minutes=4.0))
    assert "(timm) needs over 1 times" in accuracy_table(found)
    found["sets"]["digits"].append(make_entry("timm", lr=3e-3, val=0.95, minutes=8.0))
    times = 4 ** ((0.84 - 0.59) / (0.94 - 0.59))
    assert f"(timm) needs {times:.2f} times the minutes" in accuracy_table(found)


@pytest.mark.parametrize(
    ("finished", "wanted"),
    [
        ({1: False}, 4),  # the longest shows whether it is ever reached
        ({1: False, 4: False}, None),
        ({1: False, 4: True}, 2),
        ({1: False, 4: True, 2: True}, None),
        ({1: True}, 0.5),
        ({1: True, 0.5: True}, 0.25),
        ({1: True, 0.5: False}, None),
        ({1: True, 0.5: True, 0.25: True}, None),
    ],
)
def test_training_times_are_tried_until_they_bracket_our_accuracy(finished, wanted):
    assert next_time(finished, (0.25, 0.5, 2, 4)) == wanted


def test_the_convnet_and_the_best_peer_train_for_other_times(tmp_path, monkeypatch):
    """The ConvNet is better than ours, the peer reaches it in twice the time."""
    val = {"vitrail": 0.8, "tutorial": 0.5, "timm": 0.6, "resnet-9": 0.81}

    def train(entry, path, cores, on_progress):
        score = val.get(entry.contender, 0.4) - (0.1 if entry.lr == 1e-3 else 0)
        score += 0.1 * (entry.minutes - 2)
        found = make_entry(entry.contender, val=score, minutes=entry.minutes)
        path.write_text(json.dumps(found))

    monkeypatch.setattr(accuracy, "train_vitrail", train)
    monkeypatch.setattr(accuracy, "train_peer", train)
    settings = AccuracySettings(
        **{"minutes": 2, "set": ("digits",), "seeds": 1, "peers": ("tutorial", "timm", "resnet-9")},
        **{"times": (0.25, 0.5, 2), "work": tmp_path},
    )
    found = accuracy.run(settings, lambda done, activity: None)
    names = [path.name for path in tmp_path.glob("*.json") if "vitrail" not in path.name]
    others = sorted(name.rpartition("_")[0] for name in names if "_2-min_" not in name)
    assert others == ["digits_resnet-9_1-min_lr-0.4", "digits_timm_4-min_lr-0.003"]
    assert [e["minutes"] for e in found["sets"]["digits"] if e["contender"] == "timm"][-1] == 4


def test_peers_are_chosen_by_name():
    entries = AccuracySettings(set=("digits",), peers=("resnet-9",)).entries()
    assert {e.contender for e in entries} == {"vitrail", "vitrail, plain ViT", "resnet-9"}
    with pytest.raises(UserError, match="unknown peer 'keras'; choose from tutorial"):
        AccuracySettings(peers=("keras",))
    with pytest.raises(UserError, match="`times` has 0; every number must be greater"):
        AccuracySettings(times=(0, 2))
    with pytest.raises(UserError, match="at least one of published, best and all"):
        AccuracySettings(rates=())


def test_the_convnet_has_the_published_size_and_learns(fast_clock):
    found = train_peer_model(PeerJob(data="digits", peer="resnet-9", minutes=1, lr=0.4))
    assert found["published"] and not found["diverged"]
    model = ResNet9(ViTConfig(classes=10))
    assert sum(parameter.numel() for parameter in model.parameters()) == 412_944
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("units", [True, False])
def test_the_convnet_trains_in_the_precision_of_our_models(fast_clock, monkeypatch, units):
    """And is evaluated in float32, as ours."""
    monkeypatch.setattr(learner, "has_bfloat16_units", lambda: units)
    seen = set()

    def build(config):
        model = ResNet9(config)
        first = model.layers[0].conv
        first.register_forward_hook(lambda m, x, y: seen.add((m.training, y.dtype)))
        return model

    monkeypatch.setitem(train_peer.MODELS, "resnet-9", build)
    job = PeerJob(data="digits", peer="resnet-9", minutes=0.5, lr=0.01)
    precision = train_peer_model(job)["precision"]
    assert precision == ("bfloat16" if units else "float32")
    assert seen == {(True, getattr(torch, precision)), (False, torch.float32)}
    assert train_peer.choose_dtype("timm") == torch.float32


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
