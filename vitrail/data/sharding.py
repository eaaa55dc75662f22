"""Writes any data set as tar shards, to a folder or a store: in parallel, verified, resumable.

Each split becomes shards in WebDataset layout, `train-00000.tar` and so on, with the images as they
are, in an order that depends only on the seed. The index of a shard, `train-00000.tar.npz`, is
written after the shard was read back and found equal, so that a second call skips it. The
manifest `shards.json`, written last, lists them with sizes and checksums.
"""

import hashlib
import io
import json
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail import files
from vitrail.arguments import check_arguments
from vitrail.data.config import LabelKind
from vitrail.data.image import SUFFIXES, detect_format
from vitrail.data.open import open_data
from vitrail.data.source import SPLITS, Source, fingerprint, is_labelled, is_multi_label
from vitrail.data.sources.index_cache import DAMAGED_ARCHIVE, unpack_arrays
from vitrail.data.sources.names import PackedNames
from vitrail.data.sources.places import check_output_path
from vitrail.data.sources.shards import IMAGE_SUFFIXES, INDEX_SUFFIX, ShardIndex, write_index
from vitrail.data.sources.store import (
    find_file,
    is_url,
    list_names,
    parse_url,
    put_bytes,
    read_bytes,
    read_whole,
    upload_file,
)
from vitrail.data.sources.store_cache import BLOCK
from vitrail.display.progress import progress_bar
from vitrail.display.text import format_count
from vitrail.errors import UserError

MANIFEST, CLASSES = "shards.json", "classes.txt"
FORMAT = 1  # of the manifest
MIN_SHARD, MAX_WORKERS = 0.001, 64  # megabytes; threads
DEFAULT_WORKERS = 4
SHUFFLE_STREAM = 4  # purpose of an RNG
Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """A shard that was written and read back."""

    name: str
    images: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, repr=False)
class Sharding:
    """Where the shards of a data set are, and what they hold.

    >>> vitrail.shard("photos", out="photo-shards").images
    24
    """

    out: str
    images: int
    classes: tuple[str, ...]
    shards: tuple[ShardFile, ...]
    written: int  # shards that were not there already

    def to_dict(self) -> dict[str, Any]:
        """The document that `vitrail shard --json` prints.

        >>> sorted(vitrail.shard("photos", out="photo-shards").to_dict())
        ['bytes', 'classes', 'images', 'out', 'shards', 'written']
        """
        size = sum(shard.bytes for shard in self.shards)
        shards = [asdict(shard) for shard in self.shards]
        counts = {"out": self.out, "images": self.images, "bytes": size, "written": self.written}
        return {**counts, "classes": list(self.classes), "shards": shards}

    def __repr__(self) -> str:
        size = sum(shard.bytes for shard in self.shards)
        skipped = len(self.shards) - self.written
        rest = f"; {skipped} of them already existed" if skipped else ""
        return (
            f"{self.out}: {format_count(self.images, 'image')} in "
            f"{format_count(len(self.shards), 'shard')}, {size / 1e6:,.1f} MB, verified{rest}"
        )


@dataclass(frozen=True)
class PlannedShard:
    """The images of a shard, chosen before any of them is read."""

    name: str
    items: Indices
    first: int  # number of its first image in the split


