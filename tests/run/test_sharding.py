"""A sharded training: the same weights as one process has, in as many files as there are ranks."""

import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore

import vitrail
from tests.run.conftest import SMALL
from tests.run.test_distributed import NO_MIXUP, at_step, killed, run_ranks, terminated, train
from tests.training.ranks import ranks
from vitrail.errors import UserError
from vitrail.pretraining.config import JointConfig, PretrainConfig
from vitrail.run import sharding
from vitrail.run.build import make_learner
from vitrail.run.devices import known_device
from vitrail.run.drive import Driver, Stopped
from vitrail.run.forecast import Cluster, predict_memory
from vitrail.run.recipe import Recipe, merge_settings
from vitrail.run.sharding import choose_sharding
from vitrail.training import checkpoint
from vitrail.training.config import TrainConfig
from vitrail.training.distributed import SINGLE, PeerLost
from vitrail.training.loop import train_steps
from vitrail.training.optim import Muon
from vitrail.training.sharding import gather_model, rank_rows

CPU = torch.device("cpu")
STEPS, BATCH = 10, 12
FULL = merge_settings(SMALL, {"train": {"shard": "full"}})


@pytest.fixture(scope="module", autouse=True)
def torchrun():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.training.ranks.free_port", lambda: store.port)
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        patch.setattr("vitrail.run.plan.TRIAL", 0.0)
        yield


def make_recipe(**train):
    vit = vitrail.preset("Pico/2", image=8, width=18, heads=3, depth=2, classes=5)
    config = {"batch": BATCH, "ema": 0.9, "clip": 0.5, "shard": "full", "precision": "float32"}
    config |= train
    return Recipe(vit=vit, train=TrainConfig(**config))


def shares(world):
    """This rank's part of batches that are functions of their number."""
    first, last = (BATCH * (world.rank + end) // world.size for end in (0, 1))
    number = 0
    while True:
        random = torch.Generator().manual_seed(number)
        images = torch.randn(BATCH, 3, 8, 8, generator=random)
        yield images[first:last], torch.randint(5, (BATCH,), generator=random)[first:last]
        number += 1


def final_weights(world, recipe):
    """All weights and averaged weights after ten steps, and the losses, on the leader."""
    learner = make_learner(recipe, CPU, world)
    assert learner.sharded == (world.size > 1 and recipe.train.shard == "full")
    steps = list(train_steps(learner, shares(world), recipe.train, STEPS, world=world))
    found = []
    for model in (learner.model, learner.eval_model):
        whole = gather_model(model, world) if learner.sharded else dict(model.named_parameters())
        found += [tensor.detach().flatten() for tensor in whole.values()]
    losses = torch.tensor([step.loss for step in steps])
    return torch.cat([*found, losses]).numpy()


def check_equal(size, most=1e-5, **train):
    recipe = make_recipe(**train)
    one = final_weights(SINGLE, recipe)
    many = ranks(size, partial(final_weights, recipe=recipe))
    assert isinstance(many[0], np.ndarray), many
    assert abs(many[0] - one).max() < most


@pytest.mark.parametrize(
    ("size", "train"),
    [
        (2, {"optimizer": "muon", "lr": 1e-2}),
        (3, {"optimizer": "muon", "lr": 1e-2, "recompute": True}),
        (3, {"accumulate": 2}),
    ],
    ids=str,
)
def test_ten_sharded_steps_are_ten_of_one_process(size, train):
    check_equal(size, **train)


def test_bfloat16_is_computed_in_the_blocks():
    check_equal(2, precision="bfloat16", most=0.02)


def local_orthogonalization(monkeypatch):
    monkeypatch.setattr(
        "vitrail.training.sharding.MatrixExchange.__call__",
        lambda self, parameters, updates, function: function([*updates]),
    )


def unmasked_key_biases(monkeypatch):
    monkeypatch.setattr("vitrail.run.build.key_bias_mask", lambda n, device: torch.ones(n))


def local_norm(monkeypatch):
    monkeypatch.setattr("vitrail.training.loop.math.sqrt", lambda x: (x / 2) ** 0.5)


def rows_of_another_rank(monkeypatch):
    monkeypatch.setattr(
        "vitrail.training.sharding.rank_rows", lambda n, rank, size: rank_rows(n, 0, size)
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "broken", [local_orthogonalization, unmasked_key_biases, local_norm, rows_of_another_rank]
)
def test_a_broken_shard_would_be_noticed(broken, monkeypatch):
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        check_equal(2, optimizer="muon", lr=1e-2)


def test_a_sharded_run_saves_an_ordinary_model(tmp_path, digits):
    changes = merge_settings(FULL, NO_MIXUP)
    changes = merge_settings(changes, {"train": {"steps": 10, "precision": "float32"}})
    one = digits("one", settings=changes).folder
    found = run_ranks(3, train(tmp_path / "many", changes))
    assert not [error for error in found if isinstance(error, BaseException)], found
    assert all(metrics == found[0][0] for metrics, _ in found)
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "many", one))
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-5
    newest = tmp_path / "many" / "checkpoints" / "step-00000010"
    assert sorted(path.name for path in newest.iterdir()) == [
        "manifest.json",
        "progress.json",
        *(f"rank-0000{rank}-of-00003.safetensors" for rank in range(3)),
    ]


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped") / "run"
    found = run_ranks(2, train(folder, FULL, at_step(9, terminated)))
    assert [type(one) for one in found] == [Stopped] * 2, found
    return folder


