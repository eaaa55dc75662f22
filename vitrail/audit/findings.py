"""What is wrong with a data set, how much it matters, and what to do about it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.audit.copies import Copies, Groups, cut, find_copies
from vitrail.audit.examine import KINDS, ODD, Examination
from vitrail.data.source import Source

Weight = Literal["stop", "warn", "note"]  # training would fail; would suffer; worth knowing

SPLITS = ("train", "val", "test")
UNEVEN = 3  # times the images of the smallest class that the largest may have
SCORED = 50  # images that a score should stand on
FEW = 10  # training images that a class should have
LONG = 3  # times its short side that a picture may be long


@dataclass(frozen=True)
class Group:
    """Images that belong together, or one image, or none but words."""

    items: tuple[int, ...] = ()
    words: str = ""


@dataclass(frozen=True)
class Finding:
    name: str  # one or two words
    weight: Weight
    title: str
    advice: str  # or nothing
    groups: list[Group] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Judgement:
    examination: Examination
    copies: Copies
    counts: NDArray[np.int64]  # images of each class in each of SPLITS
    findings: list[Finding]  # the gravest first

    @property
    def uneven(self) -> float:
        return unevenness(self.counts)

    @property
    def sides(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Height and width of every image that can be read."""
        rows = self.examination.rows[self.examination.items("read")]
        return rows["height"], rows["width"]


def judge(examination: Examination, *, skip_broken: bool = False) -> Judgement:
    """With `skip_broken`, broken images would not stop the training."""
    copies, counts = find_copies(examination), count_classes(examination)
    findings = [
        *about_broken(examination, "warn" if skip_broken else "stop"),
        *about_copies(copies, examination.source),
        *about_classes(examination.source.classes, counts[:, 0]),
        *about_splits(counts.sum(axis=0).tolist()),
        *about_pictures(examination),
        *about_ignored(examination),
    ]
    order = ("stop", "warn", "note")
    findings.sort(key=lambda finding: order.index(finding.weight))
    return Judgement(examination, copies, counts, findings)


def count_classes(examination: Examination) -> NDArray[np.int64]:
    source = examination.source
    columns = [
        np.bincount(source.labels[source.splits == split], minlength=len(source.classes))
        for split in SPLITS
    ]
    return np.stack(columns, axis=1)


def unevenness(counts: NDArray[np.int64]) -> float:
    """Training images of the largest class over those of the smallest."""
    return float(counts[:, 0].max() / max(1, counts[:, 0].min()))


def about_broken(examination: Examination, weight: Weight) -> Iterator[Finding]:
    if examination.broken:
        yield Finding(
            "Broken",
            weight,
            f"{count(len(examination.broken), 'image')} cannot be read",
            "mend or remove them, or train without them: --data.skip-broken",
            [Group((item,), why) for item, why in examination.broken.items()],
        )


def about_copies(copies: Copies, source: Source) -> Iterator[Finding]:
    across = {group[0] for group in copies.near_leaks}
    inside = [group for group in copies.near_duplicates if group[0] not in across]
    torn = {item for group in copies.conflicts for item in group}
    plain_copies = [group for group in copies.duplicates if group[0] not in torn]
    told: tuple[tuple[str, Groups, str, str], ...] = (
        (
            "Leaks",
            copies.leaks,
            "{} in more than one split",
            "keep each in one split: a score on images learnt by heart says nothing",
        ),
        (
            "Conflicts",
            copies.conflicts,
            "{} under more than one label",
            "keep the right label and remove the other copies: no model can learn both",
        ),
        (
            "Near leaks",
            copies.near_leaks,
            "{} of pictures that look alike, in more than one split",
            "look at them; one scene belongs into one split: move it, or write splits into a table",
        ),
        (
            "Copies",
            plain_copies,
            "{} more than once inside a split",
            "remove the copies, which count double",
        ),
        (
            "Near copies",
            inside,
            "{} of pictures that look alike, inside a split",
            "look at them; copies that were only resized or saved again count double",
        ),
    )
    for name, groups, words, advice in told:
        if groups:
            title = words.format(count(len(groups), "group" if "Near" in name else "picture"))
            values = source.labels if name == "Conflicts" else source.splits
            shown = [Group(tuple(varied(group, values))) for group in groups]
            yield Finding(name, "warn", title, advice, shown)


def varied(group: list[int], values: NDArray[Any]) -> list[int]:
    """The group in an order that begins with different values."""
    turns = zip_longest(*cut(group, values))
    return [item for turn in turns for item in turn if item is not None]


def about_classes(names: tuple[str, ...], train: NDArray[np.int64]) -> Iterator[Finding]:
    rising = np.argsort(train, kind="stable").tolist()
    least, most = rising[0], int(train.argmax())
    if (ratio := unevenness(train[:, None])) > UNEVEN:
        yield Finding(
            "Uneven",
            "warn",
            f"{names[most]} has {ratio:.3g} times the training images of {names[least]}",
            "training makes up for it in part; more images of the small classes help more",
        )
    if few := [k for k in rising if train[k] < FEW]:
        yield Finding(
            "Few",
            "warn",
            f"{count(len(few), 'class')} with fewer than {FEW} images to train on",
            "add images, or fine-tune published weights with --from",
            [Group(words=f"{names[k]}: {train[k]}") for k in few],
        )