@check_arguments
def shard(
    data: str | Path | Source,
    *,
    out: str | Path,
    shard_mb: float = 256.0,
    seed: int = 0,
    workers: int | None = None,
    columns: Mapping[str, str] | None = None,
    labels: LabelKind | None = None,
    progress: bool = True,
) -> Sharding:
    """Writes a data set as tar shards in WebDataset layout, which train from a disk or a store.

    The images keep their bytes, and their splits are those that training would use. The same call
    writes the same bytes; after an interruption it continues.

    Args:
        data: folder, table, zip, shards, URL, built-in name, or what `vitrail.open_data` returned
        out: a folder, or a URL such as "s3://bucket/photos"
        shard_mb: megabytes of images in a shard
        seed: of the order of the images
        workers: shards that are written at the same time (default: 4)
        columns: the columns of a table, such as {"label": "species"}
        labels: "multi" if images have any number of labels, "none" to leave labels out
        progress: show a progress bar on stderr if it is a terminal

    >>> vitrail.shard("photos", out="photo-shards").shards[0].name
    'test-00000.tar'
    """
    if not MIN_SHARD <= shard_mb < 1e6:
        raise UserError(f"`shard_mb` is {shard_mb:g}; give megabytes from {MIN_SHARD} to 1,000,000")
    if workers is not None and not 1 <= workers <= MAX_WORKERS:
        raise UserError(f"`workers` is {workers}; give a number from 1 to {MAX_WORKERS}")
    if seed < 0:
        raise UserError(f"`seed` is {seed}; give a number of at least 0")
    source = (
        open_data(data, columns=columns, labels=labels, progress=progress)
        if isinstance(data, str | Path)
        else data
    )
    target = open_target(source, out)
    if is_multi_label(source) and not source.labels.any(axis=1).all():
        name = source.ids[int(source.labels.any(axis=1).argmin())]
        raise UserError(f"{name} has no label, which shards cannot express; remove it")
    plan = plan_shards(source, int(shard_mb * 1e6), seed)
    work = ShardWriter(source, target, f"{fingerprint(source)} {shard_mb} {seed}")
    existing = target.list_names()
    check_existing(existing, plan, target)
    write_classes(source, target, existing)
    shards, written = [], 0
    with progress_bar("writing shards", len(source), show=progress) as advance:
        for found, is_new in write_all(work, plan, existing, workers or DEFAULT_WORKERS):
            shards.append(found)
            written += is_new
            advance(found.images)
    entries = [asdict(found) for found in shards]
    manifest = {"format": FORMAT, "images": len(source), "seed": seed, "shards": entries}
    target.write(MANIFEST, json.dumps(manifest, indent=1).encode())
    return Sharding(
        out=str(target.path),
        images=len(source),
        classes=source.classes,
        shards=tuple(shards),
        written=written,
    )


def plan_shards(source: Source, size: int, seed: int) -> list[PlannedShard]:
    """Shuffles the images of each split, and fills shards of about `size` bytes with them."""
    plan = []
    for number, split in enumerate(sorted(SPLITS)):
        items = np.flatnonzero(source.splits == split)
        items = np.random.default_rng((SHUFFLE_STREAM, seed, number)).permutation(items)
        starts = np.cumsum(source.sizes[items]) - source.sizes[items]
        places = starts // size
        for count, place in enumerate(np.unique(places).tolist()):
            inside = np.flatnonzero(places == place)
            plan.append(PlannedShard(f"{split}-{count:05d}.tar", items[inside], int(inside[0])))
    return plan


class Target(Protocol):
    """Where shards are written."""

    path: Any

    def list_names(self) -> set[str]: ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, content: bytes) -> None: ...

    def write_file(self, name: str) -> Any:
        """A context with a temporary path, whose file is stored if the block succeeds."""

    def measure(self, name: str) -> tuple[int, str]:
        """The size and SHA-256 of a file, read back."""


