"""A folder of tar shards in WebDataset layout (`key.jpg`, `key.cls`), read by random access.

Each shard is indexed once. `train-000.tar` or a folder `train/` gives the split; `classes.txt`, one
name per line, gives the names of the indices in `.cls`. A zip that does not compress the shards is
read in place. Skips members that are not regular files. A key ends at the first dot of a name, so
`a.b.jpg` is not an image; `ignored` lists such members. In a store, `train-000.tar.npz` beside
`train-000.tar` is its index, if `vitrail shard` wrote them; others are read once to be indexed.
"""

import io
import posixpath
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from vitrail.data.config import LabelKind
from vitrail.data.image import MAX_BYTES, SUFFIXES, check_file_size, read_error
from vitrail.data.reading.contents import ContentBuffer
from vitrail.data.source import UNLABELLED, Item
from vitrail.data.sources.index_cache import (
    DAMAGED_ARCHIVE,
    load_arrays,
    pack_arrays,
    save_arrays,
    unpack_arrays,
)
from vitrail.data.sources.multi_label import LabelCells, check_single_labels, encode_labels
from vitrail.data.sources.names import PackedNames, make_unique, match_labels, normalise_name
from vitrail.data.sources.places import modification_time
from vitrail.data.sources.store import Location, StoreError, StoreFile
from vitrail.data.sources.store_cache import Range, StoreReader, read_range
from vitrail.data.sources.store_tree import version_number
from vitrail.data.sources.tree import MissingFile, Place, Tree, is_hidden
from vitrail.data.split import SPLIT_ALIASES, assign_splits
from vitrail.display.progress import progress_bar
from vitrail.errors import UserError

MAX_LABEL_BYTES = 10_000  # of a `.cls` member
IMAGE_SUFFIXES = tuple(SUFFIXES)
INDEX_VERSION = 4  # of the cached index: increase it when the arrays change
INDEX_SUFFIX = ".npz"  # of the index that `vitrail shard` writes beside each shard
INDEX_THREADS = 8  # they wait for the store most of the time


@dataclass(frozen=True, eq=False)
class ShardSource:
    """Images inside tar files, each located by its shard, offset and size."""

    name: str
    path: Location
    classes: tuple[str, ...]
    labels: NDArray[Any]  # class indices; multi-label: (images, classes) of 0 and 1
    splits: NDArray[np.str_]
    ids: PackedNames
    sizes: NDArray[np.int64]
    mtimes: NDArray[np.int64]
    ignored: dict[str, str]
    files: tuple[Path | StoreFile, ...]  # of the shards: tar files, or the zip for each of them
    shard_indices: NDArray[np.int64]  # the shard of each image
    offsets: NDArray[np.int64]  # of its bytes in the file on disk
    suffixes: NDArray[np.uint8]  # of its name, as an index into IMAGE_SUFFIXES
    checksums: NDArray[np.int64]  # its CRC-32 in an index that came with the shards, else -1
    contents: ContentBuffer = field(default_factory=ContentBuffer, repr=False)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Item:
        file = self.files[self.shard_indices[index]]
        path = file if isinstance(file, Path) else file.url
        content = self.contents.read(index, path, lambda: self._read(file, index))
        suffix = IMAGE_SUFFIXES[self.suffixes[index]]
        return Item(content, self.labels[index], self.ids[index], suffix)

    def stored_range(self, index: int) -> Range | None:
        """Where an image is in a store; None if it is on disk."""
        file = self.files[self.shard_indices[index]]
        if isinstance(file, Path):
            return None
        return file, int(self.offsets[index]), int(self.sizes[index])

    def _read(self, file: Path | StoreFile, index: int) -> bytes:
        offset, size = int(self.offsets[index]), int(self.sizes[index])
        check_file_size(size, MAX_BYTES)
        if isinstance(file, StoreFile):
            content = read_range(file, offset, size)
            if self.checksums[index] not in (-1, zlib.crc32(content)):
                raise StoreError(
                    f"not what the index of {file.url} describes; write the shards again, or "
                    f"delete {posixpath.basename(file.url)}{INDEX_SUFFIX}"
                )
            return content
        try:
            with open(file, "rb") as opened:
                opened.seek(offset)
                content = opened.read(size)
        except OSError as error:
            raise read_error(error) from error
        if len(content) < size:
            raise UserError("truncated")
        return content