def about_splits(sizes: list[int]) -> Iterator[Finding]:
    found = zip(SPLITS[1:], sizes[1:], strict=True)
    small = [
        f"{count(number, 'image')} in {split}" for split, number in found if 0 < number < SCORED
    ]
    if small:
        yield Finding(
            "Small splits",
            "warn",
            ", ".join(small),
            "add images if you can: 80 % of 50 may mean 67 to 89 %",
        )


def about_pictures(examination: Examination) -> Iterator[Finding]:
    rows = examination.rows
    if len(items := examination.items("constant")):
        yield Finding(
            "One colour",
            "warn",
            f"{count(len(items), 'picture')} without anything to see",
            "remove them, unless nothing is what the class looks like",
            [Group((item,)) for item in items.tolist()],
        )
    if len(items := examination.items("misnamed")):
        yield Finding(
            "Wrong names",
            "note",
            f"{count(len(items), 'file')} of another kind than the name says",
            "here the content decides; rename them for other programs",
            [Group((item,), f"is {KINDS[rows['kind'][item]]}") for item in items.tolist()],
        )
    short, long = (
        np.minimum(rows["height"], rows["width"]),
        np.maximum(rows["height"], rows["width"]),
    )
    if len(items := np.flatnonzero(long > LONG * short)):
        yield Finding(
            "Long",
            "note",
            f"{count(len(items), 'picture')} with sides of more than 1 : {LONG}",
            "the model sees a square from the middle; cut out what matters",
            [Group((k,), f"{rows['width'][k]} x {rows['height'][k]}") for k in items.tolist()],
        )
    for trait, meaning in ODD.items():
        if len(items := examination.items(trait)):
            yield Finding(
                trait[0].upper() + trait[1:],
                "note",
                f"{count(len(items), 'file')}, {meaning}",
                "",
                [Group((item,)) for item in items.tolist()],
            )


def about_ignored(examination: Examination) -> Iterator[Finding]:
    if ignored := examination.source.ignored:
        yield Finding(
            "Left out",
            "note",
            f"{count(len(ignored), 'file')} beside the images",
            "if they should be part of the set, give them the name and place of an image",
            [Group(words=f"{path}: {why}") for path, why in ignored.items()],
        )


def plain(judgement: Judgement) -> dict[str, Any]:
    """What `check --json` prints, without the plan."""
    seen, copies, counts = judgement.examination, judgement.copies, judgement.counts
    source, names, rows = seen.source, seen.source.classes, seen.rows
    height, width = judgement.sides
    read = seen.items("read")

    def paths(groups: Groups) -> list[list[str]]:
        return [[source.ids[item] for item in group] for group in groups]

    return {
        "name": source.name,
        "images": len(source),
        "split": dict(zip(SPLITS, counts.sum(axis=0).tolist(), strict=True)),
        "classes": dict(zip(names, counts.sum(axis=1).tolist(), strict=True)),
        "class_splits": {
            name: dict(zip(SPLITS, row, strict=True))
            for name, row in zip(names, counts.tolist(), strict=True)
        },
        "imbalance": judgement.uneven,
        "broken": [{"path": source.ids[item], "why": why} for item, why in seen.broken.items()],
        "duplicates": paths(copies.duplicates),
        "leaks": paths(copies.leaks),
        "conflicts": paths(copies.conflicts),
        "near_duplicates": paths(copies.near_duplicates),
        "near_leaks": paths(copies.near_leaks),
        "misnamed": [
            {"path": source.ids[item], "kind": KINDS[rows["kind"][item]]}
            for item in seen.items("misnamed").tolist()
        ],
        "constant": [source.ids[item] for item in seen.items("constant").tolist()],
        "odd": {
            trait: [source.ids[item] for item in items.tolist()]
            for trait in ODD
            if len(items := seen.items(trait))
        },
        "ignored": [{"path": path, "why": why} for path, why in source.ignored.items()],
        "kinds": {KINDS[kind]: number for kind, number in tally(rows["kind"][read])},
        "channels": {str(channels): number for channels, number in tally(rows["channels"][read])},
        "short_side": spread(np.minimum(height, width)),
        "aspect": spread(width / height),
        "mean": list(seen.mean),
        "std": list(seen.std),
    }


def tally(numbers: NDArray[Any]) -> list[tuple[Any, int]]:
    """Each number with how often it occurs, the commonest first."""
    return Counter(numbers.tolist()).most_common()


def spread(numbers: NDArray[Any]) -> dict[str, float] | None:
    """Smallest, middle and largest; None of nothing."""
    if not len(numbers):
        return None
    low, middle, high = np.quantile(numbers, (0, 0.5, 1), method="nearest").tolist()
    return {"min": low, "median": middle, "max": high}


def count(number: int, noun: str) -> str:
    many = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else many}"
