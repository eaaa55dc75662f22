"""Large memory that is used again: the system takes longer to give it than a batch to fill it."""

import ctypes
import math
import mmap
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

POPULATE_WRITE = 23  # Linux's number for it, which Python's mmap does not name
LARGE = 2**22  # bytes: from here on a batch is worth a block of its own


def keep_freed_memory() -> None:
    """Tells glibc to use the memory of images again instead of giving it back to the system.

    Getting new pages takes as long as a resize, and longer than to normalise a batch.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 2**28)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**29)  # M_TRIM_THRESHOLD


def ask_for_pages(block: mmap.mmap, start: int, size: int) -> None:
    """Many pages at once cost less than one after the other, where Linux knows how."""
    first = start - start % mmap.PAGESIZE
    with suppress(OSError):
        block.madvise(POPULATE_WRITE, first, min(start + size, len(block)) - first)


class Blocks:
    """Blocks of memory that are kept, and lent to one user at a time."""

    def __init__(self, new: Callable[[int], mmap.mmap]):
        self.new = new
        self.free: list[mmap.mmap] = []

    def take(self, size: int) -> mmap.mmap:
        for place, block in enumerate(self.free):
            if len(block) >= size:
                return self.free.pop(place)
        self.free.clear()  # all of them too small
        return self.new(size)

    def give(self, block: mmap.mmap) -> None:
        self.free.append(block)


def unforked(size: int) -> mmap.mmap:
    """Memory that no child sees: what both see is copied, page by page, when it is written to."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_DONTFORK)
    return block


SHARED = Blocks(lambda size: mmap.mmap(-1, size))  # seen by the children of a fork
OWN = Blocks(unforked)


def floats(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """An array with anything in it, whose memory is used again when nobody holds it any more."""
    count = math.prod(shape)
    if 4 * count < LARGE or sys.platform != "linux":
        return np.empty(shape, np.float32)
    block = OWN.take(4 * count)
    numbers = np.frombuffer(block, np.float32, count)
    weakref.finalize(numbers, OWN.give, block).atexit = False
    return numbers.reshape(shape)
