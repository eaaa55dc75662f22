"""The order of windows: each image once, shards from start to end, the same for any ranks."""

from itertools import chain

import numpy as np
import pytest

from tests.data.samples import encoded, tar
from vitrail.data import order
from vitrail.data.config import DataConfig, Preprocess
from vitrail.data.loader import Loader
from vitrail.data.open import open_data
from vitrail.data.order import window_order
from vitrail.errors import UserError


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(order, "WINDOW", 1000)  # ten images of 100 bytes
    monkeypatch.setattr(order, "LANES", 4)


SHARDS, SIZES = np.repeat(np.arange(10), 100), np.full(1000, 100)


def windows(batch: int = 16, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return window_order(SHARDS, SIZES, batch, seed, epoch)


@pytest.mark.parametrize("batch", [1, 3, 16, 999, 1000])
def test_each_image_comes_once(batch):
    assert sorted(windows(batch)) == list(range(1000))


def test_the_order_is_a_function_of_seed_and_epoch():
    assert np.array_equal(windows(), windows())
    assert not np.array_equal(windows(), windows(epoch=1))
    assert not np.array_equal(windows(), windows(seed=1))


def test_a_lane_reads_few_places_at_a_time():
    steps = 1000 // 16
    lane = windows()[: steps * 16].reshape(steps, 16)[:, :4].reshape(-1)  # a quarter of each batch
    for start in range(0, len(lane) - 10, 10):  # a window: ten images that are neighbours
        inside = np.sort(lane[start : start + 10])
        jumps = (np.diff(inside) > 1).sum()
        assert jumps <= 1, inside  # where one shard ends and another begins
    assert not np.array_equal(np.sort(lane[:10]), lane[:10])


def test_ranks_read_different_shards():
    steps = 1000 // 16
    order = windows()[: steps * 16].reshape(steps, 16)
    halves = [set(SHARDS[order[:, :8]].reshape(-1)), set(SHARDS[order[:, 8:]].reshape(-1))]
    assert len(halves[0] & halves[1]) <= 1  # at most the shard at the cut


@pytest.fixture
def source(tmp_path):
    for shard in range(4):
        members = {}
        for number in range(shard * 12, shard * 12 + 12):
            members |= {f"{number}.png": encoded(number), f"{number}.cls": f"{number % 2}".encode()}
        tar(tmp_path / "x" / f"train-{shard}.tar", members)
    tar(tmp_path / "x" / "val-0.tar", {"0.png": encoded(99), "0.cls": b"0"})
    return open_data(tmp_path / "x")


def batches(source, start: int = 0, end: int = 12, rank: int = 0, world: int = 1) -> list[list]:
    config = DataConfig(shuffle="windows", workers=0, cache_gb=0, disk_gb=0)
    loader = Loader(
        source, Preprocess(size=4), config, batch=8, rank=rank, world_size=world, progress=False
    )
    return [batch.items.tolist() for batch in loader.training(start, end)]


def test_a_resumed_run_continues_with_the_same_batches(source):
    whole = batches(source)
    assert batches(source, start=5) == whole[5:]
    assert sorted(chain(*whole[:6])) == sorted(np.flatnonzero(source.splits == "train").tolist())


def test_any_number_of_ranks_has_the_same_batches_also_more_than_shards(source):
    for world in (2, 8):  # there are four shards
        parts = [batches(source, rank=rank, world=world) for rank in range(world)]
        assert [list(chain(*together)) for together in zip(*parts, strict=True)] == batches(source)


def test_windows_need_shards_and_exclude_balanced_sampling(tmp_path):
    with pytest.raises(UserError, match="balanced sampling needs images in any order"):
        DataConfig(shuffle="windows", balanced=True)
    with pytest.raises(UserError, match="shuffle is 'some'"):
        DataConfig(shuffle="some")
    digits = open_data("digits")
    loader = Loader(digits, Preprocess(size=8), DataConfig(shuffle="windows", workers=0))
    with pytest.raises(UserError, match="which is for tar shards, and digits has none"):
        next(loader.training())
