"""Assigns images to train, val and test: as given, or by a hash of each file."""

import hashlib
import math
import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitrail.data.reading.contents import expect_reads
from vitrail.data.source import UNLABELLED, Source, count_labels, is_labelled, is_multi_label
from vitrail.data.sources.index_cache import load_arrays, save_arrays
from vitrail.data.sources.names import PackedNames
from vitrail.display.progress import progress_bar
from vitrail.errors import OutOfResources, UserError

SPLIT_ALIASES = {  # names of a split in folders, shards and tables
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}
TENTH = 2**64 // 10  # of the range of hashes: val and test get 10 % of the images each
HASH_CHUNK = 64  # items per task of a hashing thread
HASH_THREADS = 4  # may exceed the cores: threads wait for the disk most of the time

AnySource = TypeVar("AnySource", bound=Any)  # a dataclass that implements Source


def assign_splits(source: AnySource, *, split: bool, progress: bool) -> AnySource:
    """Returns the source with a split for each item; `splits` holds the given ones or "".

    If no split is given, or only "train", 10 % of the images become test and 10 % val; if train
    and test are given, 10 % of train become val; otherwise the given splits stay. The hash of a
    file decides, so copies get the same split, and adding images moves existing ones only in a
    class too small for every split to have a hash in its range. With `split` false, items without
    a split become test.
    """
    given = source.splits
    if not split:
        return replace(source, splits=np.where(given == "", "test", given))
    multi = is_multi_label(source)
    if len(source.classes) < 2 and not multi and is_labelled(source):
        raise UserError(
            f"{source.name} has only one class, {source.classes[0]!r}; training needs at least 2"
        )
    held_out: tuple[str, ...] = ()
    kinds, pool = set(np.unique(given).tolist()), np.flatnonzero(given == "train")
    if kinds <= {"", "train"}:
        held_out, pool = ("test", "val"), np.arange(len(source))
    elif kinds == {"train", "test"}:
        held_out = ("val",)
    labels = source.labels[pool]
    check_training_counts(source, pool)
    if not held_out:
        return source
    hashes = hash_items(source, pool, progress=progress)[:, :8].copy().view(">u8")[:, 0]
    splits = np.where(given == "", "train", given).astype("<U5")
    divide = split_labels_by_hash if multi else split_by_hash
    splits[pool] = divide(hashes.astype(np.uint64), labels, source.classes, held_out)
    return replace(source, splits=splits)


def check_training_counts(source: Source, items: NDArray[np.int64]) -> None:
    if not len(items):
        raise UserError(
            f"{source.name} has no training images, only {source.splits[0]} images; "
            f"add a train split"
        )
    counts = count_labels(source, items)
    if not counts.all():
        name = source.classes[int(counts.argmin())]
        raise UserError(
            f"class {name!r} of {source.name} has no training images; add some or remove the class"
        )


def split_by_hash(
    hashes: NDArray[np.uint64],
    labels: NDArray[np.int64],
    classes: Sequence[str],
    held_out: Sequence[str],
) -> NDArray[np.str_]:
    """Assigns each of `held_out` a tenth of the range of hashes, lowest first; the rest is train.

    A class without an image in one of these ranges contributes its lowest hashes, so that every
    split contains every class.
    """
    rank = np.empty(len(hashes), np.int64)  # the position in (*held_out, "train")
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], np.arange(len(classes) + 1))
    for number, name in enumerate(classes):
        items = order[starts[number] : starts[number + 1]]
        distinct, inverse = np.unique(hashes[items], return_inverse=True)
        if len(distinct) <= len(held_out):
            whose = "the data" if name == UNLABELLED else f"class {name!r}"
            where = f"{', '.join(['train', *held_out[:-1]])} and {held_out[-1]}"
            raise UserError(
                f"{whose} has {len(distinct)} different image{'s' * (len(distinct) != 1)}; "
                f"it needs at least {len(held_out) + 1}, one each for {where}; add images"
            )
        boundaries = find_boundaries(distinct, len(held_out))
        rank[items] = np.searchsorted(boundaries, inverse, side="right")
    distinct, inverse = np.unique(hashes, return_inverse=True)
    lowest = np.full(len(distinct), len(held_out))
    np.minimum.at(lowest, inverse, rank)  # copies in several classes get the same split too
    rank = lowest[inverse]
    for number, name in enumerate(classes):
        if len(np.unique(rank[order[starts[number] : starts[number + 1]]])) <= len(held_out):
            raise UserError(
                f"class {name!r} shares too many of its images with other classes to be split; "
                f"remove the copies"
            )
    splits: NDArray[np.str_] = np.array([*held_out, "train"], dtype="<U5")[rank]
    return splits


