"""What every data set looks like from outside, whatever it was read from."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "val", "test"]
SAMPLE = 64  # images that stand for all


@dataclass(frozen=True, slots=True)
class Item:
    """One labelled image as the data set holds it; `load_image` makes pixels of its content."""

    content: bytes | np.ndarray  # an encoded file, or pixels (height, width, channels)
    label: int
    id: str  # a stable name: "cat/1.jpg", "train-000.tar:0007", "cifar10/train/00017"
    suffix: str = ""  # of the file's name, in small letters: ".jpg"; none where there is no file


class Source(Protocol):
    """A data set: indexable, safe to pickle, and cheap to copy: it holds no open file."""

    @property
    def name(self) -> str:
        """Short, for run names: "flowers", "cifar10"."""

    @property
    def path(self) -> Path | None:
        """The folder or table it was opened from; None if it holds its pixels."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def labels(self) -> NDArray[np.int64]: ...

    @property
    def splits(self) -> NDArray[np.str_]:
        """ "train", "val" or "test" for each item."""

    @property
    def ids(self) -> Sequence[str]:
        """A stable and unique name for each item."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each item."""

    @property
    def dates(self) -> NDArray[np.int64]:
        """When each item's file was changed, in nanoseconds since 1970; 0 if it has none."""

    @property
    def ignored(self) -> Mapping[str, str]:
        """What lies in the folder and is no part of the set, and why."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item:
        """Reads one item; `UserError` says why it cannot be read, without naming it."""


def indices(source: Source, split: Split | Literal["all"]) -> NDArray[np.int64]:
    """The positions of one split's items in the source, in order."""
    if split == "all":
        return np.arange(len(source))
    return np.flatnonzero(source.splits == split)


def sample(source: Source) -> NDArray[np.int64]:
    """Some training images, always the same ones, whose sizes and channels stand for all."""
    return np.random.default_rng(0).permutation(indices(source, "train"))[:SAMPLE]


def fingerprint(source: Source, *, dates: bool = False) -> str:
    """A checksum that notices added, removed, renamed, relabelled or resized items.

    With `dates` also edited ones of the same size, but then the same data copied to another
    machine differs too: right for a cache, too strict for a resume.
    """
    checksum = hashlib.sha256()
    for text in (*source.classes, "", *source.ids):
        checksum.update(text.encode("utf-8", "surrogateescape") + b"\0")
    arrays = [source.labels, source.sizes, *([source.dates] if dates else [])]
    for numbers in arrays:
        checksum.update(np.ascontiguousarray(numbers, "<i8").tobytes())
    for name in ("val", "test"):
        checksum.update(np.packbits(source.splits == name).tobytes())
    return checksum.hexdigest()
