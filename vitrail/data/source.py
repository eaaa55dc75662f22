"""The interface that every data set has, whatever it is read from."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from vitrail.data.config import LabelKind
from vitrail.data.reading.contents import expect_reads
from vitrail.data.sources.store import Location

Split = Literal["train", "val", "test"]
EvaluationSplit = Literal["train", "val", "test", "all"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
UNLABELLED = "unlabelled"  # the only class of a data set without labels
NO_LABEL = -1  # the class index of an image without label, where other images have one
SAMPLE_SIZE = 64  # images whose median size and usual channels decide on the recipe


@dataclass(frozen=True, slots=True)
class Item:
    """One labelled image as the data set stores it; `load_image` decodes its content."""

    content: bytes | np.ndarray  # an encoded file, or pixels (height, width, channels)
    label: Any  # class index; multi-label: a row of 0 and 1
    id: str  # a stable name: "cat/1.jpg", "train-000.tar:0007", "cifar10/train/00017"
    suffix: str = ""  # of the file name, in lower case: ".jpg"; empty without a file


class Source(Protocol):
    """A data set: indexable, safe to pickle and cheap to copy, without open files.

    A source that reads files has a `ContentBuffer` as `contents`, so that a file that is hashed,
    sampled and decoded is read once.
    """

    @property
    def name(self) -> str:
        """A short name, used in run names: "flowers", "cifar10"."""

    @property
    def path(self) -> Location | None:
        """The folder, table or URL it was opened from; None if the pixels are in memory."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def labels(self) -> NDArray[Any]:
        """The class index of each item, -1 without label; multi-label: rows of 0 and 1."""

    @property
    def splits(self) -> NDArray[np.str_]:
        """ "train", "val" or "test" for each item."""

    @property
    def ids(self) -> Sequence[str]:
        """A stable and unique name for each item."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The size of each item in bytes."""

    @property
    def mtimes(self) -> NDArray[np.int64]:
        """Modification time of each item's file, in nanoseconds since 1970; 0 without a file.

        In a store, a number that changes with the version of the file.
        """

    @property
    def ignored(self) -> Mapping[str, str]:
        """Files in the folder that are not part of the data set, each with the reason."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item:
        """Reads one item; a `UserError` says why it cannot be read, without naming it."""


def is_labelled(source: Source) -> bool:
    """Whether the images have labels."""
    return source.classes != (UNLABELLED,)


def is_multi_label(source: Source) -> bool:
    """Whether an image may have any number of labels."""
    return source.labels.ndim == 2


def label_kind(source: Source) -> LabelKind:
    """How many labels an image has."""
    if not is_labelled(source):
        return "none"
    if is_multi_label(source):
        return "multi"
    return "partial" if (source.labels == NO_LABEL).any() else "single"


def count_labels(source: Source, items: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of these items that have each class."""
    labels = source.labels[items]
    if labels.ndim == 2:
        counts: NDArray[np.int64] = labels.sum(axis=0, dtype=np.int64)
        return counts
    return np.bincount(labels[labels != NO_LABEL], minlength=len(source.classes))


def label_keys(source: Source) -> NDArray[np.int64]:
    """A number for each item, equal for items with the same labels."""
    if not is_multi_label(source):
        keys: NDArray[np.int64] = source.labels
        return keys
    return np.unique(source.labels, axis=0, return_inverse=True)[1].reshape(-1)


def has_label(source: Source, label: int) -> NDArray[np.bool_]:
    """Whether each item has this class."""
    mask: NDArray[np.bool_] = (
        source.labels[:, label] > 0 if is_multi_label(source) else source.labels == label
    )
    return mask


def label_names(source: Source, item: int) -> str:
    """The label of an item, or its labels separated by commas."""
    label = source.labels[item]
    if np.ndim(label) == 0:
        return "" if label == NO_LABEL else source.classes[int(label)]
    return ", ".join(source.classes[index] for index in np.flatnonzero(label)) or "none"


def split_indices(source: Source, split: Split | Literal["all"]) -> NDArray[np.int64]:
    """Returns the indices of one split's items in the source, in order."""
    if split == "all":
        return np.arange(len(source))
    return np.flatnonzero(source.splits == split)


def sample_indices(source: Source) -> NDArray[np.int64]:
    """Returns a fixed random sample of the training images, for statistics of the data set.

    The contents of these items stay in the source's buffer, for the decoding that follows.
    """
    train = split_indices(source, "train")
    indices = np.random.default_rng(0).permutation(train)[:SAMPLE_SIZE]
    expect_reads(source, indices)
    return indices


def fingerprint(source: Source, *, mtimes: bool = False) -> str:
    """Computes a checksum that changes with added, removed, renamed, relabelled or resized items.

    With `mtimes` it also changes with the modification times, so it detects edits of the same size,
    but the same data copied to another machine differs too: right for a cache, too strict for a
    resume.
    """
    checksum = hashlib.sha256()
    for text in (*source.classes, "", *source.ids):
        checksum.update(text.encode("utf-8", "surrogateescape") + b"\0")
    arrays = [source.labels, source.sizes, *([source.mtimes] if mtimes else [])]
    for numbers in arrays:
        checksum.update(np.ascontiguousarray(numbers, "<i8").tobytes())
    for name in ("val", "test"):
        checksum.update(np.packbits(source.splits == name).tobytes())
    return checksum.hexdigest()