def split_labels_by_hash(
    hashes: NDArray[np.uint64],
    labels: NDArray[np.uint8],
    classes: Sequence[str],
    held_out: Sequence[str],
) -> NDArray[np.str_]:
    """The same for images with any number of labels; copies get the same split.

    A split without a positive of a class gets the lowest hash of that class from the largest
    split, rare classes first, so that every split contains every class.
    """
    distinct, inverse = np.unique(hashes, return_inverse=True)
    hot = np.zeros((len(distinct), len(classes)), bool)
    np.logical_or.at(hot, inverse, labels.astype(bool))
    rank = np.minimum(distinct // np.uint64(TENTH), len(held_out)).astype(np.int64)
    for number in np.argsort(hot.sum(axis=0), kind="stable").tolist():
        positives = np.flatnonzero(hot[:, number])
        if len(positives) <= len(held_out):
            raise UserError(
                f"class {classes[number]!r} has {len(positives)} different positive "
                f"image{'s' * (len(positives) != 1)}; it needs at least {len(held_out) + 1}, for "
                f"train and {' and '.join(held_out)}"
            )
        for wanted in range(len(held_out) + 1):
            counts = np.bincount(rank[positives], minlength=len(held_out) + 1)
            if not counts[wanted]:
                rank[positives[rank[positives] == counts.argmax()][0]] = wanted
    splits: NDArray[np.str_] = np.array([*held_out, "train"], dtype="<U5")[rank[inverse]]
    return splits


def find_boundaries(distinct: NDArray[np.uint64], held_out: int) -> list[int]:
    """Returns where each held-out split ends in one class's sorted hashes; no split is empty."""
    boundaries: list[int] = []
    for number in range(1, held_out + 1):
        end = int(np.searchsorted(distinct, np.uint64(number * TENTH)))
        lowest = boundaries[-1] + 1 if boundaries else 1
        boundaries.append(min(max(end, lowest), len(distinct) - 1 - held_out + number))
    return boundaries


def keep_labels(source: AnySource, fraction: float) -> AnySource:
    """Leaves only this fraction of the training images of each class, at least one, in a split.

    A hash of each name decides, so that a smaller fraction is a part of a larger one.
    """
    if fraction == 1:
        return source
    if is_multi_label(source):
        raise UserError("a part of the labels can be used only if each image has one label")
    splits = source.splits.copy()
    for label in range(len(source.classes)):
        items = np.flatnonzero((source.splits == "train") & (source.labels == label))
        order = sorted(items.tolist(), key=lambda item: hash_content(source.ids[item].encode()))
        splits[order[max(1, math.ceil(fraction * len(order))) :]] = ""
    return replace(source, splits=splits)


def use_as_training(source: AnySource, held_out: Collection[str] = ()) -> AnySource:
    """Makes images without a split training images, except those with the names `held_out`."""
    splits = np.where(source.splits == "", "train", source.splits)
    if held_out:
        splits[[name in held_out for name in source.ids]] = ""
    return replace(source, splits=splits)


def hash_content(content: bytes | np.ndarray) -> bytes:
    """Returns 16 bytes, equal for equal files or equal pixels."""
    data = content if isinstance(content, bytes) else np.ascontiguousarray(content).data
    return hashlib.blake2b(data, digest_size=16).digest()


def hash_items(
    source: Source, indices: NDArray[np.int64] | None = None, *, progress: bool = True
) -> NDArray[np.uint8]:
    """Returns one row of 16 bytes for each of the items: equal rows are equal items.

    The cache folder remembers the digest of a file as long as its size and modification time stay
    the same. An unreadable item gets the digest of its name. The contents that are read stay in
    the source's buffer, for the decoding that follows.
    """
    indices = np.arange(len(source)) if indices is None else indices
    known, rows = load_digests(source, indices)
    missing = np.flatnonzero(~known)
    expect_reads(source, indices[missing])
    try:
        with progress_bar("reading images", len(missing), show=progress) as advance:
            digests = read_and_hash(source, indices[missing])
            for row, digest in zip(missing, digests, strict=True):
                if digest is not None:
                    rows[row] = np.frombuffer(digest, np.uint8)
                    known[row] = True
                advance(1)
    finally:  # save what was hashed before an interruption, too
        if known[missing].any():
            save_digests(source, indices[known], rows[known])
    for row in np.flatnonzero(~known):
        name = os.fsencode(source.ids[int(indices[row])])
        rows[row] = np.frombuffer(hash_content(name), np.uint8)
    return rows


def read_and_hash(source: Source, indices: NDArray[np.int64]) -> Iterator[bytes | None]:
    """Yields the digest of each item, in order; None where it cannot be read."""

    def hash_chunk(chunk: NDArray[np.int64]) -> list[bytes | None]:
        return [hash_item(source, index) for index in chunk.tolist()]

    chunks = (indices[start : start + HASH_CHUNK] for start in range(0, len(indices), HASH_CHUNK))
    if source.path is None:  # pixels in memory: threads would only compete for the interpreter
        for chunk in chunks:
            yield from hash_chunk(chunk)
        return
    pool = ThreadPoolExecutor(HASH_THREADS)
    try:
        for digests in pool.map(hash_chunk, chunks):
            yield from digests
    finally:
        pool.shutdown(cancel_futures=True)


def hash_item(source: Source, index: int) -> bytes | None:
    try:
        return hash_content(source[index].content)
    except OutOfResources:
        raise
    except UserError:
        return None


def load_digests(
    source: Source, indices: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
    """Returns which digests the cache folder has, and one row for each item, zero where unknown."""
    rows = np.zeros((len(indices), 16), np.uint8)
    saved = load_arrays("digests", source.path) if source.path is not None else {}
    if not saved:
        return np.zeros(len(indices), bool), rows
    names = PackedNames.unpack(saved["names"], saved["starts"])
    positions = indices if names == source.ids else find_rows(source, indices, names)
    known = positions >= 0
    known &= saved["sizes"][positions] == source.sizes[indices]
    known &= saved["dates"][positions] == source.mtimes[indices]
    rows[known] = saved["digests"][positions[known]]
    return known, rows


def find_rows(source: Source, indices: NDArray[np.int64], names: PackedNames) -> NDArray[np.int64]:
    """Returns the position of each item's name in `names`; -1 if it is absent."""
    rows = {name: row for row, name in enumerate(names)}
    return np.array([rows.get(source.ids[int(number)], -1) for number in indices], np.int64)


def save_digests(source: Source, indices: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
    """Writes digests to the cache folder, for the next opening."""
    if source.path is None:
        return
    names = PackedNames(source.ids[int(number)] for number in indices)
    arrays = {"names": names.array, "starts": names.starts, "digests": rows}
    arrays |= {"sizes": source.sizes[indices], "dates": source.mtimes[indices]}
    save_arrays("digests", source.path, arrays)
