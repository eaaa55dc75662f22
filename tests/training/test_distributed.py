"""Many processes end where one does."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.training.ranks import ranks
from tests.training.tiny import CLASSES, Tiny, batches
from vitrail.errors import UserError
from vitrail.training.config import TrainConfig
from vitrail.training.distributed import SINGLE, PeerLost, World, join_world
from vitrail.training.learner import Learner
from vitrail.training.loop import train_steps

STEPS, BATCH = 10, 8
CONFIG = TrainConfig(batch=BATCH, lr=1e-3, warmup=0.2, ema=0.9, smoothing=0.1, precision="float32")


def shares(world: World, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """This process's part of every batch."""
    first, last = (BATCH * (world.rank + end) // world.size for end in (0, 1))
    for images, labels in batches(size=BATCH):
        yield images[first:last].to(dtype), labels[first:last]


def learner(dtype: torch.dtype, config: TrainConfig) -> Learner:
    torch.manual_seed(0)
    model = Tiny()
    model.mlp[2].p = 0.0  # chance is another one in each process
    # a bias of keys changes no attention: its gradient is rounding errors, which Adam blows up
    model.qkv.bias = None
    return Learner(model.to(dtype), config)


def weights(world: World, dtype: torch.dtype, config: TrainConfig) -> np.ndarray:
    """All of them, and the averaged ones, after ten steps; then the losses."""
    model = learner(dtype, config)
    steps = list(train_steps(model, shares(world, dtype), config, STEPS, world=world))
    found = [t.flatten() for name, t in model.tensors().items() if not name.startswith("opt")]
    return torch.cat([*found, torch.tensor([step.loss for step in steps])]).numpy()


def check_equal(world: int, dtype: torch.dtype, config: TrainConfig = CONFIG) -> None:
    one = weights(SINGLE, dtype, config)
    many = ranks(world, partial(weights, dtype=dtype, config=config))
    most = {torch.float32: 1e-5, torch.float64: 1e-10}[dtype]
    for found in many:
        assert isinstance(found, np.ndarray), found
        assert np.array_equal(found, many[0]), "the processes differ"
        # the losses are told in single precision
        assert abs(found - one)[:-STEPS].max() < most and abs(found - one)[-STEPS:].max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_processes_with_the_same_batch_end_with_the_weights_of_one(world, dtype):
    check_equal(world, dtype)


def test_parts_of_shares_that_differ_add_up_to_the_batch():
    check_equal(3, torch.float64, TrainConfig(batch=BATCH, lr=0.01, accumulate=3))


def same_share_for_all(monkeypatch):
    deal = shares

    def wrong(world, dtype):
        return deal(replace(world, rank=0), dtype)

    monkeypatch.setitem(globals(), "shares", wrong)


def not_synced(monkeypatch):
    monkeypatch.setattr(World, "wrap_model", lambda self, model, images: model)


def scaled_by_the_own_share(monkeypatch):
    add = World.all_reduce

    def wrong(self, *numbers):
        count, *rest = add(self, *numbers)
        return [numbers[0] * self.size if numbers[0] == int(numbers[0]) else count, *rest]

    monkeypatch.setattr(World, "all_reduce", wrong)


@pytest.mark.parametrize("broken", [same_share_for_all, not_synced, scaled_by_the_own_share])
def test_processes_that_do_not_share_would_be_noticed(broken, monkeypatch):
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        check_equal(3, torch.float64)


class Wide(torch.nn.Module):
    """Many parameters of many sizes, used in another order than they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(33, CLASSES)
        self.parts = torch.nn.ModuleList([torch.nn.Linear(24, 33) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        parts = [part(x.flatten(1)).tanh() for part in self.parts]
        found: Tensor = self.last(torch.stack(parts).sum(dim=0))
        return found


def stopped_equals_whole(world: World) -> bool:
    config = TrainConfig(batch=BATCH, lr=0.01)

    def fresh() -> Learner:
        torch.manual_seed(0)
        return Learner(Wide(), config)

    def go(model: Learner, start: int, total: int) -> None:
        seen = shares(world, torch.float32)
        for _ in range(start):
            next(seen)
        options = {"start": start, "world": world}
        for step in train_steps(model, seen, config, 20, **options):
            if step.number == total:
                return

    whole, part, rest = fresh(), fresh(), fresh()
    go(whole, 0, 20)
    go(part, 0, 7)
    rest.restore(part.tensors())
    go(rest, 7, 20)
    ours, theirs = rest.tensors(), whole.tensors()
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_three_processes_that_stop_and_go_on_keep_every_bit():
    assert ranks(3, stopped_equals_whole) == [True] * 3


def test_gradients_in_packs_of_a_changing_order_would_be_noticed(monkeypatch):
    def unsettled(self, model, images):
        return torch.nn.parallel.DistributedDataParallel(model)

    monkeypatch.setattr(World, "wrap_model", unsettled)
    assert ranks(3, stopped_equals_whole) == [False] * 3


def test_all_end_before_the_step_that_follows_a_signal_to_one():
    def hears(world):
        heard, steps = [], 0
        options = {"world": world, "stop": heard}
        for _ in train_steps(
            learner(torch.float32, CONFIG), shares(world, torch.float32), CONFIG, 9, **options
        ):
            steps += 1
            if world.rank == 1 and steps == 4:
                heard.append(signal.SIGTERM)
        return steps

    assert ranks(3, hears) == [4, 4, 4]


def test_what_the_first_says_all_know():
    def tells(world):
        return world.broadcast({"rank": world.rank, "best": None, "loss": 0.1})

    assert ranks(3, tells) == [{"rank": 0, "best": None, "loss": 0.1}] * 3


def test_tensors_of_the_first_come_to_all_with_every_bit():
    def hands(world):
        mine = {"a": torch.tensor([1 / 3, float("nan")]), "step": torch.tensor(7)}
        found = world.broadcast_tensors(mine if world.is_leader else {})
        return {name: (str(t.dtype), t.numpy().tobytes()) for name, t in found.items()}

    first, *others = ranks(3, hands)
    assert set(first) == {"a", "step"} and all(other == first for other in others)


def test_statistics_of_batch_norms_are_averaged_over_all_processes():
    def averages(world):
        model = torch.nn.BatchNorm1d(2)
        model.running_mean.fill_(world.rank)
        world.average_buffers(model)
        return [*model.running_mean.tolist(), *model.running_var.tolist()]

    assert ranks(3, averages) == [[1, 1, 1, 1]] * 3


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 11])
def test_gathered_rows_come_once_and_in_their_order(count):
    def deals(world):
        rows = world.gather(torch.arange(count)[world.rank :: world.size])
        return rows if rows is None else rows.tolist()

    assert ranks(3, deals) == [list(range(count)), None, None]


@pytest.mark.slow
def test_a_process_that_hangs_is_named_after_the_timeout():
    def hangs(world):
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        world.all_reduce(1)

    first, _, last = ranks(3, hangs, timeout=2)
    for found in (first, last):
        assert isinstance(found, PeerLost)
    told = [str(found) for found in (first, last)]
    assert any("rank 1 of 3 did not respond for 2 seconds" in line for line in told), told


def test_a_leader_may_work_alone_for_longer_than_the_timeout():
    def waits(world):
        def work():
            time.sleep(4.5)
            return world.rank

        return [world.on_slow_leader(work), world.on_slow_leader(lambda: 7)]

    assert ranks(2, waits, timeout=3) == [[0, 7]] * 2


def test_a_process_that_dies_is_told_at_once():
    def dies(world):
        if world.rank == 1:
            os._exit(1)
        world.all_reduce(1)
        world.all_reduce(1)

    found = ranks(2, dies, timeout=20)[0]
    assert isinstance(found, PeerLost)
    assert "another of the 2 processes ended" in str(found)


def test_one_process_is_alone_and_pays_nothing():
    assert (
        SINGLE.is_leader and SINGLE.all_reduce(1, 2.5) == [1, 2.5] and SINGLE.broadcast("x") == "x"
    )
    model = Tiny()
    assert SINGLE.wrap_model(model, torch.zeros(1, 1, 4, 6)) is model


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_is_no_time_is_refused(seconds):
    with pytest.raises(UserError, match="give a number of seconds above 0"), join_world(seconds):
        pass
