"""A folder of tar shards (WebDataset: `key.jpg` beside `key.cls`), indexed once, read anywhere.

`train-000.tar` or a folder `train/` gives the split; `classes.txt`, a name in each line, the names
that the numbers in `.cls` stand for. Members that are no plain files do not exist here. A key ends
at the first dot of a name, so `a.b.jpg` is no image; such members are named in `ignored`.
"""

import os
import re
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from vitrail.data.image import MAX_BYTES, SUFFIXES, cannot_read, check_bytes
from vitrail.data.source import Item
from vitrail.data.sources.folder import hidden, walk
from vitrail.data.sources.names import Names, match, tidy, unique
from vitrail.data.sources.notes import keep, recall
from vitrail.data.split import SPLITS, settle
from vitrail.display.progress import bar
from vitrail.errors import UserError

LABEL_BYTES = 1000  # no `.cls` is longer
ENDINGS = tuple(SUFFIXES)
LAYOUT = 2  # of the index that is kept: a new number makes old ones unknown


@dataclass(frozen=True, eq=False)
class Shards:
    """Images inside tar files, each known by its shard, its offset and its size."""

    name: str
    path: Path
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    splits: NDArray[np.str_]
    ids: Names
    sizes: NDArray[np.int64]
    dates: NDArray[np.int64]
    ignored: dict[str, str]
    shards: tuple[str, ...]  # paths from the folder
    which: NDArray[np.int64]  # the shard of each image
    offsets: NDArray[np.int64]  # of its bytes in the shard
    endings: NDArray[np.uint8]  # of its name, as its position in ENDINGS

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Item:
        name, size = self.ids[index], int(self.sizes[index])
        check_bytes(size, MAX_BYTES)
        try:
            with open(self.path / self.shards[self.which[index]], "rb") as file:
                content = os.pread(file.fileno(), size, int(self.offsets[index]))
        except OSError as error:
            raise cannot_read(error) from error
        if len(content) < size:
            raise UserError("truncated")
        return Item(content, int(self.labels[index]), name, ENDINGS[self.endings[index]])


@dataclass(frozen=True)
class Index:
    """What one shard holds."""

    keys: Names
    labels: Names  # the text in each `.cls`
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    endings: NDArray[np.uint8]
    dotted: Names  # images that are left out, as their key would have a dot


def find_shards(folder: Path) -> list[str]:
    """The tar files in the folder and in its `train/ val/ test/`, if no folder in it has images."""
    tops = [path for path in folder.iterdir() if not hidden(path.name)]
    folders = [path for path in tops if path.is_dir() and path.name.casefold() in SPLITS]
    inner = [path for top in folders for path in top.iterdir() if not hidden(path.name)]
    tars = [path for path in tops + inner if path.suffix.lower() == ".tar" and path.is_file()]
    if not tars or any(found.names for found in walk(folder, {}) if found.parts):
        return []
    return sorted(str(path.relative_to(folder)) for path in tars)


def open_shards(
    path: Path,
    shards: list[str],
    *,
    classes: Sequence[str] | None,
    split: bool,
    progress: bool,
) -> Shards:
    """All images of the shards; the labels are the classes, unless their names are given."""
    path = path.absolute()
    given = splits_of(shards)
    with bar("indexing shards", len(shards), show=progress) as advance:
        indices = []
        for shard in shards:
            indices.append(index_of(path / shard))
            advance(1)
    counts = [len(index.keys) for index in indices]
    texts = [tidy(label) for index in indices for label in index.labels]
    if not texts:
        wanted = "pairs of key.jpg and key.cls, without a dot in the key"
        raise UserError(f"no images in the shards of {path}; wanted {wanted}")
    both = list(zip(shards, indices, strict=True))
    ids = Names(f"{shard}:{key}" for shard, index in both for key in index.keys)
    dotted = [f"{shard}:{name}" for shard, index in both for name in index.dotted]
    names, label = label_index(path, texts, ids, classes)
    dates = [(path / shard).stat().st_mtime_ns for shard in shards]
    source = Shards(
        name=path.resolve().name or "data",
        path=path,
        classes=names,
        labels=np.array([label[text] for text in texts], np.int64),
        splits=np.repeat(np.array(given, "<U5"), counts),
        ids=ids,
        sizes=np.concatenate([index.sizes for index in indices]),
        dates=np.repeat(np.array(dates, np.int64), counts),
        ignored=dict.fromkeys(dotted, "more than one dot in its name, and a key has none"),
        shards=tuple(shards),
        which=np.repeat(np.arange(len(shards)), counts),
        offsets=np.concatenate([index.offsets for index in indices]),
        endings=np.concatenate([index.endings for index in indices]),
    )
    return settle(source, split=split, progress=progress)


def label_index(
    path: Path, texts: Iterable[str], ids: Sequence[str], classes: Sequence[str] | None
) -> tuple[tuple[str, ...], dict[str, int]]:
    """All classes, and which of them each text found in a `.cls` means."""
    found: dict[str, str] = {}
    for text, place in zip(texts, ids, strict=True):
        found.setdefault(text, place)
    listed = path / "classes.txt"
    if not listed.is_file():
        return match(found, classes)
    try:
        lines = listed.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {listed}: {error}") from error
    names, index = match(found, unique([tidy(line) for line in lines if line.strip()]))
    if classes is None:
        return names, index
    meant = {text: names[number] for text, number in index.items()}
    every, theirs = match({name: found[text] for text, name in meant.items()}, classes)
    return every, {text: theirs[name] for text, name in meant.items()}


