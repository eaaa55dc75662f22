"""A local copy of what was read from stores: large blocks, of which the least recently used go.

`VITRAIL_STORE_GB` limits its size. Several processes share it: a block appears complete by a
rename, is downloaded by one of them while the others wait, and may be deleted at any time. Threads
download what a batch needs while its other images are decoded.
"""

import hashlib
import io
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from filelock import FileLock

from vitrail import files
from vitrail.data.sources.places import cache_folder
from vitrail.data.sources.store import StoreError, StoreFile, read_number, read_pieces
from vitrail.errors import UserError

BLOCK = 8 << 20  # bytes that are requested at once
DISK_SHARE = 4  # by default a quarter of the disk that is free or holds blocks already
FREED_SHARE, CHECKED_SHARE = 8, 256  # of the limit: freed at once; written before it is checked
TOUCH_EVERY = 60.0  # seconds between two notes that a block was used
WRITING_SECONDS = 60.0  # after which an unfinished block was left by a process that died
POLL_SECONDS = 0.01  # between checks for a block that another process downloads
THREADS = 4  # concurrent downloads of a process

Range = tuple[StoreFile, int, int]  # a file, the first byte, the number of bytes
Block = tuple[StoreFile, int]  # a file, and the number of the block in it
Outcome = tuple[Block, Exception | None]

_touched: dict[Path, float] = {}  # when this process noted the use of a block
_limits: dict[int, int] = {}  # bytes, as a process measured them last, for which it lists blocks
_unchecked: dict[int, int] = {}  # bytes that a process wrote since it checked the limit
_requests: dict[int, "SimpleQueue[tuple[Block, SimpleQueue[Outcome]]]"] = {}  # by process
_downloaded_ahead = set[Block]()  # blocks that `download_ahead` has requested


class StoreReader(io.RawIOBase):
    """A file of a store, for what reads it from its beginning to its end."""

    def __init__(self, file: StoreFile):
        self.file, self.position = file, 0
        self.number, self.block = -1, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.file.size}[whence]
        self.position = start + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        if self.position >= self.file.size or not len(buffer):
            return 0
        number, start = divmod(self.position, BLOCK)
        if number != self.number:
            self.number, self.block = number, read_block(self.file, number, 0, BLOCK)
        part = self.block[start : start + len(buffer)]
        buffer[: len(part)] = part
        self.position += len(part)
        return len(part)


def read_range(file: StoreFile, start: int, size: int) -> bytes:
    """A part of a file of a store, from the local copy if that has it."""
    end = min(start + size, file.size)
    return b"".join(
        read_block(file, number, max(start - number * BLOCK, 0), end - number * BLOCK)
        for _, number in blocks_of((file, start, size))
    )