@dataclass(frozen=True)
class ShardIndex:
    """The images and labels of one shard."""

    keys: PackedNames
    labels: PackedNames  # the text in each `.cls`
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    suffixes: NDArray[np.uint8]
    dotted: PackedNames  # members left out because their key would contain a dot
    checksums: NDArray[np.int64]  # CRC-32 of each image, -1 if unknown

    def to_arrays(self) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {"offsets": self.offsets, "sizes": self.sizes}
        arrays |= {"suffixes": self.suffixes, "checksums": self.checksums}
        arrays |= {"keys": self.keys.array, "key_starts": self.keys.starts}
        arrays |= {"labels": self.labels.array, "label_starts": self.labels.starts}
        return arrays | {"dotted": self.dotted.array, "dotted_starts": self.dotted.starts}

    @classmethod
    def from_arrays(cls, saved: Mapping[str, np.ndarray]) -> "ShardIndex":
        return cls(
            PackedNames.unpack(saved["keys"], saved["key_starts"]),
            PackedNames.unpack(saved["labels"], saved["label_starts"]),
            saved["offsets"],
            saved["sizes"],
            saved["suffixes"],
            PackedNames.unpack(saved["dotted"], saved["dotted_starts"]),
            saved["checksums"],
        )


def find_shards(tree: Tree) -> list[str]:
    """The tar files of a tree and of its `train/ val/ test/`; none if subfolders have images."""
    names = list(tree.list_names())
    for top in [name[:-1] for name in names if name[:-1].casefold() in SPLIT_ALIASES]:
        names += [f"{top}/{name}" for name in tree.list_names(top)]
    tars = sorted(name for name in names if posixpath.splitext(name)[1].lower() == ".tar")
    if not tars or any(folder.names for folder in tree.scan({}) if folder.parts):
        return []
    return tars


def open_shards(
    tree: Tree,
    shards: list[str],
    *,
    classes: Sequence[str] | None,
    split: bool,
    progress: bool,
    labels: LabelKind | None = None,
    separator: str | None = None,
) -> ShardSource:
    """All images of the shards; their labels are the classes, unless class names are given.

    Shards without any `.cls` file can be opened without labels only.
    """
    shard_splits = parse_splits(shards)
    with progress_bar("indexing shards", len(shards), show=progress) as advance:
        indices, places = [], [tree.find_bytes(shard) for shard in shards]
        for index in load_indices(tree, shards, places):
            indices.append(index)
            advance(1)
    counts = [len(index.keys) for index in indices]
    texts = [normalise_name(label) for index in indices for label in index.labels]
    if not texts:
        expected = "pairs of key.jpg and key.cls, without a dot in the key"
        raise UserError(f"no images in the shards of {tree.path}; expected {expected}")
    pairs = list(zip(shards, indices, strict=True))
    ids = PackedNames(f"{shard}:{key}" for shard, index in pairs for key in index.keys)
    dotted = [f"{shard}:{name}" for shard, index in pairs for name in index.dotted]
    names, encoded = encode_shard_labels(tree, texts, ids, classes, labels, separator)
    mtimes = [shard_time(file) for file, _, _ in places]
    source = ShardSource(
        name=tree.name,
        path=tree.path,
        classes=names,
        labels=encoded,
        splits=np.repeat(np.array(shard_splits, "<U5"), counts),
        ids=ids,
        sizes=np.concatenate([index.sizes for index in indices]),
        mtimes=np.repeat(np.array(mtimes, np.int64), counts),
        ignored=dict.fromkeys(dotted, "its key contains a dot, which WebDataset does not allow"),
        files=tuple(file for file, _, _ in places),
        shard_indices=np.repeat(np.arange(len(shards)), counts),
        offsets=np.concatenate([index.offsets for index in indices]),
        suffixes=np.concatenate([index.suffixes for index in indices]),
        checksums=np.concatenate([index.checksums for index in indices]),
    )
    return assign_splits(source, split=split, progress=progress)


def encode_shard_labels(
    tree: Tree,
    texts: Sequence[str],
    ids: Sequence[str],
    classes: Sequence[str] | None,
    labels: LabelKind | None,
    separator: str | None,
) -> tuple[tuple[str, ...], NDArray[Any]]:
    """Class names, and the class of each image from the text in its `.cls`, "" if it has none.

    Multi-label: a row of 0 and 1 for each image.
    """
    if labels == "none":
        return (UNLABELLED,), np.zeros(len(texts), np.int64)
    if "" in texts:
        shard, _, key = ids[texts.index("")].partition(":")
        raise UserError(f"shard {tree.path / shard}: {key} has no .cls")
    where: dict[str, str] = {}
    if labels != "multi":
        for text, id in zip(texts, ids, strict=True):
            where.setdefault(text, id)
        if labels is None:
            check_single_labels(where)
        names, index = match_shard_labels(tree, where, classes)
        return names, np.array([index[text] for text in texts], np.int64)
    cells = LabelCells(separator)
    for text, id in zip(texts, ids, strict=True):
        try:
            cells.add(id, text)
        except UserError as error:
            raise UserError(f"{id}: {error}") from error
    rows = cells.split()
    for row, id in zip(rows, ids, strict=True):
        for label in row:
            where.setdefault(label, id)
    names, index = match_shard_labels(tree, where, classes)
    return names, encode_labels(rows, index, len(names))


