"""Which images train, validate and test: given, or decided by each image's own bytes."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitrail.data.source import Source
from vitrail.data.sources.names import Names
from vitrail.data.sources.notes import keep, recall
from vitrail.display.progress import bar
from vitrail.errors import Refused, UserError

SPLITS = {  # what folders, shards and tables call a split
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}
SHARE = 2**64 // 10  # of all hashes: a tenth for each split that is taken from the training images
CHUNK = 64  # items that one thread hashes at a time
THREADS = 4  # more than cores: they wait for the disk most of the time

AnySource = TypeVar("AnySource", bound=Any)  # a dataclass that is a Source


def settle(source: AnySource, *, split: bool, progress: bool) -> AnySource:
    """The source with a split for each item, where `splits` so far holds the given ones or "".

    Without any, or with "train" alone, a tenth goes to test and a tenth to val; of train and test,
    a tenth of train goes to val; what else is given stays. An item moves by the hash of its bytes,
    so that copies stay together and adding images moves none that were there.
    """
    given = source.splits
    if not split:
        return replace(source, splits=np.where(given == "", "test", given))
    if len(source.classes) < 2:
        raise UserError(
            f"{source.name} has one class only, {source.classes[0]!r}; at least 2 are needed"
        )
    parts: tuple[str, ...] = ()
    kinds, pool = set(np.unique(given).tolist()), np.flatnonzero(given == "train")
    if kinds <= {"", "train"}:
        parts, pool = ("test", "val"), np.arange(len(source))
    elif kinds == {"train", "test"}:
        parts = ("val",)
    labels = source.labels[pool]
    check_counts(source, labels)
    if not parts:
        return source
    hashes = digests(source, pool, progress=progress)[:, :8].copy().view(">u8")[:, 0]
    splits = np.where(given == "", "train", given).astype("<U5")
    splits[pool] = carve(hashes.astype(np.uint64), labels, source.classes, parts)
    return replace(source, splits=splits)


def check_counts(source: Source, labels: NDArray[np.int64]) -> None:
    if not len(labels):
        raise UserError(f"{source.name} has no training images, only {source.splits[0]}")
    counts = np.bincount(labels, minlength=len(source.classes))
    if not counts.all():
        name = source.classes[int(counts.argmin())]
        raise UserError(
            f"class {name!r} of {source.name} has no training images; add some or remove the class"
        )


def carve(
    hashes: NDArray[np.uint64],
    labels: NDArray[np.int64],
    classes: Sequence[str],
    parts: Sequence[str],
) -> NDArray[np.str_]:
    """Gives each of `parts` a tenth of the range of hashes, from the lowest on; the rest trains.

    A class that would be left without one of them gives its lowest hashes.
    """
    rank = np.empty(len(hashes), np.int64)  # the position in (*parts, "train")
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], np.arange(len(classes) + 1))
    for number, name in enumerate(classes):
        items = order[starts[number] : starts[number + 1]]
        distinct, inverse = np.unique(hashes[items], return_inverse=True)
        if len(distinct) <= len(parts):
            raise UserError(
                f"class {name!r} has {len(distinct)} different image{'s' * (len(distinct) != 1)}; "
                f"at least {len(parts) + 1} are needed, for train and {' and '.join(parts)}"
            )
        rank[items] = np.searchsorted(ends(distinct, len(parts)), inverse, side="right")
    distinct, inverse = np.unique(hashes, return_inverse=True)
    lowest = np.full(len(distinct), len(parts))
    np.minimum.at(lowest, inverse, rank)  # copies in several classes stay together too
    together = lowest[inverse]
    for number, name in enumerate(classes):
        if len(np.unique(together[order[starts[number] : starts[number + 1]]])) <= len(parts):
            raise UserError(
                f"class {name!r} shares too many of its images with other classes to be split; "
                f"remove the copies"
            )
    splits: NDArray[np.str_] = np.array([*parts, "train"], dtype="<U5")[together]
    return splits


def ends(distinct: NDArray[np.uint64], parts: int) -> list[int]:
    """Where each part of one class's sorted hashes ends, none of them empty, nor what is left."""
    found: list[int] = []
    for part in range(1, parts + 1):
        end = int(np.searchsorted(distinct, np.uint64(part * SHARE)))
        at_least = found[-1] + 1 if found else 1
        found.append(min(max(end, at_least), len(distinct) - 1 - parts + part))
    return found