def blocks_of(place: Range) -> Iterator[Block]:
    file, start, size = place
    end = min(start + size, file.size)
    return ((file, number) for number in range(start // BLOCK, -(-end // BLOCK)))


def iterate_arrivals(ranges: Sequence[Range | None]) -> Iterator[int]:
    """The position of each range as soon as the local copy has it; None has nothing to wait for.

    Missing blocks are downloaded while the caller works on the others.
    """
    absent: dict[Block, list[int]] = {}  # the positions that need each block
    present, missing = set[Block](), [0] * len(ranges)
    for position, place in enumerate(ranges):
        for block in blocks_of(place) if place else ():
            if block in present or (block not in absent and has_block(block)):
                present.add(block)
            else:
                absent.setdefault(block, []).append(position)
                missing[position] += 1
    outcomes = start_downloads(absent)
    yield from (position for position, count in enumerate(missing) if not count)
    for _ in absent:
        block, error = outcomes.get()
        if error is not None:
            raise error
        for position in absent[block]:
            missing[position] -= 1
            if not missing[position]:
                yield position


def download_ahead(ranges: Iterable[Range | None]) -> None:
    """Downloads what a later call will read, in the background; each block only once."""
    blocks = {block for place in ranges if place for block in blocks_of(place)} - _downloaded_ahead
    _downloaded_ahead.update(blocks)
    start_downloads(block for block in blocks if not has_block(block))


def start_downloads(blocks: Iterable[Block]) -> "SimpleQueue[Outcome]":
    """Downloads blocks in threads; the queue receives the outcome of each."""
    outcomes: SimpleQueue[Outcome] = SimpleQueue()
    for block in blocks:
        if (process := os.getpid()) not in _requests:
            _requests[process] = SimpleQueue()
            for _ in range(THREADS):  # daemons: the program can exit while a store hangs
                threading.Thread(
                    target=download_requested, args=(_requests[process],), daemon=True
                ).start()
        _requests[process].put((block, outcomes))
    return outcomes


def download_requested(requests: "SimpleQueue[tuple[Block, SimpleQueue[Outcome]]]") -> None:
    while True:
        block, outcomes = requests.get()
        try:
            read_block(*block, 0, 0)
        except Exception as error:
            outcomes.put((block, error))
        else:
            outcomes.put((block, None))


def has_block(block: Block) -> bool:
    """Whether the local copy has a block."""
    file, number = block
    try:
        return block_path(file, number).stat().st_size == block_size(file, number)
    except OSError:
        return False


def block_size(file: StoreFile, number: int) -> int:
    return min(BLOCK, file.size - number * BLOCK)


def read_block(file: StoreFile, number: int, start: int, end: int) -> bytes:
    """Bytes of a block, which is downloaded if it is absent or not complete."""
    path = block_path(file, number)
    size = block_size(file, number)
    if (found := read_copy(path, size, start, min(end, size))) is not None:
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / "lock", poll_interval=POLL_SECONDS):
            if (found := read_copy(path, size, start, min(end, size))) is not None:
                return found  # another process was faster
            first = number * BLOCK
            parts = read_pieces(file, first, first + size)
            # without fsync: a block that a crash cuts short has another size, and is read again
            temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
            with open(temporary, "wb") as copy:
                copy.writelines(parts)
            temporary.replace(path)
        check_limit(size)
    except OSError as error:
        why = files.describe_os_error(error)
        raise StoreError(
            f"cannot write {path.parent}: {why}, or set VITRAIL_CACHE to another folder"
        ) from error
    return b"".join(parts)[start:end] if end > start else b""


def block_path(file: StoreFile, number: int) -> Path:
    name = f"{file.url}\n{file.version}\n{file.size}\n{BLOCK}\n{number}"
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
    return cache_folder() / "store" / digest[:2] / digest[2:32]


def read_copy(path: Path, size: int, start: int, end: int) -> bytes | None:
    """A part of a block on disk, and a note that it was used; None if it is not there."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                return None
            file.seek(start)
            content = file.read(end - start)
        if (now := time.monotonic()) - _touched.get(path, -TOUCH_EVERY) >= TOUCH_EVERY:
            _touched[path] = now
            os.utime(path)
    except OSError:
        return None
    return content if len(content) == end - start else None


def check_limit(size: int) -> None:
    """Deletes the least recently used blocks once all processes have written too much."""
    process = os.getpid()
    if process not in _limits or os.environ.get("VITRAIL_STORE_GB"):
        _limits[process] = copy_limit()
    limit = _limits[process]
    _unchecked[process] = _unchecked.get(process, limit) + size  # checks at the first block, too
    if _unchecked[process] * CHECKED_SHARE < limit:
        return
    _unchecked[process] = 0
    limit = _limits[process] = copy_limit()
    with FileLock(cache_folder() / "store" / "lock"):
        blocks = sorted(list_blocks())
        total = sum(size for _, size, _ in blocks)
        if total <= limit - limit // FREED_SHARE:
            return
        for used, size, path in blocks:
            if path.suffix and time.time() - used < WRITING_SECONDS:
                continue
            path.unlink(missing_ok=True)
            _touched.pop(path, None)
            total -= size
            if total <= limit - limit // FREED_SHARE:
                return


def list_blocks() -> list[tuple[float, int, Path]]:
    """When each block was used, its size and its path, which has a suffix while it is written."""
    found = []
    for path in (cache_folder() / "store").glob("??/*"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        if path.name != "lock" and path.is_file():
            found.append((status.st_mtime, status.st_size, path))
    return found


def copy_limit() -> int:
    """The bytes that the local copy may take."""
    gigabytes = read_number("VITRAIL_STORE_GB", 0.0)
    if os.environ.get("VITRAIL_STORE_GB"):
        if not gigabytes:
            raise UserError("VITRAIL_STORE_GB is 0; give the gigabytes for a copy of remote data")
        return int(gigabytes * 1e9)
    folder = cache_folder()
    while not folder.exists():
        folder = folder.parent
    used = sum(size for _, size, _ in list_blocks())
    return (shutil.disk_usage(folder).free + used) // DISK_SHARE
