"""An examined data set as one HTML page that needs no network: what was found, with pictures."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail import __version__
from vitrail.audit.examine import PHOTO
from vitrail.audit.findings import SPLITS, Finding, Group, Judgement, tally
from vitrail.data.preview import try_load
from vitrail.display.page import evenly, templates, thumbnail, uri
from vitrail.display.progress import bar

# What one page shows at most, so that it opens quickly however large the set is.
LINES = 200  # files in a list
GROUPS = 9  # pictures or groups of them in a finding
COPIES = 4  # pictures in a group
CLASSES = 60  # bars
SAMPLED = 24  # classes with sample pictures
SAMPLES = 8  # pictures of each of those
BARS = 24  # of a histogram

ELSEWHERE = {
    "Uneven": "classes",
    "Small splits": "classes",
    "No recipe": "plan",
}  # what is shown in a section of its own

Card = dict[str, Any]


def page(
    judgement: Judgement,
    plan: Mapping[str, Any],
    augmented: bytes | None = None,
    *,
    progress: bool = True,
) -> str:
    """The whole page; `plan` has settings and reasons, or an error, `augmented` is a PNG."""
    source = judgement.examination.source
    album = Album(judgement, progress)
    template = templates(Path(__file__).parent).get_template("page.html")
    return template.render(
        version=__version__,
        photo=PHOTO,
        name=source.name,
        path=source.path or "",
        stops=[one for one in judgement.findings if one.weight == "stop"],
        worries=[album.section(one) for one in judgement.findings if one.weight != "note"],
        notes=[album.section(one) for one in judgement.findings if one.weight == "note"],
        facts=facts(judgement),
        bars=class_bars(judgement.counts, source.classes),
        skipped=max(0, len(source.classes) - CLASSES),
        histograms=histograms(judgement),
        samples=album.samples(),
        augmented=uri(augmented, "png") if augmented else None,
        plan=plan,
        settings=json.dumps(plan.get("settings", {}), indent=2),
    )


class Album:
    """Makes the cards of a page, reading again only the images that it shows."""

    def __init__(self, judgement: Judgement, progress: bool):
        self.examination, self.source = judgement.examination, judgement.examination.source
        self.made: dict[int, Card] = {}
        groups = [group for finding in judgement.findings for group in drawn(finding)]
        wanted = {item: None for group in groups for item in group.items[:COPIES]}
        wanted |= {item: None for _, items in self.chosen() for item in items}
        with bar("drawing pictures", len(wanted), show=progress) as advance:
            for item in wanted:
                self.made[item] = self.card(item)
                advance(1)

    def card(self, item: int) -> Card:
        row = self.examination.rows[item]
        return {
            "path": self.source.ids[item],
            "split": str(self.source.splits[item]),
            "label": self.source.classes[self.source.labels[item]],
            "size": f"{row['width']} x {row['height']}",
            **thumbnail(try_load(self.source, item)),
        }

    def section(self, finding: Finding) -> Card:
        pictures = drawn(finding)
        lines = [] if pictures else [self.line(group) for group in finding.groups[:LINES]]
        groups = [
            {
                "cards": [self.made[item] for item in group.items[:COPIES]],
                "more": max(0, len(group.items) - COPIES),
                "words": group.words,
            }
            for group in pictures
        ]
        return {
            "finding": finding,
            "anchor": ELSEWHERE.get(finding.name, finding.name.lower().replace(" ", "-")),
            "lines": lines,
            "groups": groups,
            "paired": any(len(group.items) > 1 for group in pictures),
            "more": len(finding.groups) - len(lines) - len(groups),
        }

    def line(self, group: Group) -> tuple[str, str]:
        """What it is about, and what is said of it."""
        if group.items:
            return self.source.ids[group.items[0]], group.words
        name, _, words = group.words.rpartition(": ")
        return name, words

    def samples(self) -> list[Card]:
        return [
            {"name": name, "cards": [self.made[item] for item in items]}
            for name, items in self.chosen()
        ]

    def chosen(self) -> Iterator[tuple[str, list[int]]]:
        """Some classes, evenly spread, and some of the images of each."""
        read = np.zeros(len(self.source), bool)
        read[self.examination.items("read")] = True
        for label in evenly(np.arange(len(self.source.classes)), SAMPLED):
            items = np.flatnonzero(read & (self.source.labels == label))
            if len(items):
                yield self.source.classes[label], evenly(items, SAMPLES)


def drawn(finding: Finding) -> list[Group]:
    """The groups of which pictures are shown; broken images have none."""
    if finding.name == "Broken":
        return []
    return [group for group in finding.groups if group.items][:GROUPS]


def facts(judgement: Judgement) -> list[tuple[str, str]]:
    """The numbers at the top."""
    seen = judgement.examination
    splits = judgement.counts.sum(axis=0).tolist()
    channels = {1: "grey", 3: "colour"}
    found = tally(seen.rows["channels"][seen.items("read")])
    told = [
        ("images", f"{len(seen.source):,}"),
        ("classes", f"{len(seen.source.classes):,}"),
        ("train / val / test", " / ".join(f"{number:,}" for number in splits)),
        ("size", common_size(judgement)),
        ("channels", ", ".join(channels.get(k, f"{k} channels") for k, _ in found) or "none"),
    ]
    if seen.mean:
        told.append(("mean", " ".join(f"{number:.3f}" for number in seen.mean[:4])))
        told.append(("std", " ".join(f"{number:.3f}" for number in seen.std[:4])))
    return told


def common_size(judgement: Judgement) -> str:
    """The one size of all pictures, or the middle and the range of their short sides."""
    height, width = judgement.sides
    if not len(height):
        return "none"
    if (height == height[0]).all() and (width == width[0]).all():
        return f"{width[0]} x {height[0]}"
    short = np.minimum(height, width)
    return f"short side {short.min()} to {short.max()}"


def class_bars(counts: NDArray[np.int64], names: Sequence[str]) -> list[Card]:
    """A bar for each class, largest first; of many classes the largest and the smallest."""
    total = counts.sum(axis=1)
    order = np.argsort(-total, kind="stable").tolist()
    if len(order) > CLASSES:
        order = order[: CLASSES // 2] + order[-CLASSES // 2 :]
    most = max(1, int(total.max()))
    return [
        {
            "name": names[k],
            "total": int(total[k]),
            "parts": [
                (split, int(number), 100 * int(number) / most)
                for split, number in zip(SPLITS, counts[k], strict=True)
            ],
        }
        for k in order
    ]


def histograms(judgement: Judgement) -> list[Card]:
    """Short sides and proportions, where they are not all the same."""
    height, width = judgement.sides
    told = (
        ("short side in pixels", np.minimum(height, width), "{:.0f}"),
        ("width : height", width / height if len(width) else width, "{:.2g}"),
    )
    return [
        histogram(title, numbers, form)
        for title, numbers, form in told
        if len(numbers) and numbers.min() < numbers.max()
    ]


def histogram(title: str, numbers: NDArray[Any], form: str) -> Card:
    """Bars of equal ratio, since twice as large matters the same at every size."""
    low, high = float(numbers.min()), float(numbers.max())
    edges = np.geomspace(low, high, BARS + 1)
    edges[0], edges[-1] = low, high
    heights, _ = np.histogram(numbers, edges)
    return {
        "title": title,
        "ends": (form.format(low), form.format(float(np.median(numbers))), form.format(high)),
        "bars": [
            (100 * int(number) / int(heights.max()), int(number), form.format(a), form.format(b))
            for number, a, b in zip(heights, edges[:-1], edges[1:], strict=True)
        ],
    }
