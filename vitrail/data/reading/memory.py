"""Memory: how much is available, and large blocks of it that are reused.

The operating system takes longer to provide the memory of a batch than a batch takes to fill it.
"""

import ctypes
import math
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MEMINFO = Path("/proc/meminfo")  # Linux
CGROUP = Path("/sys/fs/cgroup")  # the limits of a Linux container
ASSUMED_MEMORY = 4 * 2**30  # bytes, where the system does not say: Windows without ctypes.windll

MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap does not name it
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
POOLED_BYTES = 2**22  # a larger array gets a block of its own, a smaller one comes from malloc
# Both are needed to keep a block out of the copies that a fork makes.
CAN_POOL = hasattr(mmap, "MADV_DONTFORK") and hasattr(mmap, "MAP_PRIVATE")


def available_memory() -> int:
    """Returns the bytes that this process can allocate without swapping out others."""
    limits = []
    with suppress(OSError):
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text("ascii").splitlines())
        limits.append(1024 * int(lines["MemAvailable"].split()[0]))
    with suppress(OSError):
        limit = (CGROUP / "memory.max").read_text("ascii").strip()
        if limit != "max":
            limits.append(int(limit) - int((CGROUP / "memory.current").read_text("ascii")))
    if not limits:
        limits.append(physical_memory() // 2)  # how much of it is in use is unknown
    return max(0, min(limits))


def physical_memory() -> int:
    """Returns the bytes of RAM in this machine."""
    if hasattr(os, "sysconf"):
        with suppress(OSError, ValueError):
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if hasattr(ctypes, "windll"):
        kilobytes = ctypes.c_ulonglong()
        if ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kilobytes)):
            return 1024 * kilobytes.value
    return ASSUMED_MEMORY


def local_world_size() -> int:
    """Returns how many training processes `torchrun` started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def retain_freed_memory() -> None:
    """Makes glibc reuse the memory of images instead of returning it to the operating system.

    Getting new pages takes as long as resizing an image, and longer than normalising a batch.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**28)
        libc.mallopt(M_TRIM_THRESHOLD, 2**29)


def prefault(block: mmap.mmap, start: int, size: int) -> None:
    """Maps a range of pages with one system call, faster than one page fault each; Linux only."""
    first = start - start % mmap.PAGESIZE
    if hasattr(block, "madvise"):
        with suppress(OSError):
            block.madvise(MADV_POPULATE_WRITE, first, min(start + size, len(block)) - first)


class BlockPool:
    """Blocks of memory that are reused, each by one user at a time."""

    def __init__(self, allocate: Callable[[int], mmap.mmap]):
        self.allocate = allocate
        self.free: list[mmap.mmap] = []

    def acquire(self, size: int) -> mmap.mmap:
        for number, block in enumerate(self.free):
            if len(block) >= size:
                return self.free.pop(number)
        self.free.clear()  # all of them are too small
        return self.allocate(size)

    def release(self, block: mmap.mmap) -> None:
        self.free.append(block)


def private_block(size: int) -> mmap.mmap:
    """Allocates memory that a fork does not share: a shared page is copied at the next write."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_DONTFORK)
    return block


SHARED_BLOCKS = BlockPool(lambda size: mmap.mmap(-1, size))  # shared with forked processes
PRIVATE_BLOCKS = BlockPool(private_block)


def empty_float32(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Returns an uninitialised array; a large one returns its memory to a pool when it dies."""
    count = math.prod(shape)
    if 4 * count < POOLED_BYTES or not CAN_POOL:
        return np.empty(shape, np.float32)
    block = PRIVATE_BLOCKS.acquire(4 * count)
    values = np.frombuffer(block, np.float32, count)
    weakref.finalize(values, PRIVATE_BLOCKS.release, block).atexit = False
    return values.reshape(shape)