def match_shard_labels(
    tree: Tree, labels: Mapping[str, str], classes: Sequence[str] | None
) -> tuple[tuple[str, ...], dict[str, int]]:
    """All class names, and the class index of each label; `labels` maps them to where they occur.

    With a `classes.txt`, labels may be indices of its lines.
    """
    if "classes.txt" not in tree.list_names():
        return match_labels(labels, classes)
    try:
        with tree.open_file("classes.txt") as file:
            lines = file.read().decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {tree.path / 'classes.txt'}: {error}") from error
    listed = make_unique([normalise_name(line) for line in lines if line.strip()])
    names, index = match_labels(labels, listed)
    if classes is None:
        return names, index
    name_of = {text: names[number] for text, number in index.items()}
    origins = {name: labels[text] for text, name in name_of.items()}
    names, model_index = match_labels(origins, classes)
    return names, {text: model_index[name] for text, name in name_of.items()}


def parse_splits(shards: list[str]) -> list[str]:
    """The split in each shard's folder or name, or "" for all of them."""
    shard_splits = []
    for shard in shards:
        folder, name = posixpath.split(shard)
        words = [folder] if folder else re.split("[^a-z]+", name.casefold())
        splits = {
            SPLIT_ALIASES[word.casefold()] for word in words if word.casefold() in SPLIT_ALIASES
        }
        if len(splits) > 1:
            raise UserError(f"the name of shard {shard} contains two splits; keep one of them")
        shard_splits.append(splits.pop() if splits else "")
    if "" in shard_splits and any(shard_splits):
        shard = shards[shard_splits.index("")]
        raise UserError(f"shard {shard} has no split in its name, but others do; rename it")
    return shard_splits


def load_indices(tree: Tree, shards: list[str], places: list[Place]) -> Iterator[ShardIndex]:
    """The index of each shard; those of a store are read by several threads."""

    def load(number: int) -> ShardIndex:
        return load_or_build_index(tree, shards[number], places[number])

    if not any(isinstance(file, StoreFile) for file, _, _ in places):
        yield from map(load, range(len(shards)))
        return
    pool = ThreadPoolExecutor(INDEX_THREADS)
    try:
        yield from pool.map(load, range(len(shards)))
    finally:
        pool.shutdown(cancel_futures=True)


def load_or_build_index(tree: Tree, shard: str, place: Place) -> ShardIndex:
    """The index of a shard, from the cache if its size and modification time are unchanged."""
    file, start, end = place
    version = np.array([INDEX_VERSION, start, end, shard_time(file)], np.int64)
    saved = load_arrays("shards", tree.path / shard)
    if np.array_equal(saved.get("version", ()), version):
        return ShardIndex.from_arrays(saved)
    index = None
    if isinstance(file, StoreFile):
        index = read_index(tree, shard, file.size)
    index = index or build_index(tree.path / shard, place)
    save_arrays("shards", tree.path / shard, {"version": version, **index.to_arrays()})
    return index


def shard_time(file: Path | StoreFile) -> int:
    """The modification time of a shard, or a number that changes with its version."""
    if isinstance(file, StoreFile):
        return version_number(file)
    return modification_time(file.stat())


def write_index(index: ShardIndex, size: int, sha256: str, purpose: str) -> bytes:
    """The index that is stored beside a shard, which has this size and checksum."""
    arrays = {"version": np.array([INDEX_VERSION, size], np.int64), **index.to_arrays()}
    arrays |= {"sha256": np.frombuffer(bytes.fromhex(sha256), np.uint8)}
    return pack_arrays({**arrays, "purpose": np.frombuffer(purpose.encode(), np.uint8)})