@pytest.fixture
def stopped(stopped_once, tmp_path):
    """A sharded run of two processes that was stopped after step 9."""
    return shutil.copytree(stopped_once, tmp_path / "run")


def resume_from(folder, shard=None):
    """Resumes, and returns whether each rank has loaded every bit of its part."""
    saved = checkpoint.load_checkpoint(folder / "checkpoints")

    def work(rank):
        equal, drive = [], Driver.drive

        def record(self):
            world, found = self.world, self.learner.tensors()
            assert found.keys() == saved.tensors.keys()
            for name, whole in saved.tensors.items():
                if self.learner.holds_rows(name, whole.shape):
                    whole = whole[rank_rows(len(whole), world.rank, world.size)]
                equal.append(torch.equal(found[name], whole))
            equal.append(any(name.startswith("optimizer/exp_avg") for name in found))
            equal.append(any(name.startswith("average/") for name in found))
            return drive(self)

        Driver.drive = record
        try:
            run = vitrail.resume(folder, report=False, quiet=True, timeout=60, shard=shard)
        finally:
            Driver.drive = drive
        return run.metrics["steps"], all(equal)

    return work


@pytest.mark.parametrize(
    ("size", "shard"),
    [
        pytest.param(1, None),
        pytest.param(3, None),
        pytest.param(2, "off", marks=pytest.mark.full),
    ],
)
def test_a_sharded_run_resumes_with_any_number_of_processes(stopped, size, shard):
    work = resume_from(stopped, shard)
    assert (run_ranks(size, work) if size > 1 else [work(0)]) == [(30, True)] * size


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_was_not_sharded_resumes_sharded(tmp_path, size, digits, stop_at, monkeypatch):
    folder = tmp_path / "run"
    if size == 1:
        with monkeypatch.context():
            stop_at(9)
            with pytest.raises(Stopped):
                digits("run")
        monkeypatch.setattr(Driver, "record_step", Driver.record_step)
    else:
        run_ranks(2, train(folder, SMALL, at_step(9, terminated)))
    assert run_ranks(2, resume_from(folder, "full")) == [(30, True)] * 2


