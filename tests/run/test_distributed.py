"""A run of several processes: one folder, one set of messages, each image once."""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore

import vitrail
from tests.run.conftest import SMALL, UNCACHED, tensors
from tests.run.test_pretrain import TINY
from tests.training.ranks import ranks
from vitrail.data.loader import Loader
from vitrail.data.open import open_data
from vitrail.data.source import split_indices
from vitrail.errors import UserError
from vitrail.run.drive import Driver, Stopped
from vitrail.run.recipe import merge_settings
from vitrail.run.storage import predictions
from vitrail.run.storage.journal import read_journal
from vitrail.training import checkpoint, distributed
from vitrail.training.learner import Learner

NO_MIXUP = {"data": {"augment": {"mixup": 0.0}}}

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def torchrun(monkeypatch):
    """A store that outlives the processes, as torchrun's does."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr("tests.training.ranks.free_port", lambda: store.port)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)
    return store


def train(folder, settings=SMALL, happening=lambda rank: None):
    """What each process does; `happening` is called before."""

    def work(rank):
        happening(rank)
        options = {"report": False, "quiet": True, "timeout": 20}
        done = vitrail.train("digits", out=folder, settings=settings, **options)
        return done.metrics, done.is_leader

    return work


def run_ranks(world, work):
    """`work` joins the others by itself."""
    return ranks(world, work, join=False)


def at_step(number, what):
    """Does `what(driver)` at rank 1 after that step."""

    def happening(rank):
        record = Driver.record_step

        def recording(self, step):
            record(self, step)
            if step.number == number and rank == 1:
                what(self)

        Driver.record_step = recording

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
    found = run_ranks(world, train(folder))
    assert [first for _, first in found] == [True] + [False] * (world - 1)
    assert all(metrics == found[0][0] for metrics, _ in found)
    source, seen = open_data("digits"), predictions.load_predictions(folder)
    for split in ("val", "test"):
        assert seen.splits[split].items.tolist() == split_indices(source, split).tolist()
        assert found[0][0][split]["accuracy"] == seen.splits[split].accuracy


def test_evaluation_counts_each_image_once_and_there_is_one_leader(tmp_path):
    check_each_image_once(tmp_path / "run", 3)


def test_an_evaluation_that_is_not_shared_would_be_noticed(tmp_path, monkeypatch):
    share = Loader.rank_items
    monkeypatch.setattr(
        Loader, "rank_items", lambda self, *split: share(self.as_single_process(), *split)
    )
    with pytest.raises(AssertionError):
        check_each_image_once(tmp_path / "run", 3)


def check_same_weights(folder, world, digits, optimizer="muon", lr=1e-2):
    changes = merge_settings(SMALL, NO_MIXUP)
    train_changes = {"steps": 10, "optimizer": optimizer, "lr": lr, "precision": "float32"}
    changes = merge_settings(changes, {"train": train_changes})
    one = digits("one", settings=changes).folder
    found = run_ranks(world, train(folder, changes))
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
    lost = run_ranks(3, train(folder, happening=at_step(17, killed)))
    assert lost[1] is None and all(isinstance(lost[rank], distributed.PeerLost) for rank in (0, 2))
    found = run_ranks(3, train(folder, happening=happening))
    assert found[0][0]["steps"] == 30, found
    assert same(folder, whole)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.run.plan.TRIAL", 0.0)
        assert run_ranks(3, train(folder))[0][1]
    return folder


def test_a_restarted_run_ends_as_if_no_process_had_died(tmp_path, whole):
    begin_again(tmp_path / "part", whole)


def forget(rank):
    Learner.restore = lambda self, tensors: None


def start_over(rank):
    training = Loader.training
    Loader.training = lambda self, *of: training(self)


@pytest.mark.parametrize("broken", [forget, pytest.param(start_over, marks=pytest.mark.full)])
def test_a_second_attempt_that_forgets_would_be_noticed(tmp_path, whole, broken):
    with pytest.raises(AssertionError):
        begin_again(tmp_path / "part", whole, broken)


def test_a_run_of_another_launch_is_refused(tmp_path, digits, monkeypatch):
    done = digits()
    found = run_ranks(2, train(done.folder))
    assert isinstance(found[0], UserError) and "already contains a run; resume it with" in str(
        found[0]
    )
    assert isinstance(found[1], distributed.PeerLost)


@pytest.mark.full
@pytest.mark.parametrize("method", ["masked", "views"])
def test_a_pretraining_of_two_processes_resumes_to_the_bit(tmp_path, method):
    def pretrain(folder, happening=lambda rank: None):
        def work(rank):
            happening(rank)
            options = {"report": False, "quiet": True, "timeout": 20, "method": method}
            run = vitrail.pretrain("digits", out=folder, settings=TINY, **options)
            return run.metrics["steps"], run.metrics["probe"]

        return work

    whole = run_ranks(2, pretrain(tmp_path / "whole"))
    assert whole[0] == whole[1] and whole[0][0] == 30
    lost = run_ranks(2, pretrain(tmp_path / "part", at_step(17, killed)))
    assert lost[1] is None and isinstance(lost[0], distributed.PeerLost)
    assert run_ranks(2, pretrain(tmp_path / "part")) == whole  # restarted by the same torchrun
    assert same(tmp_path / "whole", tmp_path / "part")


def test_a_signal_to_one_stops_all_and_one_saves(tmp_path):
    found = run_ranks(3, train(tmp_path / "run", happening=at_step(9, terminated)))
    assert [type(one) for one in found] == [Stopped] * 3
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000009"]


def test_a_run_of_two_processes_resumes_with_one_to_the_bit(tmp_path, monkeypatch):
    folder, loaded, drive = tmp_path / "run", {}, Driver.drive
    run_ranks(2, train(folder, happening=at_step(9, terminated)))
    saved = checkpoint.load_checkpoint(folder / "checkpoints")

    def record(self):
        tensors = self.learner.tensors()
        loaded.update({name: tensor.clone() for name, tensor in tensors.items()})
        return drive(self)

    monkeypatch.setattr(Driver, "drive", record)
    assert vitrail.resume(folder, report=False, quiet=True).metrics["steps"] == 30
    assert saved.step == 9 and loaded.keys() == saved.tensors.keys()
    assert any(name.startswith("optimizer/") for name in loaded)
    assert all(torch.equal(loaded[name], saved.tensors[name]) for name in loaded)


def test_a_run_of_one_process_resumes_with_two(tmp_path, digits, stop_at, monkeypatch, capfd):
    with monkeypatch.context():
        stop_at(9)
        with pytest.raises(Stopped):
            digits("run")
    monkeypatch.undo()

    def work(rank):
        return vitrail.resume(tmp_path / "run", report=False, timeout=20).metrics["steps"]

    assert run_ranks(2, work) == [30, 30]
    lines = capfd.readouterr().err
    assert lines.count("resuming from step 9 of 30") == 1
    assert "saved with processes 1, resumed with 2: weights, optimizer and batches" in lines
    assert checkpoint.load_checkpoint(tmp_path / "run" / "checkpoints").step == 30


def test_a_broken_image_on_one_rank_loses_no_step(photos, tmp_path):
    def train(folder):
        def work(rank):
            options = {"report": False, "quiet": True, "timeout": 20}
            return vitrail.train(photos, out=folder, settings=UNCACHED, **options).metrics["val"]

        return work

    whole = run_ranks(2, train(tmp_path / "whole"))
    picture = photos / "val" / "light" / "0.png"  # rank 1 evaluates it
    content = picture.read_bytes()
    picture.write_bytes(bytes(len(content)))
    found = run_ranks(2, train(tmp_path / "part"))
    assert isinstance(found[0], distributed.PeerLost) and "light/0.png" in str(found[1])
    assert checkpoint.load_checkpoint(tmp_path / "part" / "checkpoints").step == 12
    picture.write_bytes(content)
    assert run_ranks(2, train(tmp_path / "part")) == whole  # restarted by the same torchrun
    assert same(tmp_path / "whole", tmp_path / "part")


def test_data_that_differ_between_ranks_are_reported(tmp_path, monkeypatch):
    def happening(rank):
        if rank == 1:
            monkeypatch.setattr("vitrail.run.dataset.fingerprint", lambda source: "another")

    found = run_ranks(2, train(tmp_path / "run", happening=happening))
    assert "digits on rank 1 differs from that on rank 0" in str(found[1])
    assert not (tmp_path / "run").exists()