def splits_of(shards: list[str]) -> list[str]:
    """The split that each shard's folder or name tells, or "" for all of them."""
    given = []
    for shard in shards:
        folder, name = os.path.split(shard)
        words = [folder] if folder else re.split("[^a-z]+", name.casefold())
        named = {SPLITS[word.casefold()] for word in words if word.casefold() in SPLITS}
        if len(named) > 1:
            raise UserError(f"shard {shard} is named after two splits; give it one")
        given.append(named.pop() if named else "")
    if "" in given and any(given):
        raise UserError(
            f"shard {shards[given.index('')]} has no split in its name, though others have"
        )
    return given


def index_of(shard: Path) -> Index:
    """What a shard holds: as kept before, while the shard keeps its size and date."""
    status = shard.stat()
    stamp = np.array([LAYOUT, status.st_size, status.st_mtime_ns], np.int64)
    saved = recall("shards", shard)
    if saved and np.array_equal(saved["stamp"], stamp):
        keys = Names.unpack(saved["keys"], saved["key_starts"])
        labels = Names.unpack(saved["labels"], saved["label_starts"])
        dotted = Names.unpack(saved["dotted"], saved["dotted_starts"])
        return Index(keys, labels, saved["offsets"], saved["sizes"], saved["endings"], dotted)
    index = read_index(shard)
    arrays: dict[str, np.ndarray] = {"stamp": stamp}
    arrays |= {"offsets": index.offsets, "sizes": index.sizes, "endings": index.endings}
    arrays |= {"keys": index.keys.array, "key_starts": index.keys.starts}
    arrays |= {"labels": index.labels.array, "label_starts": index.labels.starts}
    arrays |= {"dotted": index.dotted.array, "dotted_starts": index.dotted.starts}
    keep("shards", shard, arrays)
    return index


def read_index(shard: Path) -> Index:
    """Reads every header of a tar file, and the text of every `.cls`."""
    images: dict[str, tuple[int, int, int]] = {}
    labels: dict[str, str] = {}
    dotted: list[tuple[str, str]] = []  # the name of a picture, and the key it would have
    try:
        with open(shard, "rb") as file:
            for member in members(file):
                add_member(member, file, images, labels, dotted)
    except (tarfile.TarError, OSError, ValueError, EOFError) as error:
        raise UserError(f"shard {shard}: {error}") from error
    for alone, words in ((images.keys() - labels, ".cls"), (labels.keys() - images, "image")):
        if alone:
            raise UserError(f"shard {shard}: {min(alone)} has no {words}")
    places = np.array(list(images.values()), np.int64).reshape(-1, 3)
    return Index(
        Names(images),
        Names(labels[key] for key in images),
        places[:, 0].copy(),
        places[:, 1].copy(),
        places[:, 2].astype(np.uint8),
        Names(name for name, key in dotted if key not in images),
    )


def members(file: BinaryIO) -> Iterable[tarfile.TarInfo]:
    """The plain files of a tar file that is whole: tarfile itself takes damage for the end."""
    end = os.fstat(file.fileno()).st_size
    with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # they would fill the memory
            if member.size < 0 or member.offset_data + member.size > end:
                raise UserError(f"truncated in {member.name}")
            if member.isreg() and not member.issparse():
                yield member
        after = os.pread(file.fileno(), tarfile.BLOCKSIZE, archive.offset)
        if after.strip(b"\0"):
            raise UserError(f"damaged at byte {archive.offset}")
        if len(after) < tarfile.BLOCKSIZE:  # some programs write one empty block, some two or more
            raise UserError("truncated: no empty block at its end; copy or pack it again")


def add_member(
    member: tarfile.TarInfo,
    file: BinaryIO,
    images: dict[str, tuple[int, int, int]],
    labels: dict[str, str],
    dotted: list[tuple[str, str]],
) -> None:
    """Notes a member as an image, with its offset, size and ending, as a label, or as left out."""
    folder, name = os.path.split(member.name)
    stem, _, suffix = name.partition(".")
    if hidden(name):
        return
    key, suffix = os.path.join(folder, stem), f".{suffix.lower()}"
    if suffix in SUFFIXES:
        if key in images:
            raise UserError(f"two images are called {key}")
        images[key] = member.offset_data, member.size, ENDINGS.index(suffix)
    elif suffix == ".cls":
        if key in labels:
            raise UserError(f"two labels are called {key}")
        if member.size > LABEL_BYTES:
            raise UserError(f"{member.name} has {member.size} bytes; wanted the number of a class")
        labels[key] = os.pread(file.fileno(), member.size, member.offset_data).decode().strip()
        if not labels[key]:
            raise UserError(f"{member.name} has no label")
    elif suffix.endswith(ENDINGS):
        dotted.append((member.name, key))  # beside an image of that key it is its mask or alike