def test_a_sharded_run_resumes_to_the_bit(stopped, tmp_path):
    run_ranks(2, train(tmp_path / "whole", FULL))
    assert run_ranks(2, resume_from(stopped)) == [(30, True)] * 2
    whole, part = (
        load_file(folder / "model.safetensors")
        | checkpoint.load_checkpoint(folder / "checkpoints").tensors
        for folder in (tmp_path / "whole", stopped)
    )
    assert whole.keys() == part.keys()
    assert all(torch.equal(whole[name], part[name]) for name in whole)


def save_parts(world, folder, step):
    rows = torch.arange(5.0)[rank_rows(5, world.rank, world.size)] + step
    tensors = {"weight": rows} | ({"count": torch.tensor(7.0)} if world.is_leader else {})
    checkpoint.save_checkpoint(folder, step, tensors, {"step": step}, world)


def test_files_of_ranks_are_one_checkpoint(tmp_path):
    ranks(3, lambda world: save_parts(world, tmp_path / "checkpoints", 4))
    found = checkpoint.load_checkpoint(tmp_path / "checkpoints")
    assert (found.step, found.progress) == (4, {"step": 4})
    assert found.tensors["weight"].tolist() == [4, 5, 6, 7, 8]
    assert found.tensors["count"] == 7
    for start in range(6):
        for stop in range(start, 6):
            some = checkpoint.read_parts(
                found.path, lambda name, shape, rows=slice(start, stop): rows
            )
            assert some["weight"].tolist() == list(range(4 + start, 4 + stop))


def remove(path):
    path.unlink()


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [(remove, "is incomplete: {} is missing"), (flip, "is damaged: {} differs")],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_file_of_one_rank_costs_one_checkpoint(tmp_path, damage, message, rank):
    folder = tmp_path / "checkpoints"
    ranks(2, lambda world: [save_parts(world, folder, step) for step in (1, 2)])
    name = f"rank-0000{rank}-of-00002.safetensors"
    damage(folder / "step-00000002" / name)
    found = checkpoint.load_checkpoint(folder)
    assert found.step == 1
    assert message.format(name) in found.warnings[0]


def test_a_full_disk_of_one_rank_keeps_the_older_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"

    def work(world):
        save_parts(world, folder, 1)
        if world.rank == 1:

            def full(path, tensors):
                raise OSError(28, "No space left on device")

            checkpoint.write_tensors = full
        save_parts(world, folder, 2)

    for error in ranks(2, work):
        assert "cannot save step 2" in str(error) and "No space left" in str(error)
    assert checkpoint.load_checkpoint(folder).step == 1
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]


def test_a_rank_that_cannot_see_the_run_folder_says_so(tmp_path):
    def work(world):
        if world.rank == 1:
            checkpoint.Path.is_dir = lambda self: False
        save_parts(world, tmp_path / "checkpoints", 1)

    for error in ranks(2, work):
        assert "rank 1 cannot see" in str(error)


def test_a_process_that_dies_leaves_the_others_a_message(tmp_path):
    found = run_ranks(2, train(tmp_path / "run", FULL, at_step(5, killed)))
    assert found[1] is None and isinstance(found[0], PeerLost), found
    assert "another of the 2 processes ended" in str(found[0])


def with_memory(monkeypatch, gigabytes):
    device = replace(known_device("T4"), memory=gigabytes * 1e9)
    monkeypatch.setattr(sharding, "describe_device", lambda *of: device)


def large_recipe(**train):
    vit = vitrail.preset("H/14", image=224, classes=10)
    return Recipe(vit=vit, train=TrainConfig(**{"batch": 64, **train}))


@pytest.mark.parametrize(
    ("gigabytes", "shard", "recompute", "reason"),
    [
        (80, "off", False, "sharding off: a training of 34.3 GB per process fits into 72.0 GB"),
        (36, "full", False, "sharding full: 34.3 GB per process does not fit into 32.4 GB; "),
        (20, "full", True, "; activations are recomputed, as they would not fit either; "),
    ],
)
def test_memory_decides_whether_to_shard(monkeypatch, gigabytes, shard, recompute, reason):
    with_memory(monkeypatch, gigabytes)
    recipe, reasons = choose_sharding(large_recipe(), CPU, 2)
    assert (recipe.train.shard, recipe.train.recompute) == (shard, recompute), reasons
    assert reason in reasons[0]