def digest(content: bytes | np.ndarray) -> bytes:
    """16 bytes that are equal for equal files or equal pixels."""
    data = content if isinstance(content, bytes) else np.ascontiguousarray(content).data
    return hashlib.blake2b(data, digest_size=16).digest()


def digests(
    source: Source, which: NDArray[np.int64] | None = None, *, progress: bool = True
) -> NDArray[np.uint8]:
    """One row of 16 bytes for each of the items in `which`: equal rows are equal items.

    What was read before is remembered in the cache folder as long as a file keeps its size and
    date. An item that cannot be read gets the digest of its name.
    """
    which = np.arange(len(source)) if which is None else which
    known, rows = remembered(source, which)
    missing = np.flatnonzero(~known)
    try:
        with bar("reading images", len(missing), show=progress) as advance:
            for row, found in zip(missing, read_digests(source, which[missing]), strict=True):
                if found is not None:
                    rows[row] = np.frombuffer(found, np.uint8)
                    known[row] = True
                advance(1)
    finally:  # also when the user loses patience
        if known[missing].any():
            remember(source, which[known], rows[known])
    for row in np.flatnonzero(~known):
        rows[row] = np.frombuffer(digest(os.fsencode(source.ids[int(which[row])])), np.uint8)
    return rows


def read_digests(source: Source, which: NDArray[np.int64]) -> Iterator[bytes | None]:
    """The digest of each item in `which`, in order; None where it cannot be read."""

    def read(chunk: NDArray[np.int64]) -> list[bytes | None]:
        return [item_digest(source, index) for index in chunk.tolist()]

    chunks = (which[start : start + CHUNK] for start in range(0, len(which), CHUNK))
    if source.path is None:  # pixels in memory: threads would only get in each other's way
        for chunk in chunks:
            yield from read(chunk)
        return
    pool = ThreadPoolExecutor(THREADS)
    try:
        for found in pool.map(read, chunks):
            yield from found
    finally:
        pool.shutdown(cancel_futures=True)


def item_digest(source: Source, index: int) -> bytes | None:
    try:
        return digest(source[index].content)
    except Refused:
        raise
    except UserError:
        return None


def remembered(
    source: Source, which: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
    """Which digests an earlier opening has left, and all rows, zero where there is none."""
    rows = np.zeros((len(which), 16), np.uint8)
    saved = recall("digests", source.path) if source.path is not None else {}
    if not saved:
        return np.zeros(len(which), bool), rows
    names = Names.unpack(saved["names"], saved["starts"])
    found = which if names == source.ids else places(source, which, names)
    same = saved["sizes"][found] == source.sizes[which]
    known = (found >= 0) & same & (saved["dates"][found] == source.dates[which])
    rows[known] = saved["digests"][found[known]]
    return known, rows


def places(source: Source, which: NDArray[np.int64], names: Names) -> NDArray[np.int64]:
    """Where each item stands in `names`; -1 if it does not."""
    place = {name: row for row, name in enumerate(names)}
    return np.array([place.get(source.ids[int(number)], -1) for number in which], np.int64)


def remember(source: Source, which: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
    if source.path is None:
        return
    names = Names(source.ids[int(number)] for number in which)
    arrays = {"names": names.array, "starts": names.starts, "digests": rows}
    arrays |= {"sizes": source.sizes[which], "dates": source.dates[which]}
    keep("digests", source.path, arrays)
