"""Duplicates and near-duplicates, and whether their splits and labels agree."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.audit.perceptual_hash import group_similar
from vitrail.audit.scan import Scan
from vitrail.data.source import label_keys

Groups = list[list[int]]  # indices of items that belong together, in order


@dataclass(frozen=True, kw_only=True)
class DuplicateGroups:
    duplicates: Groups  # same content in the same split
    leaks: Groups  # same content in several splits
    conflicts: Groups  # same content with several labels
    near_duplicates: Groups  # similar images of different content, in any split
    near_leaks: Groups  # those of them that are in several splits


def find_duplicates(scan: Scan) -> DuplicateGroups:
    """Compares all readable images; images of a single colour are never near-duplicates."""
    source, rows = scan.source, scan.rows
    labels = label_keys(source)
    content = number_rows(rows["content_hash"])
    readable, hashed, small = map(scan.items, ("readable", "hashed", "small"))
    same = group_by_key(content[readable], readable)
    near = group_by_key(group_similar(rows["image_hash"][hashed]), hashed)
    near += group_by_key(rows["image_hash"][small], small)
    near = sorted(group for group in near if values_differ(group, content))
    return DuplicateGroups(
        duplicates=[
            part for group in same for part in partition(group, source.splits) if len(part) > 1
        ],
        leaks=[group for group in same if values_differ(group, source.splits)],
        conflicts=[group for group in same if values_differ(group, labels)],
        near_duplicates=near,
        near_leaks=[group for group in near if values_differ(group, source.splits)],
    )


def number_rows(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """A number for each row, the same for equal rows."""
    order = np.lexsort(hashes.T)
    new = (hashes[order[1:]] != hashes[order[:-1]]).any(axis=1)
    numbers = np.zeros(len(order), np.int64)
    numbers[order[1:]] = new.cumsum()
    return numbers


def group_by_key(keys: NDArray[Any], items: NDArray[np.int64]) -> Groups:
    """The items whose key occurs more than once, grouped by it."""
    order = np.argsort(keys, kind="stable")
    keys, items = keys[order], items[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    ends = np.append(starts[1:], len(keys))
    repeated = np.flatnonzero(ends - starts > 1)
    return sorted(items[starts[k] : ends[k]].tolist() for k in repeated)


def values_differ(group: list[int], values: NDArray[Any]) -> bool:
    return bool((values[group] != values[group[0]]).any())


def partition(group: list[int], values: NDArray[Any]) -> Groups:
    """The group in parts of equal value."""
    parts: dict[Any, list[int]] = {}
    for item in group:
        parts.setdefault(values[item], []).append(item)
    return list(parts.values())