def test_one_process_is_not_sharded_and_says_so():
    recipe, reasons = choose_sharding(make_recipe(), CPU, 1)
    assert recipe.train.shard == "full" and "needs two processes or more" in reasons[0]
    assert choose_sharding(make_recipe(shard="auto"), CPU, 1)[1] == []


@pytest.mark.parametrize(
    ("train", "processes", "message"),
    [
        ({"precision": "float16"}, 2, "set `train.precision` to bfloat16"),
        ({"compile": True}, 2, "set `train.compile` to false"),
        ({}, 19, "19 processes cannot share matrices of 18 rows; start at most 18"),
        ({"accumulate": 8}, 2, "lower `train.accumulate`"),
        ({"frozen": 1}, 2, "set `tune` to all"),
    ],
    ids=str,
)
def test_what_cannot_be_sharded_is_refused(train, processes, message, monkeypatch):
    with pytest.raises(UserError, match=message) as caught:
        choose_sharding(make_recipe(**train), CPU, processes)
    assert str(caught.value).endswith(", or set `train.shard` off")
    with_memory(monkeypatch, 0.0)
    recipe, reasons = choose_sharding(make_recipe(**train, shard="auto"), CPU, processes)
    assert recipe.train.shard == "off" and message in reasons[0]


def test_a_pretraining_is_not_sharded():
    with pytest.raises(UserError, match="a pretraining cannot be sharded"):
        choose_sharding(replace(make_recipe(), pretrain=PretrainConfig()), CPU, 2)


def test_a_training_with_images_without_labels_is_not_sharded():
    with pytest.raises(UserError, match=r"set `joint.ratio` to 0"):
        choose_sharding(replace(make_recipe(), joint=JointConfig()), CPU, 2)


def test_a_linear_probe_is_left_out_with_its_reason(monkeypatch):
    with_memory(monkeypatch, 1.0)
    recipe, reasons = choose_sharding(make_recipe(probe=100), CPU, 2)
    assert recipe.train.probe == 0 and "starts from zeros" in reasons[1]


@pytest.mark.full
@pytest.mark.parametrize("name", ["H/14", "G/14"])
def test_a_large_block_trains_a_step_in_the_predicted_memory(name):
    vit = vitrail.preset(name, image=42, depth=1, classes=10)
    train = TrainConfig(batch=2, optimizer="muon", ema=0.9, shard="full", lr=1e-3)
    recipe = Recipe(vit=vit, train=train)

    def work(world):
        learner = make_learner(recipe, CPU, world)
        images = torch.randn(1, 3, 42, 42)
        steps = list(train_steps(learner, [(images, torch.tensor([1]))], train, 1, world=world))
        assert np.isfinite(steps[0].loss) and steps[0].gradient_norm > 0
        kinds = {"weights": 0, "gradients": 0, "optimizer": 0}
        for key, tensor in learner.tensors().items():
            kinds["weights" if key.startswith("model/") else "optimizer"] += tensor.nbytes
        kinds["gradients"] = sum(p.grad.to_local().nbytes for p in learner.model.parameters())
        return kinds

    found = ranks(2, work, timeout=120)
    cluster = Cluster(device=known_device("H100"), count=2, rate=1.0)
    predicted = predict_memory(recipe, cluster, 4, "full")
    for kinds in found:
        assert isinstance(kinds, dict), found
        assert kinds["optimizer"] == pytest.approx(predicted.optimizer, rel=0.02)
        assert kinds["weights"] < predicted.weights  # which adds what is gathered
        assert kinds["gradients"] < predicted.gradients
    assert Muon.exchange is None
