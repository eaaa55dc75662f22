"""A cache of decoded images, in memory or in a file of the cache folder that later runs reuse."""

import hashlib
import json
import logging
import mmap
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from vitrail import files
from vitrail.data.pixels import Pixels
from vitrail.data.reading import workers as worker_processes
from vitrail.data.reading.memory import prefault
from vitrail.data.reading.reader import CROP_MARGIN, Items, Reader, decode_items
from vitrail.data.source import fingerprint
from vitrail.data.sources.index_cache import DAMAGED_ARCHIVE
from vitrail.data.sources.places import cache_folder
from vitrail.decoding import decode_value, read_json
from vitrail.display.progress import progress_bar

PREFAULT_BYTES = 2**20  # mapped with one system call
CACHE_VERSION = 2  # of the files: a new number invalidates existing ones

Broken = dict[int, str]  # items that cannot be read, each with its name and the reason

log = logging.getLogger(__name__)


class BufferFull(Exception):
    """The images need more memory than estimated from a sample."""


class DecodedImages:
    """Decoded images, stored one after the other in memory or in a memory-mapped file."""

    def __init__(
        self,
        items: Items,
        shapes: NDArray[np.int64],
        memory: NDArray[np.uint8],
        dtype: np.dtype[Any],
        file: Path | None = None,
    ):
        self.items = items  # ascending
        self.shapes = shapes
        self.memory = memory
        self.dtype = dtype
        self.file = file
        self.starts = np.concatenate([[0], np.cumsum(shapes.prod(axis=1) * dtype.itemsize)])

    def __call__(self, item: int) -> Pixels:
        row = int(self.rows(np.array([item]))[0])
        start, end = self.starts[row : row + 2].tolist()
        return self.memory[start:end].view(self.dtype).reshape(self.shapes[row])

    def rows(self, items: Items) -> NDArray[np.int64]:
        return np.searchsorted(self.items, items)

    @property
    def stacked(self) -> Pixels | None:
        """All images as one array, if they have the same shape."""
        if not len(self.shapes) or (self.shapes != self.shapes[0]).any():
            return None
        pixels = self.memory[: self.starts[-1]].view(self.dtype)
        return pixels.reshape(-1, *self.shapes[0])

    def __getstate__(self) -> dict[str, Any]:
        """Pickles a file by its path: the receiving process maps it again."""
        state = dict(vars(self))
        return state if self.file is None else state | {"memory": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.file is not None:
            self.memory = map_file(self.file)


def cache_images(
    reader: Reader, items: Items, *, memory: int, disk: int, workers: int, progress: bool = True
) -> tuple[DecodedImages, Broken] | None:
    """Decodes all items into memory or a file, with limits in bytes; None if they fit nowhere."""
    size = reader.estimate_bytes(items)
    # workers crop the uncropped images, and share the memory of this process only after a fork
    shared = not reader.uncropped or workers == 0 or worker_processes.start_method() == "fork"
    if size <= memory and shared:
        try:
            return cache_in_memory(reader, items, min(memory, 2 * size + 2**24), workers, progress)
        except BufferFull:
            pass
    if disk > 0:
        return cache_in_file(reader, items, size, disk, workers, progress)
    return None


def cache_in_memory(
    reader: Reader, items: Items, limit: int, workers: int, progress: bool
) -> tuple[DecodedImages, Broken]:
    buffer = PixelBuffer(limit)
    found, shapes, broken = decode_into(buffer.write, reader, items, workers, progress)
    return DecodedImages(found, shapes, buffer.memory, reader.dtype), broken


class PixelBuffer:
    """Address space for images, one after the other; only what is written takes memory.

    Not allocated by NumPy: its huge pages make the first write three times slower on a virtual
    machine.
    """

    def __init__(self, size: int):
        self.used = self.prefaulted = 0
        self.block: mmap.mmap | None = None
        if size and hasattr(mmap, "MAP_PRIVATE"):
            self.block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = np.frombuffer(self.block or bytearray(size), np.uint8)

    def write(self, image: Pixels) -> None:
        end = self.used + image.nbytes
        if end > len(self.memory):
            raise BufferFull
        while self.block and self.prefaulted < end:
            prefault(self.block, self.prefaulted, PREFAULT_BYTES)
            self.prefaulted += PREFAULT_BYTES
        self.memory[self.used : end] = image.reshape(-1).view(np.uint8)
        self.used = end


def decode_into(
    write: Callable[[Pixels], Any], reader: Reader, items: Items, workers: int, progress: bool
) -> tuple[Items, NDArray[np.int64], Broken]:
    """Passes each decoded image to `write`; returns the written items, their shapes, the broken."""
    written, shapes, broken = [], [], {}
    with progress_bar("decoding images", len(items), show=progress) as advance:
        for item, image in decode_items(reader, items, workers):
            if isinstance(image, str):
                broken[item] = image
            else:
                write(image)
                written.append(item)
                shapes.append(image.shape)
            advance(1)
    return np.array(written, np.int64), np.array(shapes, np.int64).reshape(-1, 3), broken


def cache_in_file(
    reader: Reader, items: Items, size: int, disk: int, workers: int, progress: bool
) -> tuple[DecodedImages, Broken] | None:
    """Opens the cache file of these images, or builds it; other processes wait for the builder."""
    folder = cache_folder() / "pixels" / cache_key(reader, items)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if (cached := open_cache(folder, reader.dtype)) is not None:
                return cached
            if not free_cache_space(folder, size, disk):
                return None
            with files.atomic_write(folder) as new:
                build_cache(reader, items, new, workers, progress)
        return open_cache(folder, reader.dtype)
    except OSError as error:
        reason = f"cannot be cached in {folder.parent}: {error.strerror or error}"
        log.warning(f"decoded images {reason}; every epoch decodes them again")
        return None


def build_cache(reader: Reader, items: Items, folder: Path, workers: int, progress: bool) -> None:
    folder.mkdir()
    with (folder / "pixels.bin").open("wb") as file:
        written, shapes, broken = decode_into(
            lambda image: file.write(image.data), reader, items, workers, progress
        )
    np.savez(folder / "index.npz", items=written, shapes=shapes)
    (folder / "broken.json").write_bytes(json.dumps(broken).encode())


def open_cache(folder: Path, dtype: np.dtype[Any]) -> tuple[DecodedImages, Broken] | None:
    """Opens the cache that an earlier run built; None if it is absent or incomplete."""
    try:
        with (folder / "index.npz").open("rb") as file:
            index = np.load(file, allow_pickle=False)
            items, shapes = index["items"], index["shapes"]
        broken = read_broken(folder / "broken.json")
        pixels = folder / "pixels.bin"
        images = DecodedImages(items, shapes, map_file(pixels), dtype, pixels)
        if len(images.memory) != images.starts[-1]:
            return None
        os.utime(folder)  # the least recently used cache is deleted first
    except DAMAGED_ARCHIVE:
        return None
    return images, broken


def read_broken(path: Path) -> Broken:
    """The broken images that an earlier run noted; raises if the note is damaged."""
    noted = decode_value(dict[str, str], read_json(path), "broken")
    return {int(item): reason for item, reason in noted.items()}


def map_file(path: Path) -> NDArray[np.uint8]:
    # copy on write: torch needs a writable array, and the file stays unchanged
    return np.memmap(path, np.uint8, mode="c")


def free_cache_space(folder: Path, size: int, disk: int) -> bool:
    """Deletes remains of this cache and the least recently used others until `size` bytes fit."""
    if size > disk:
        log.warning(
            f"{size / 1e9:.1f} GB of decoded images exceed the memory and the "
            f"{disk / 1e9:.1f} GB allowed on disk; every epoch decodes them again"
        )
        return False
    for remains in [folder, *folder.parent.glob(f".{folder.name}.*.tmp")]:
        shutil.rmtree(remains, ignore_errors=True)
    others = sorted(
        folder.parent.glob("*/pixels.bin"), key=lambda path: path.parent.stat().st_mtime
    )
    used = sum(path.stat().st_size for path in others)
    while others and used + size > disk:
        used -= others[0].stat().st_size
        shutil.rmtree(others.pop(0).parent, ignore_errors=True)
    return True


def find_broken(reader: Reader, items: Items, *, workers: int, progress: bool = True) -> Broken:
    """Decodes everything once without storing it; the cache folder remembers what is broken."""
    path = cache_folder() / "broken" / f"{cache_key(reader, items)}.json"
    with suppress(OSError, ValueError):  # absent or damaged: made anew
        return read_broken(path)
    _, _, broken = decode_into(lambda image: None, reader, items, workers, progress)
    files.write_file(path, json.dumps(broken))
    return broken


def cache_key(reader: Reader, items: Items) -> str:
    """Returns a name that changes with everything that can change a pixel."""
    normalisation = ("mean", "std")  # applied after the cache
    settings = reader.preprocess.to_dict().items()
    preprocess = {name: value for name, value in settings if name not in normalisation}
    decoders = [installed_version(name) for name in ("pillow", "simplejpeg", "tifffile", "torch")]
    chosen = hashlib.sha256(items.astype("<i8").tobytes()).hexdigest()
    path = reader.source.path
    data = [fingerprint(reader.source, mtimes=True), str(path.resolve()) if path else None]
    parts = [CACHE_VERSION, data, chosen, preprocess, reader.uncropped, CROP_MARGIN, decoders]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def available_disk() -> int:
    """Returns the free bytes on the disk of the cache folder, whether it exists or not."""
    folder = cache_folder()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
