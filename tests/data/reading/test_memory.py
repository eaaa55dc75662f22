"""Memory: measured on any system, reused by one holder at a time, private to the process."""

import os
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vitrail.data.config import Preprocess
from vitrail.data.preprocess import normalise
from vitrail.data.reading import memory, workers
from vitrail.data.reading.memory import POOLED_BYTES, BlockPool, empty_float32

linux = pytest.mark.skipif(sys.platform != "linux", reason="pools need MADV_DONTFORK")
SHAPE = (POOLED_BYTES // 4 // 1024, 1024)


@pytest.fixture(autouse=True)
def nothing_before(monkeypatch):
    monkeypatch.setattr(memory, "PRIVATE_BLOCKS", BlockPool(memory.private_block))


def address(numbers: np.ndarray) -> int:
    return int(numbers.__array_interface__["data"][0])


@linux
def test_memory_is_reused_when_the_array_dies():
    first = empty_float32(SHAPE)
    before = address(first)
    view = torch.from_numpy(first)[1:]  # holds it too
    del first
    second = empty_float32(SHAPE)
    assert address(second) != before
    del view
    assert address(empty_float32(SHAPE)) == before


@linux
def test_blocks_that_are_too_small_are_dropped():
    del_me = empty_float32(SHAPE)
    del del_me
    large = empty_float32((2 * SHAPE[0], SHAPE[1]))
    assert not memory.PRIVATE_BLOCKS.free
    assert large.shape == (2 * SHAPE[0], SHAPE[1])


@linux
def test_a_fork_does_not_copy_the_memory_of_batches():
    start = address(empty_float32(SHAPE))
    maps = Path("/proc/self/smaps").read_text().split("VmFlags:")
    for mapping, after in pairwise(maps):
        low, high = (int(end, 16) for end in mapping_of(mapping).split("-"))
        if low <= start < high:
            assert "dc" in after.split("\n")[0].split()  # "do not copy on fork"
            return
    raise AssertionError("no such memory")


def mapping_of(text: str) -> str:
    """The addresses in the last head line of a part of smaps."""
    heads = [line.split()[0] for line in text.splitlines() if "-" in line.partition(" ")[0]]
    return heads[-1]


@pytest.mark.parametrize("shape", [(3, 700, 900), (9, 3, 224, 224), (2, 2, 3, 5, 7), (0, 3, 8, 8)])
def test_normalising_in_parts_changes_no_bit(shape):
    settings = Preprocess(size=8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    mean, std = (
        torch.tensor([255 * n for n in numbers])[:, None, None]
        for numbers in (
            settings.mean,
            settings.std,
        )
    )
    assert torch.equal(normalise(settings, images), (images.float() - mean) / std)


def test_memory_is_measured_without_proc_and_cgroups(monkeypatch):
    monkeypatch.setattr(memory, "MEMINFO", Path("/nowhere"))
    monkeypatch.setattr(memory, "CGROUP", Path("/nowhere"))
    assert memory.available_memory() == memory.physical_memory() // 2 > 10**8
    monkeypatch.delattr(os, "sysconf")
    assert memory.available_memory() == memory.ASSUMED_MEMORY // 2


def test_a_container_limit_counts(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.available_memory() == 3000


def test_arrays_without_a_pool_come_from_numpy(monkeypatch):
    monkeypatch.setattr(memory, "CAN_POOL", False)
    assert empty_float32(SHAPE).shape == SHAPE and not memory.PRIVATE_BLOCKS.free


def test_prefaulting_is_optional():
    memory.prefault(SimpleNamespace(), 0, 100)  # as an mmap on Windows, without madvise


@pytest.mark.parametrize("ranks", [1, 2])
def test_default_workers_are_the_cores_of_each_rank(monkeypatch, ranks):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert workers.default_workers() == 6 // ranks
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert workers.default_workers() == 1


def test_workers_start_by_fork_only_on_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert workers.start_method() == "spawn"
    monkeypatch.setattr(sys, "platform", "linux")
    assert workers.start_method() == "fork"
    monkeypatch.delattr(os, "fork")
    assert workers.start_method() == "spawn"