class FolderTarget:
    """A folder on disk."""

    def __init__(self, path: Path):
        self.path = path

    def list_names(self) -> set[str]:
        files.remove_temporary(self.path, "*")
        return {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        files.write_file(self.path / name, content)

    @contextmanager
    def write_file(self, name: str) -> Iterator[Path]:
        try:
            with files.atomic_write(self.path / name) as temporary:
                yield temporary
        except OSError as error:
            why = files.describe_os_error(error)
            raise UserError(f"cannot write {self.path / name}: {why}") from error

    def measure(self, name: str) -> tuple[int, str]:
        with open(self.path / name, "rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        return (self.path / name).stat().st_size, checksum


class StoreTarget:
    """A folder of a store."""

    def __init__(self, path: Any):
        self.path = path

    def list_names(self) -> set[str]:
        return list_names(self.path)

    def read(self, name: str) -> bytes:
        return read_whole(f"{self.path}/{name}")

    def write(self, name: str, content: bytes) -> None:
        put_bytes(f"{self.path}/{name}", content)

    @contextmanager
    def write_file(self, name: str) -> Iterator[Path]:
        try:
            with tempfile.TemporaryDirectory(prefix="vitrail-shard-") as folder:
                yield Path(folder) / name
                upload_file(Path(folder) / name, f"{self.path}/{name}")
        except OSError as error:
            why, place = files.describe_os_error(error), tempfile.gettempdir()
            raise UserError(
                f"cannot write {name} to {place}: {why}, or set TMPDIR to another folder"
            ) from error

    def measure(self, name: str) -> tuple[int, str]:
        file, checksum = find_file(f"{self.path}/{name}"), hashlib.sha256()
        for start in range(0, file.size, BLOCK):
            checksum.update(read_bytes(file, start, min(start + BLOCK, file.size)))
        return file.size, checksum.hexdigest()


def open_target(source: Source, out: str | Path) -> Target:
    """The folder or store to write to, which is not the data itself."""
    if not is_url(out):
        path = files.expand_user(out)
        check_output_path(source, path, "out")
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file, not a folder; choose another `out`")
        return FolderTarget(path.absolute())
    url = parse_url(out)
    inside = source.path is not None and f"{url}/".startswith(f"{source.path}/")
    if inside:
        raise UserError(
            f"{url} is part of the data, which Vitrail never changes; choose another `out`"
        )
    return StoreTarget(url)


def check_existing(existing: set[str], plan: Sequence[PlannedShard], target: Target) -> None:
    """Raises if there are shards that this call would not write: they would become data, too."""
    planned = {shard.name for shard in plan}
    others = sorted(name for name in existing if name.endswith(".tar") and name not in planned)
    if others:
        raise UserError(
            f"{target.path} already has {others[0]}, which this data set does not write; choose "
            f"another `out`"
        )


def write_classes(source: Source, target: Target, existing: set[str]) -> None:
    """Writes `classes.txt`; raises if the one that is there has other classes."""
    if not is_labelled(source):
        return
    content = "".join(f"{name}\n" for name in source.classes).encode()
    if CLASSES not in existing:
        target.write(CLASSES, content)
    elif target.read(CLASSES) != content:
        raise UserError(f"{target.path} already has shards of other classes; choose another `out`")


def write_all(
    work: "ShardWriter", plan: Sequence[PlannedShard], existing: set[str], workers: int
) -> Iterator[tuple[ShardFile, bool]]:
    """Yields each shard in order, and whether it is new; several are written at the same time."""

    def write(planned: PlannedShard) -> tuple[ShardFile, bool]:
        if f"{planned.name}{INDEX_SUFFIX}" in existing and planned.name in existing:
            return work.read_finished(planned), False
        return work.write(planned), True

    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(write, plan)
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class ShardWriter:
    source: Source
    target: Target
    purpose: str  # the data, the size and the seed: a shard of another purpose is not replaced

    def read_finished(self, planned: PlannedShard) -> ShardFile:
        """A shard that an earlier call wrote and verified."""
        try:
            saved = unpack_arrays(self.target.read(f"{planned.name}{INDEX_SUFFIX}"))
            purpose = saved["purpose"].tobytes().decode()
            size, count = int(saved["version"][1]), len(saved["offsets"])
            sha256 = saved["sha256"].tobytes().hex()
        except (*DAMAGED_ARCHIVE, IndexError) as error:
            raise UserError(
                f"{self.target.path}/{planned.name}{INDEX_SUFFIX} is damaged; delete it to write "
                f"this shard again"
            ) from error
        if purpose != self.purpose:
            raise UserError(
                f"{self.target.path} already has shards of other data, or of another `shard_mb` or "
                f"`seed`; choose another `out`"
            )
        return ShardFile(name=planned.name, images=count, bytes=size, sha256=sha256)

    def write(self, planned: PlannedShard) -> ShardFile:
        """Writes a shard, reads it back, and then writes its index."""
        with self.target.write_file(planned.name) as path:
            index = self.write_tar(planned, path)
            size = path.stat().st_size
            with path.open("rb") as file:
                checksum = hashlib.file_digest(file, "sha256").hexdigest()
        found = self.target.measure(planned.name)
        if found != (size, checksum):
            raise UserError(
                f"{self.target.path}/{planned.name} was read back with {found[0]:,} bytes and "
                f"checksum {found[1][:12]}, expected {size:,} and {checksum[:12]}; try again"
            )
        content = write_index(index, size, checksum, self.purpose)
        self.target.write(f"{planned.name}{INDEX_SUFFIX}", content)
        count = len(planned.items)
        return ShardFile(name=planned.name, images=count, bytes=size, sha256=checksum)

    def write_tar(self, planned: PlannedShard, path: Path) -> ShardIndex:
        rows, keys, texts = [], [], []
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
            for number, item in enumerate(planned.items.tolist(), planned.first):
                content, suffix = self.encode(item)
                key, text = f"{number:09d}", self.label(item)
                offset = archive.offset + tarfile.BLOCKSIZE
                rows.append(
                    (offset, len(content), IMAGE_SUFFIXES.index(suffix), zlib.crc32(content))
                )
                add_file(archive, f"{key}{suffix}", content)
                if text:
                    add_file(archive, f"{key}.cls", text.encode())
                keys.append(key)
                texts.append(text)
        columns = np.array(rows, np.int64).reshape(-1, 4)
        return ShardIndex(
            PackedNames(keys),
            PackedNames(texts),
            columns[:, 0].copy(),
            columns[:, 1].copy(),
            columns[:, 2].astype(np.uint8),
            PackedNames(()),
            columns[:, 3].copy(),
        )

    def encode(self, index: int) -> tuple[bytes, str]:
        """The bytes of an image as they are, or pixels without loss; and its suffix."""
        try:
            item = self.source[index]
        except UserError as error:
            raise type(error)(f"{self.source.ids[index]}: {error}") from error
        if isinstance(item.content, np.ndarray):
            return encode_losslessly(item.content)
        if item.suffix in SUFFIXES:
            return item.content, item.suffix
        kind = detect_format(item.content)
        suffix = next((suffix for suffix, name in SUFFIXES.items() if name == kind), None)
        if suffix is None:
            raise UserError(f"{item.id} is not an image; remove it from the data")
        return item.content, suffix

    @cached_property
    def has_numbers(self) -> bool:
        """Whether a class name is a number, which could be mistaken for an index."""
        return any(name.isdecimal() for name in self.source.classes)

    def label(self, item: int) -> str:
        """The text of its `.cls`: an index into `classes.txt`, or the class if it is a number."""
        if not is_labelled(self.source):
            return ""
        names = self.source.classes
        if not is_multi_label(self.source):
            index = int(self.source.labels[item])
            return names[index] if self.has_numbers else str(index)
        indices = np.flatnonzero(self.source.labels[item]).tolist()
        return json.dumps([names[index] if self.has_numbers else index for index in indices])


def encode_losslessly(pixels: np.ndarray) -> tuple[bytes, str]:
    """A PNG file of 8-bit grey or colour pixels, else a NumPy file."""
    stream = io.BytesIO()
    plain = pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
    if pixels.dtype == np.uint8 and (plain.ndim == 2 or plain.shape[2] == 3):
        Image.fromarray(np.ascontiguousarray(plain)).save(stream, "PNG")
        return stream.getvalue(), ".png"
    np.save(stream, pixels, allow_pickle=False)
    return stream.getvalue(), ".npy"


def add_file(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """Adds a file without a date or an owner, so that the same images make the same bytes."""
    member = tarfile.TarInfo(name)
    member.size, member.mtime = len(content), 0
    archive.addfile(member, io.BytesIO(content))
