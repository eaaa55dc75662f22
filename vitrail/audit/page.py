"""The audit of a data set as one HTML page that works offline: findings with their images."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail import __version__
from vitrail.audit.audit import Audit, count_values
from vitrail.audit.findings import Finding, Group
from vitrail.audit.scan import MIN_HASHED_SIDE
from vitrail.data.preview import load_or_none
from vitrail.data.source import SPLITS, has_label, label_names
from vitrail.display.page import data_uri, load_templates, make_thumbnail, pick_evenly
from vitrail.display.progress import progress_bar

# Limits of a page, so that it opens quickly for any data set.
MAX_LINES = 200  # files in a list
MAX_GROUPS = 9  # images or groups of them in a finding
MAX_COPIES = 4  # images in a group
MAX_CLASSES = 60  # bars
SAMPLED_CLASSES = 24  # classes with sample images
SAMPLES = 8  # images of each of those
BINS = 24  # of a histogram

SECTIONS = {  # the section of the page to which a finding without images links
    "Class imbalance": "classes",
    "Small splits": "classes",
    "No recipe": "plan",
}

Card = dict[str, Any]


def render_audit(
    audit: Audit,
    plan: Mapping[str, Any],
    augmented: bytes | None = None,
    *,
    progress: bool = True,
) -> str:
    """The whole page; `plan` has settings and reasons, or an error; `augmented` is a PNG."""
    source = audit.source
    album = AuditAlbum(audit, progress)
    template = load_templates(Path(__file__).parent).get_template("page.html")
    return template.render(
        version=__version__,
        min_hashed_side=MIN_HASHED_SIDE,
        name=source.name,
        path=source.path or "",
        errors=audit.errors,
        problems=[album.section(x) for x in audit.findings if x.severity != "note"],
        notes=[album.section(x) for x in audit.findings if x.severity == "note"],
        summary=summarise_audit(audit),
        bars=class_bars(audit.counts, source.classes),
        skipped=max(0, len(source.classes) - MAX_CLASSES),
        histograms=size_histograms(audit),
        samples=album.samples(),
        augmented=data_uri(augmented, "png") if augmented else None,
        plan=plan,
        settings=json.dumps(plan.get("settings", {}), indent=2),
    )


class AuditAlbum:
    """The thumbnails of a page; reads only the images that it shows."""

    def __init__(self, audit: Audit, progress: bool):
        self.scan, self.source = audit.scan, audit.source
        self.cards: dict[int, Card] = {}
        groups = [group for finding in audit.findings for group in groups_with_images(finding)]
        shown = {item: None for group in groups for item in group.items[:MAX_COPIES]}
        shown |= {item: None for _, items in self.sample_classes() for item in items}
        with progress_bar("creating thumbnails", len(shown), show=progress) as advance:
            for item in shown:
                self.cards[item] = self.card(item)
                advance(1)

    def card(self, item: int) -> Card:
        row = self.scan.rows[item]
        return {
            "path": self.source.ids[item],
            "split": str(self.source.splits[item]),
            "label": label_names(self.source, item),
            "size": f"{row['width']} x {row['height']}",
            **make_thumbnail(load_or_none(self.source, item)),
        }

    def section(self, finding: Finding) -> Card:
        """What the template shows of a finding: images, or else lines of text."""
        with_images = groups_with_images(finding)
        lines = [] if with_images else [self.line(group) for group in finding.groups[:MAX_LINES]]
        groups = [
            {
                "cards": [self.cards[item] for item in group.items[:MAX_COPIES]],
                "more": max(0, len(group.items) - MAX_COPIES),
                "text": group.text,
            }
            for group in with_images
        ]
        return {
            "finding": finding,
            "anchor": SECTIONS.get(finding.name, finding.name.lower().replace(" ", "-")),
            "lines": lines,
            "groups": groups,
            "paired": any(len(group.items) > 1 for group in with_images),
            "more": len(finding.groups) - len(lines) - len(groups),
        }

    def line(self, group: Group) -> tuple[str, str]:
        """A path or class, and the text about it."""
        if group.items:
            return self.source.ids[group.items[0]], group.text
        name, _, text = group.text.rpartition(": ")
        return name, text

    def samples(self) -> list[Card]:
        return [
            {"name": name, "cards": [self.cards[item] for item in items]}
            for name, items in self.sample_classes()
        ]

    def sample_classes(self) -> Iterator[tuple[str, list[int]]]:
        """Some classes and some readable images of each, picked evenly."""
        readable = np.zeros(len(self.source), bool)
        readable[self.scan.items("readable")] = True
        for label in pick_evenly(np.arange(len(self.source.classes)), SAMPLED_CLASSES):
            items = np.flatnonzero(readable & has_label(self.source, label))
            if len(items):
                yield self.source.classes[label], pick_evenly(items, SAMPLES)


def groups_with_images(finding: Finding) -> list[Group]:
    """The groups whose images the page shows; broken images cannot be shown."""
    if finding.name == "Broken images":
        return []
    return [group for group in finding.groups if group.items][:MAX_GROUPS]


def summarise_audit(audit: Audit) -> list[tuple[str, str]]:
    """The numbers at the top of the page and of the terminal's output."""
    scan = audit.scan
    names = {1: "grey", 3: "colour"}
    channels = count_values(scan.rows["channels"][scan.items("readable")])
    summary = [
        ("images", f"{audit.images:,}"),
        ("classes", f"{len(audit.classes):,}"),
        ("train / val / test", " / ".join(f"{count:,}" for count in audit.split.values())),
        ("size", describe_sizes(audit)),
        ("channels", ", ".join(names.get(k, f"{k} channels") for k, _ in channels) or "none"),
    ]
    if scan.mean:
        summary.append(("mean", " ".join(f"{value:.3f}" for value in scan.mean[:4])))
        summary.append(("std", " ".join(f"{value:.3f}" for value in scan.std[:4])))
    return summary


def describe_sizes(audit: Audit) -> str:
    """The size of all images if it is the same, else the range of their short sides."""
    height, width = audit.scan.sides
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
    if len(order) > MAX_CLASSES:
        order = order[: MAX_CLASSES // 2] + order[-MAX_CLASSES // 2 :]
    largest = max(1, int(total.max()))
    return [
        {
            "name": names[k],
            "total": int(total[k]),
            "parts": [
                (split, int(number), 100 * int(number) / largest)
                for split, number in zip(SPLITS, counts[k], strict=True)
            ],
        }
        for k in order
    ]


def size_histograms(audit: Audit) -> list[Card]:
    """Histograms of short sides and aspect ratios, unless all images have the same."""
    height, width = audit.scan.sides
    quantities = (
        ("short side in pixels", np.minimum(height, width), "{:.0f}"),
        ("aspect ratio (width / height)", width / height if len(width) else width, "{:.2g}"),
    )
    return [
        log_histogram(title, values, template)
        for title, values, template in quantities
        if len(values) and values.min() < values.max()
    ]


def log_histogram(title: str, values: NDArray[Any], template: str) -> Card:
    """A histogram with logarithmic bins: a factor of two is equally wide at every size."""
    low, high = float(values.min()), float(values.max())
    edges = np.geomspace(low, high, BINS + 1)
    edges[0], edges[-1] = low, high
    counts, _ = np.histogram(values, edges)
    return {
        "title": title,
        "ticks": [template.format(tick) for tick in (low, float(np.median(values)), high)],
        "bars": [
            (
                100 * int(count) / int(counts.max()),
                int(count),
                template.format(a),
                template.format(b),
            )
            for count, a, b in zip(counts, edges[:-1], edges[1:], strict=True)
        ],
    }
