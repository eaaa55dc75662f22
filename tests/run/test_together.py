"""A run that several processes share: one folder, one voice, each image once."""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from tests.run.conftest import SMALL, UNKEPT, tensors
from tests.training.ranks import ranks
from vitrail.data.loader import Loader
from vitrail.data.open import open_data
from vitrail.data.source import indices
from vitrail.errors import UserError
from vitrail.run import predictions, run
from vitrail.run.drive import Driver, Stopped
from vitrail.run.journal import read_journal
from vitrail.run.recipe import merge
from vitrail.training import checkpoint, distributed
from vitrail.training.learner import Learner

CALM = {"data": {"augment": {"mixup": 0.0}}}

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a test")  # whose processes all have one parent


def train(folder, changes=SMALL, happening=lambda rank: None):
    """What each process does; `happening` comes before."""

    def work(rank):
        happening(rank)
        options = {"report": False, "quiet": True, "timeout": 20}
        done = run.train("digits", out=folder, changes=changes, **options)
        return done.metrics, done.first

    return work


def joined_once(world, work):
    """`work` joins the others by itself."""
    return ranks(world, work, join=False)


def at_step(number, what):
    """Does `what(driver)` at rank 1 after that step."""

    def happening(rank):
        note = Driver.note

        def noting(self, step):
            note(self, step)
            if step.number == number and rank == 1:
                what(self)

        Driver.note = noting

    return happening


def killed(driver):
    os.kill(os.getpid(), signal.SIGKILL)


def terminated(driver):
    os.kill(os.getpid(), signal.SIGTERM)


def same(one, other):
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def check_each_image_once(folder, world):
    found = joined_once(world, train(folder))
    assert [first for _, first in found] == [True] + [False] * (world - 1)
    assert all(metrics == found[0][0] for metrics, _ in found)
    source, seen = open_data("digits"), predictions.read(folder)
    for split in ("val", "test"):
        assert seen.splits[split].items.tolist() == indices(source, split).tolist()
        assert found[0][0][split]["accuracy"] == seen.splits[split].accuracy


def test_evaluation_counts_each_image_once_and_only_the_first_speaks(tmp_path):
    check_each_image_once(tmp_path / "run", 3)


def test_an_evaluation_that_is_not_shared_would_be_noticed(tmp_path, monkeypatch):
    share = Loader.share
    monkeypatch.setattr(Loader, "share", lambda self, *split: share(self.alone(), *split))
    with pytest.raises(AssertionError):
        check_each_image_once(tmp_path / "run", 3)


def check_same_weights(folder, world, digits, optimizer="muon", lr=1e-2):
    changes = merge(SMALL, CALM)
    changes = merge(changes, {"train": {"steps": 10, "optimizer": optimizer, "lr": lr}})
    one = digits("one", changes=changes).folder
    found = joined_once(world, train(folder, changes))
    assert not [error for error in found if isinstance(error, BaseException)], found
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, one))
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-5
    losses = [
        [line["loss"] for line in read_journal(path / "log.jsonl") if line["kind"] == "step"]
        for path in (folder, one)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize(("world", "optimizer", "lr"), [(2, "muon", 1e-2), (3, "adamw", 1e-3)])
def test_ten_steps_of_several_processes_are_ten_of_one(tmp_path, digits, world, optimizer, lr):
    check_same_weights(tmp_path / "many", world, digits, optimizer, lr)


def test_a_batch_that_is_not_shared_would_be_noticed(tmp_path, digits, monkeypatch):
    plan = Loader._plan

    def first_part(self, start):
        self.rank = 0
        return plan(self, start)

    monkeypatch.setattr(Loader, "_plan", first_part)
    with pytest.raises(AssertionError):
        check_same_weights(tmp_path / "many", 2, digits)


def begin_again(folder, whole, happening=lambda rank: None):
    """One of three processes dies at step 17; the same command is started a second time."""
    lost = joined_once(3, train(folder, happening=at_step(17, killed)))
    assert lost[1] is None and all(isinstance(lost[rank], distributed.Lost) for rank in (0, 2))
    found = joined_once(3, train(folder, happening=happening))
    assert found[0][0]["steps"] == 30, found
    assert same(folder, whole)


@pytest.fixture
def whole(tmp_path):
    folder = tmp_path / "whole"
    assert joined_once(3, train(folder))[0][1]
    return folder


def test_what_a_second_attempt_goes_on_with_ends_as_if_nobody_had_died(tmp_path, whole):
    begin_again(tmp_path / "part", whole)


def forget(rank):
    Learner.restore = lambda self, tensors: None


def start_over(rank):
    training = Loader.training
    Loader.training = lambda self, *of: training(self)


@pytest.mark.parametrize("broken", [forget, start_over])
def test_a_second_attempt_that_forgets_would_be_noticed(tmp_path, whole, broken):
    with pytest.raises(AssertionError):
        begin_again(tmp_path / "part", whole, broken)


def test_a_run_of_another_launch_is_refused(tmp_path, digits, monkeypatch):
    done = digits()
    found = joined_once(2, train(done.folder))
    assert isinstance(found[0], UserError) and "holds a run; go on with" in str(found[0])
    assert isinstance(found[1], distributed.Lost)


def test_a_signal_to_one_stops_all_and_one_saves(tmp_path):
    found = joined_once(3, train(tmp_path / "run", happening=at_step(9, terminated)))
    assert [type(one) for one in found] == [Stopped] * 3
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000009"]


def test_a_run_of_one_process_goes_on_with_two(tmp_path, digits, stop_at, monkeypatch, capfd):
    with monkeypatch.context():
        stop_at(9)
        with pytest.raises(Stopped):
            digits("run")
    monkeypatch.undo()

    def work(rank):
        return run.resume(tmp_path / "run", report=False, timeout=20).metrics["steps"]

    assert joined_once(2, work) == [30, 30]
    lines = capfd.readouterr().err
    assert lines.count("going on from step 9 of 30") == 1
    assert "saved with processes 1, going on with 2: the last bits may differ" in lines
    assert checkpoint.load(tmp_path / "run" / "checkpoints").step == 30


def test_a_broken_image_of_one_is_no_loss_for_all(photos, tmp_path):
    def train(folder):
        def work(rank):
            options = {"report": False, "quiet": True, "timeout": 20}
            return run.train(photos, out=folder, changes=UNKEPT, **options).metrics["val"]

        return work

    whole = joined_once(2, train(tmp_path / "whole"))
    picture = photos / "val" / "light" / "0.png"  # rank 1 looks at it
    content = picture.read_bytes()
    picture.write_bytes(bytes(len(content)))
    found = joined_once(2, train(tmp_path / "part"))
    assert isinstance(found[0], distributed.Lost) and "light/0.png" in str(found[1])
    assert checkpoint.load(tmp_path / "part" / "checkpoints").step == 12
    picture.write_bytes(content)
    assert joined_once(2, train(tmp_path / "part")) == whole  # started again by the same torchrun
    assert same(tmp_path / "whole", tmp_path / "part")


def test_data_that_differ_between_processes_are_told(tmp_path, monkeypatch):
    def happening(rank):
        if rank == 1:
            monkeypatch.setattr(run, "fingerprint", lambda source: "another")

    found = joined_once(2, train(tmp_path / "run", happening=happening))
    assert "digits at rank 1 is not what rank 0 has" in str(found[1])
    assert not (tmp_path / "run").exists()
