"""Which images of a set are the same, or nearly, and whether splits and labels agree on them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.audit.examine import Examination
from vitrail.audit.similar import alike

Groups = list[list[int]]  # items that belong together, in order


@dataclass(frozen=True, kw_only=True)
class Copies:
    duplicates: Groups  # same content in the same split
    leaks: Groups  # same content in several splits
    conflicts: Groups  # same content under several labels
    near_duplicates: Groups  # other content that looks alike, in whatever split
    near_leaks: Groups  # those of them that lie in several splits


def find_copies(examination: Examination) -> Copies:
    """Images that cannot be read are no copies, those of one colour no near ones."""
    source, rows = examination.source, examination.rows
    content = numbered(rows["digest"])
    read, photos, small = map(examination.items, ("read", "photo", "small"))
    same = together(content[read], read)
    near = together(alike(rows["look"][photos]), photos) + together(rows["look"][small], small)
    near = sorted(group for group in near if differ(group, content))
    return Copies(
        duplicates=[part for group in same for part in cut(group, source.splits) if len(part) > 1],
        leaks=[group for group in same if differ(group, source.splits)],
        conflicts=[group for group in same if differ(group, source.labels)],
        near_duplicates=near,
        near_leaks=[group for group in near if differ(group, source.splits)],
    )


def numbered(digests: NDArray[np.uint64]) -> NDArray[np.int64]:
    """A number for each row, the same for equal rows."""
    order = np.lexsort(digests.T)
    new = (digests[order[1:]] != digests[order[:-1]]).any(axis=1)
    numbers = np.zeros(len(order), np.int64)
    numbers[order[1:]] = new.cumsum()
    return numbers


def together(keys: NDArray[Any], items: NDArray[np.int64]) -> Groups:
    """The items that have the same key as another one."""
    order = np.argsort(keys, kind="stable")
    keys, items = keys[order], items[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    ends = np.append(starts[1:], len(keys))
    several = np.flatnonzero(ends - starts > 1)
    return sorted(items[starts[k] : ends[k]].tolist() for k in several)


def differ(group: list[int], values: NDArray[Any]) -> bool:
    return bool((values[group] != values[group[0]]).any())


def cut(group: list[int], values: NDArray[Any]) -> Groups:
    """The group in parts of equal value."""
    found: dict[Any, list[int]] = {}
    for item in group:
        found.setdefault(values[item], []).append(item)
    return list(found.values())
