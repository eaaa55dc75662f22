"""Memory that is used again: by one holder at a time, and unseen by children."""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from vitrail.data.config import Preprocess
from vitrail.data.preprocess import normalise
from vitrail.data.reading import memory
from vitrail.data.reading.memory import LARGE, Blocks, floats

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems' memory is numpy's")
SHAPE = (LARGE // 4 // 1024, 1024)


@pytest.fixture(autouse=True)
def nothing_before(monkeypatch):
    monkeypatch.setattr(memory, "OWN", Blocks(memory.unforked))


def place(numbers: np.ndarray) -> int:
    return int(numbers.__array_interface__["data"][0])


@linux
def test_memory_is_used_again_when_nobody_holds_it():
    first = floats(SHAPE)
    before = place(first)
    view = torch.from_numpy(first)[1:]  # holds it too
    del first
    second = floats(SHAPE)
    assert place(second) != before
    del view
    assert place(floats(SHAPE)) == before


@linux
def test_memory_that_is_too_small_is_no_longer_kept():
    del_me = floats(SHAPE)
    del del_me
    large = floats((2 * SHAPE[0], SHAPE[1]))
    assert not memory.OWN.free
    assert large.shape == (2 * SHAPE[0], SHAPE[1])


@linux
def test_children_do_not_see_the_memory_of_batches():
    start = place(floats(SHAPE))
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
