"""The problems of a data set: how severe each one is, and what to do about it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.audit.duplicates import DuplicateGroups, Groups, partition
from vitrail.audit.scan import FORMATS, UNUSUAL, Scan
from vitrail.data.source import SPLITS, Source, label_keys
from vitrail.display.text import format_count

Severity = Literal["error", "warning", "note"]  # training fails; results suffer; information only
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

MAX_IMBALANCE = 3  # training images of the largest class / those of the smallest
MIN_EVALUATED = 50  # images that a validation or test split should have
MIN_TRAINED = 10  # training images that a class should have
MAX_ASPECT = 3  # long side / short side


@dataclass(frozen=True)
class Group:
    """Images that belong together, a single image, or only a text."""

    items: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Finding:
    """One kind of problem, with the images it concerns."""

    name: str  # one to three words
    severity: Severity
    title: str
    advice: str = ""
    groups: tuple[Group, ...] = ()
    differs: Literal["split", "label"] | None = None  # what differs between images of a group


def find_issues(
    scan: Scan, groups: DuplicateGroups, counts: NDArray[np.int64], *, skip_broken: bool = False
) -> tuple[Finding, ...]:
    """All findings, the most severe first; with `skip_broken`, broken images are not errors.

    `counts` are the images of each class (rows) in each of SPLITS.
    """
    findings = [
        *check_broken(scan, "warning" if skip_broken else "error"),
        *check_duplicates(groups, scan.source),
        *check_class_sizes(scan.source.classes, counts[:, 0]),
        *check_split_sizes(counts.sum(axis=0).tolist()),
        *check_properties(scan),
        *check_ignored(scan),
    ]
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def class_imbalance(train: NDArray[np.int64]) -> float:
    """Training images of the largest class over those of the smallest."""
    return float(train.max() / max(1, train.min()))


def check_broken(scan: Scan, severity: Severity) -> Iterator[Finding]:
    if scan.broken:
        yield Finding(
            "Broken images",
            severity,
            f"{format_count(len(scan.broken), 'image')} cannot be read",
            "repair or remove them, or skip them with `data.skip_broken=True`",
            tuple(Group((item,), why) for item, why in scan.broken.items()),
        )


def check_duplicates(found: DuplicateGroups, source: Source) -> Iterator[Finding]:
    leaking = {group[0] for group in found.near_leaks}
    near_duplicates = [group for group in found.near_duplicates if group[0] not in leaking]
    conflicting = {item for group in found.conflicts for item in group}
    duplicates = [group for group in found.duplicates if group[0] not in conflicting]
    if groups := found.leaks:
        yield Finding(
            "Leaks",
            "warning",
            f"{format_count(len(groups), 'image')} in more than one split",
            "keep each in one split: a score on images seen in training is too high",
            interleave_groups(groups, source.splits),
            "split",
        )
    if groups := found.conflicts:
        yield Finding(
            "Label conflicts",
            "warning",
            f"{format_count(len(groups), 'image')} with more than one label",
            "keep the correct label and remove the other copies: no model can learn both",
            interleave_groups(groups, label_keys(source)),
            "label",
        )
    if groups := found.near_leaks:
        yield Finding(
            "Near-duplicate leaks",
            "warning",
            f"{format_count(len(groups), 'group')} of similar images in more than one split",
            "inspect them and keep each scene in one split: move images, or list them in a table",
            interleave_groups(groups, source.splits),
            "split",
        )
    if duplicates:
        yield Finding(
            "Duplicates",
            "warning",
            f"{format_count(len(duplicates), 'image')} repeated within a split",
            "remove the copies, which count twice",
            interleave_groups(duplicates, source.splits),
        )
    if near_duplicates:
        yield Finding(
            "Near-duplicates",
            "warning",
            f"{format_count(len(near_duplicates), 'group')} of similar images within a split",
            "inspect them: copies that were only resized or re-encoded count twice",
            interleave_groups(near_duplicates, source.splits),
        )


def interleave_groups(groups: Groups, values: NDArray[Any]) -> tuple[Group, ...]:
    """Reorders each group so that it starts with items of different values."""
    interleaved = []
    for group in groups:
        rounds = zip_longest(*partition(group, values))
        items = tuple(item for round in rounds for item in round if item is not None)
        interleaved.append(Group(items))
    return tuple(interleaved)


def check_class_sizes(names: tuple[str, ...], train: NDArray[np.int64]) -> Iterator[Finding]:
    ascending = np.argsort(train, kind="stable").tolist()
    smallest, largest = ascending[0], int(train.argmax())
    if (ratio := class_imbalance(train)) > MAX_IMBALANCE:
        yield Finding(
            "Class imbalance",
            "warning",
            f"{names[largest]} has {ratio:.3g} times the training images of {names[smallest]}",
            "training weights or resamples the classes; more images of the small ones help more",
        )
    if small := [k for k in ascending if train[k] < MIN_TRAINED]:
        yield Finding(
            "Small classes",
            "warning",
            f"{format_count(len(small), 'class')} with fewer than {MIN_TRAINED} training images",
            "add images, or fine-tune published weights (`weights`)",
            tuple(Group(text=f"{names[k]}: {train[k]}") for k in small),
        )


def check_split_sizes(sizes: list[int]) -> Iterator[Finding]:
    small = [
        f"{format_count(size, 'image')} in {split}"
        for split, size in zip(SPLITS[1:], sizes[1:], strict=True)
        if 0 < size < MIN_EVALUATED
    ]
    if small:
        yield Finding(
            "Small splits",
            "warning",
            ", ".join(small),
            "add images if you can: 80 % of 50 images has a 95 % interval of 67 to 89 %",
        )


def check_properties(scan: Scan) -> Iterator[Finding]:
    """Single colours, wrong file extensions, extreme aspect ratios and unusual formats."""
    rows = scan.rows
    if len(items := scan.items("constant")):
        yield Finding(
            "Constant images",
            "warning",
            f"{format_count(len(items), 'image')} of a single colour",
            "remove them, unless the class really looks like that",
            tuple(Group((item,)) for item in items.tolist()),
        )
    if len(items := scan.items("misnamed")):
        yield Finding(
            "Wrong extensions",
            "note",
            f"{format_count(len(items), 'file')} whose format differs from the extension",
            "Vitrail detects the format from the content; rename them for other programs",
            tuple(Group((item,), f"is {FORMATS[rows['format'][item]]}") for item in items.tolist()),
        )
    short = np.minimum(rows["height"], rows["width"])
    long = np.maximum(rows["height"], rows["width"])
    if len(items := np.flatnonzero(long > MAX_ASPECT * short)):
        yield Finding(
            "Extreme aspect ratios",
            "note",
            f"{format_count(len(items), 'image')} with an aspect ratio beyond {MAX_ASPECT} : 1",
            "the model receives a square crop of the centre; crop them to what matters",
            tuple(Group((k,), f"{rows['width'][k]} x {rows['height'][k]}") for k in items.tolist()),
        )
    for flag, (name, treatment) in UNUSUAL.items():
        if len(items := scan.items(flag)):
            yield Finding(
                name,
                "note",
                f"{format_count(len(items), 'file')}, {treatment}",
                groups=tuple(Group((item,)) for item in items.tolist()),
            )


def check_ignored(scan: Scan) -> Iterator[Finding]:
    if ignored := scan.source.ignored:
        yield Finding(
            "Ignored files",
            "note",
            f"{format_count(len(ignored), 'file')} besides the images",
            "to include one, give it the extension of an image and put it into a class folder",
            tuple(Group(text=f"{path}: {why}") for path, why in ignored.items()),
        )