def read_index(tree: Tree, shard: str, size: int) -> ShardIndex | None:
    """The index beside a shard; None if it is absent, damaged, or of a file of another size."""
    try:
        found = tree.find(f"{shard}{INDEX_SUFFIX}")
    except MissingFile:
        return None
    with tree.open_file(found.name) as file:  # if the store fails, the index may be intact
        content = file.read()
    try:
        saved = unpack_arrays(content)
        index = ShardIndex.from_arrays(saved)
        counts = {len(column) for column in (index.keys, index.labels, index.offsets, index.sizes)}
        counts |= {len(index.suffixes), len(index.checksums)}
        known = saved["version"].tolist() == [INDEX_VERSION, size] and len(counts) == 1
        ends = index.offsets + index.sizes
        inside = min(index.offsets.min(), index.sizes.min()) >= 0 and ends.max() <= size
        suffixes = index.suffixes.max() < len(IMAGE_SUFFIXES)
        return index if known and inside and suffixes and list(index.keys) else None
    except DAMAGED_ARCHIVE:
        return None


def build_index(shard: Location, place: Place) -> ShardIndex:
    """Reads every header of a tar file, and the text of every `.cls`."""
    path, start, end = place
    images: dict[str, tuple[int, int, int]] = {}
    labels: dict[str, str] = {}
    dotted: list[tuple[str, str]] = []  # the name of an image, and the key it would have
    try:
        with open_shard(path) as file:
            for member in iterate_members(file, start, end):
                add_member(member, file, images, labels, dotted)
    except RecursionError as error:  # headers that each announce another header
        raise UserError(f"shard {shard}: too many extended headers in a row") from error
    except StoreError:
        raise
    except (tarfile.TarError, OSError, ValueError, EOFError, OverflowError) as error:
        raise UserError(f"shard {shard}: {error}") from error
    if unpaired := labels.keys() - images:
        raise UserError(f"shard {shard}: {min(unpaired)} has no image")
    columns = np.array(list(images.values()), np.int64).reshape(-1, 3)
    return ShardIndex(
        PackedNames(images),
        PackedNames(labels.get(key, "") for key in images),
        columns[:, 0].copy(),
        columns[:, 1].copy(),
        columns[:, 2].astype(np.uint8),
        PackedNames(name for name, key in dotted if key not in images),
        np.full(len(images), -1, np.int64),
    )


def open_shard(file: Path | StoreFile) -> BinaryIO:
    if isinstance(file, StoreFile):
        return cast(BinaryIO, io.BufferedReader(StoreReader(file)))
    return open(file, "rb")


def iterate_members(file: BinaryIO, start: int, end: int) -> Iterable[tarfile.TarInfo]:
    """The regular files of a tar file; raises where `tarfile` would mistake damage for its end.

    The tar file consists of the bytes from `start` to `end`; offsets count from the first of all.
    """
    file.seek(start)
    with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # the list would fill memory
            if member.size < 0 or member.offset_data + member.size > end:
                raise UserError(f"truncated in {member.name}")
            if member.isreg() and not member.issparse():
                yield member
        file.seek(archive.offset)
        end_block = file.read(max(0, min(tarfile.BLOCKSIZE, end - archive.offset)))
        if end_block.strip(b"\0"):
            raise UserError(f"damaged at byte {archive.offset}")
        if len(end_block) < tarfile.BLOCKSIZE:  # programs write at least one empty block
            raise UserError(
                "truncated: the empty block at the end is missing; copy or create it again"
            )


def add_member(
    member: tarfile.TarInfo,
    file: BinaryIO,
    images: dict[str, tuple[int, int, int]],
    labels: dict[str, str],
    dotted: list[tuple[str, str]],
) -> None:
    """Adds a member to the images (offset, size and suffix), the labels or the dotted names."""
    folder, name = posixpath.split(member.name)
    stem, _, suffix = name.partition(".")
    if is_hidden(name):
        return
    key, suffix = posixpath.join(folder, stem), f".{suffix.lower()}"
    if suffix in SUFFIXES:
        if key in images:
            raise UserError(f"two images are called {key}")
        images[key] = member.offset_data, member.size, IMAGE_SUFFIXES.index(suffix)
    elif suffix == ".cls":
        if key in labels:
            raise UserError(f"two labels are called {key}")
        if member.size > MAX_LABEL_BYTES:
            raise UserError(
                f"{member.name} has {member.size} bytes; expected a class index or name"
            )
        file.seek(member.offset_data)
        labels[key] = file.read(member.size).decode().strip()
        if not labels[key]:
            raise UserError(f"{member.name} is empty")
    elif suffix.endswith(IMAGE_SUFFIXES):
        dotted.append((member.name, key))  # beside an image of that key it may be its mask
