"""Decoded images kept in memory, or in a file of the cache folder that later runs use too."""

import hashlib
import json
import logging
import mmap
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail import files
from vitrail.data.image import Pixels
from vitrail.data.reading import workers as processes
from vitrail.data.reading.memory import ask_for_pages
from vitrail.data.reading.reader import SPARE, Items, Reader, decode
from vitrail.data.source import fingerprint
from vitrail.data.sources.places import cache_folder
from vitrail.display.progress import bar

PAGES = 2**20  # bytes that are asked for at once
LAYOUT = 1  # of the files: a new number makes old ones unknown

Broken = dict[int, str]  # items that cannot be read, with name and reason

log = logging.getLogger(__name__)


class Full(Exception):
    """The images need more room than the sample of them promised."""


class Kept:
    """Decoded images, one behind the other in memory or in a file that is mapped into it."""

    def __init__(
        self, items: Items, shapes: NDArray[np.int64], pixels: Pixels, file: Path | None = None
    ):
        self.items = items  # ascending
        self.shapes = shapes
        self.pixels = pixels
        self.file = file
        self.starts = np.concatenate([[0], np.cumsum(shapes.prod(axis=1))])

    def __call__(self, item: int) -> Pixels:
        row = int(self.rows(np.array([item]))[0])
        start, end = self.starts[row : row + 2].tolist()
        return self.pixels[start:end].reshape(self.shapes[row])

    def rows(self, items: Items) -> NDArray[np.int64]:
        return np.searchsorted(self.items, items)

    @property
    def together(self) -> Pixels | None:
        """All images as one array, if they have one size."""
        if not len(self.shapes) or (self.shapes != self.shapes[0]).any():
            return None
        return self.pixels[: self.starts[-1]].reshape(-1, *self.shapes[0])

    def __getstate__(self) -> dict[str, Any]:
        """A file is opened again by the process that gets this, not sent to it."""
        state = dict(vars(self))
        return state if self.file is None else state | {"pixels": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.file is not None:
            self.pixels = mapped(self.file)


def keep(
    reader: Reader, items: Items, *, memory: int, disk: int, workers: int, progress: bool = True
) -> tuple[Kept, Broken] | None:
    """Decodes all items and keeps them where there is room, given in bytes; None where not."""
    room = reader.room(items)
    # whole images are cut by the workers, which share this process's memory only after a fork
    shared = not reader.whole or workers == 0 or processes.METHOD == "fork"
    if room <= memory and shared:
        try:
            return in_memory(reader, items, min(memory, 2 * room + 2**24), workers, progress)
        except Full:
            pass
    if disk > 0:
        return in_file(reader, items, room, disk, workers, progress)
    return None


def in_memory(
    reader: Reader, items: Items, room: int, workers: int, progress: bool
) -> tuple[Kept, Broken]:
    memory = Memory(room)
    found, shapes, broken = pack(reader, items, memory.write, workers, progress)
    return Kept(found, shapes, memory.pixels), broken


class Memory:
    """Room for images, one behind the other; what is never written takes none.

    Not numpy's own: its large pages make the first write three times slower on a virtual machine.
    """

    def __init__(self, room: int):
        self.used = self.ready = 0
        self.block: mmap.mmap | None = None
        if room and hasattr(mmap, "MAP_PRIVATE"):
            self.block = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.pixels: Pixels = np.frombuffer(self.block or bytearray(room), np.uint8)

    def write(self, image: Pixels) -> None:
        end = self.used + image.size
        if end > len(self.pixels):
            raise Full
        while self.block and self.ready < end:
            ask_for_pages(self.block, self.ready, PAGES)
            self.ready += PAGES
        self.pixels[self.used : end] = image.reshape(-1)
        self.used = end


def pack(
    reader: Reader, items: Items, write: Callable[[Pixels], Any], workers: int, progress: bool
) -> tuple[Items, NDArray[np.int64], Broken]:
    """Hands each decoded image to `write`; what was written, their shapes, and what is broken."""
    found, shapes, broken = [], [], {}
    with bar("decoding images", len(items), show=progress) as advance:
        for item, image in decode(reader, items, workers):
            if isinstance(image, str):
                broken[item] = image
            else:
                write(image)
                found.append(item)
                shapes.append(image.shape)
            advance(1)
    return np.array(found, np.int64), np.array(shapes, np.int64).reshape(-1, 3), broken


def in_file(
    reader: Reader, items: Items, room: int, disk: int, workers: int, progress: bool
) -> tuple[Kept, Broken] | None:
    """One process builds, others wait for it; half a file has no name and is never used."""
    folder = cache_folder() / "pixels" / key(reader, items)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(folder.with_suffix(".lock")):
            if (found := opened(folder)) is not None:
                return found
            if not make_room(folder, room, disk):
                return None
            with files.replacing(folder) as new:
                build(reader, items, new, workers, progress)
        return opened(folder)
    except OSError as error:
        why = f"cannot be kept in {folder.parent}: {error.strerror or error}"
        log.warning(f"decoded images {why}; every epoch decodes them anew")
        return None


def build(reader: Reader, items: Items, folder: Path, workers: int, progress: bool) -> None:
    folder.mkdir()
    with (folder / "pixels.bin").open("wb") as file:
        found, shapes, broken = pack(
            reader, items, lambda image: file.write(image.data), workers, progress
        )
    np.savez(folder / "index.npz", items=found, shapes=shapes)
    (folder / "broken.json").write_text(json.dumps(broken))


def opened(folder: Path) -> tuple[Kept, Broken] | None:
    """What an earlier run has built; None if it is not there or not whole."""
    try:
        with (folder / "index.npz").open("rb") as file:
            index = np.load(file, allow_pickle=False)
            items, shapes = index["items"], index["shapes"]
        broken = json.loads((folder / "broken.json").read_text())
        kept = Kept(items, shapes, mapped(folder / "pixels.bin"), folder / "pixels.bin")
        if len(kept.pixels) != kept.starts[-1]:
            return None
        os.utime(folder)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    return kept, {int(item): why for item, why in broken.items()}


def mapped(path: Path) -> Pixels:
    # "c": as far as torch can see it is writable; the file is not touched
    return np.memmap(path, np.uint8, mode="c")


def make_room(folder: Path, room: int, disk: int) -> bool:
    """Deletes what is left of this folder and the longest unused others, until `room` fits in."""
    if room > disk:
        log.warning(
            f"{room / 1e9:.1f} GB of decoded images fit neither in memory nor in the "
            f"{disk / 1e9:.1f} GB allowed on disk; every epoch decodes them anew"
        )
        return False
    for rest in [folder, *folder.parent.glob(f".{folder.name}.*.tmp")]:
        shutil.rmtree(rest, ignore_errors=True)
    others = sorted(
        folder.parent.glob("*/pixels.bin"), key=lambda path: path.parent.stat().st_mtime
    )
    taken = sum(path.stat().st_size for path in others)
    while others and taken + room > disk:
        taken -= others[0].stat().st_size
        shutil.rmtree(others.pop(0).parent, ignore_errors=True)
    return True


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Waits until no other process is inside; one that dies leaves."""
    if sys.platform == "win32":  # has no such lock: both build, and the first to end wins
        yield
        return
    import fcntl

    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def scan(reader: Reader, items: Items, *, workers: int, progress: bool = True) -> Broken:
    """Reads everything once, keeps nothing, and remembers what is broken."""
    path = cache_folder() / "broken" / f"{key(reader, items)}.json"
    if path.is_file():
        return {int(item): why for item, why in json.loads(path.read_text()).items()}
    _, _, broken = pack(reader, items, lambda image: None, workers, progress)
    files.write(path, json.dumps(broken))
    return broken


def key(reader: Reader, items: Items) -> str:
    """A name that changes with whatever could change one pixel."""
    look = {k: v for k, v in reader.view.plain().items() if k not in ("mean", "std")}
    decoders = [installed(name) for name in ("pillow", "simplejpeg", "torch")]
    chosen = hashlib.sha256(items.astype("<i8").tobytes()).hexdigest()
    path = reader.source.path
    data = [fingerprint(reader.source, dates=True), str(path.resolve()) if path else None]
    parts = [LAYOUT, data, chosen, look, reader.whole, SPARE, decoders]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def free_memory() -> int:
    """Bytes that this process could take without pushing out others."""
    found = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    group = Path("/sys/fs/cgroup")  # a container's limit
    if (group / "memory.max").exists() and (most := (group / "memory.max").read_text()) != "max\n":
        found.append(int(most) - int((group / "memory.current").read_text()))
    if not found:
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return max(0, min(found))


def free_disk() -> int:
    """Bytes that are free where the cache folder is or will be."""
    folder = cache_folder()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
