"""Buffers encoded files between the passes before training, so that each is read only once.

Opening a data set hashes its files, choosing a recipe decodes a sample, and preparing the loader
decodes all of them. Each pass announces which items it reads; their contents stay here until they
are decoded, as far as memory allows.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.reading.memory import available_memory, local_world_size

# An eighth of the available memory: the cache of decoded images takes up to a third of it at the
# same time, and the rest stays free for the model.
MEMORY_SHARE = 8

Stamp = tuple[int, int]  # size in bytes and modification time in nanoseconds of a file


class Content(NamedTuple):
    data: bytes
    path: str | Path
    stamp: Stamp  # of the file when it was read


class ContentBuffer:
    """Encoded contents by item index, each kept until its last announced read.

    The content of a file that changed or vanished is never returned. A copy in another process
    starts empty. Safe to use from several threads.
    """

    def __init__(self, limit: int | None = None):
        self._limit = limit  # bytes; None: a share of the available memory, measured at first use
        self._size = 0
        self._reads = np.zeros(0, np.uint8)  # announced reads of each item that are still to come
        self._contents: dict[int, Content] = {}
        self._lock = threading.Lock()

    def expect(self, indices: NDArray[np.int64]) -> None:
        """Announces a read of each item now, beside the one for decoding that follows."""
        if not len(indices):
            return
        with self._lock:
            if self._limit is None:
                self._limit = available_memory() // MEMORY_SHARE // local_world_size()
            if (missing := int(indices.max()) + 1 - len(self._reads)) > 0:
                self._reads = np.pad(self._reads, (0, missing))
            self._reads[indices] = np.maximum(self._reads[indices], 1) + 1

    def read(self, index: int, path: str | Path, load: Callable[[], bytes]) -> bytes:
        """Returns a buffered content, else loads it; keeps it if another read is announced."""
        if (data := self.take(index)) is not None:
            return data
        if not self._announced(index):
            return load()
        stamp, data = read_stamp(path), load()
        with self._lock:
            if self._announced(index):
                self._reads[index] -= 1
                fits = self._limit is not None and self._size + len(data) <= self._limit
                if self._reads[index] and stamp and fits and index not in self._contents:
                    self._contents[index] = Content(data, path, stamp)
                    self._size += len(data)
        return data

    def take(self, index: int) -> bytes | None:
        """Returns a buffered content, and drops it at its last announced read."""
        with self._lock:
            content = self._contents.get(index)
            if content is None:
                return None
            if changed := read_stamp(content.path) != content.stamp:
                self._reads[index] = 0
            else:
                self._reads[index] -= 1
            if not self._reads[index]:
                del self._contents[index]
                self._size -= len(content.data)
        return None if changed else content.data

    def clear(self) -> None:
        """Drops all contents and announcements: later reads are not buffered."""
        with self._lock:
            self._reads = np.zeros(0, np.uint8)
            self._contents.clear()
            self._size = 0

    def _announced(self, index: int) -> bool:
        return index < len(self._reads) and bool(self._reads[index])

    def __len__(self) -> int:
        return len(self._contents)

    def __reduce__(self) -> tuple[type["ContentBuffer"], tuple[()]]:
        return ContentBuffer, ()


def read_stamp(path: str | Path) -> Stamp | None:
    """Returns what changes when a file is written; None if it does not exist."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns


def contents_of(source: object) -> ContentBuffer:
    """Returns the buffer of a source; an empty one for a source that reads no files."""
    buffer = getattr(source, "contents", None)
    return buffer if isinstance(buffer, ContentBuffer) else ContentBuffer(limit=0)


def expect_reads(source: object, indices: NDArray[np.int64]) -> None:
    """Keeps the contents of these items after the read that follows, until they are decoded."""
    contents_of(source).expect(indices)
