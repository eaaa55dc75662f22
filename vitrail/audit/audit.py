"""The result of checking a data set: counts, duplicates and findings."""

from collections import Counter
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.audit.duplicates import DuplicateGroups, Groups, find_duplicates
from vitrail.audit.findings import Finding, class_imbalance, find_issues
from vitrail.audit.scan import FORMATS, UNUSUAL, Scan, scan_images
from vitrail.data.source import SPLITS, Source, count_labels
from vitrail.display.text import format_count, printable


@dataclass(frozen=True)
class BrokenImage:
    path: str
    why: str


@dataclass(frozen=True, eq=False, repr=False)
class Audit:
    """What `vitrail check` finds in a data set."""

    scan: Scan  # one record for each image
    groups: DuplicateGroups  # of indices; `duplicates`, `leaks`, ... give the paths
    counts: NDArray[np.int64]  # images of each class (rows) in each of SPLITS
    findings: tuple[Finding, ...]  # the most severe first

    @property
    def source(self) -> Source:
        return self.scan.source

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def images(self) -> int:
        return len(self.source)

    @property
    def split(self) -> dict[str, int]:
        """The number of images in each split."""
        return dict(zip(SPLITS, self.counts.sum(axis=0).tolist(), strict=True))

    @property
    def classes(self) -> dict[str, int]:
        """The number of images of each class."""
        return dict(zip(self.source.classes, self.counts.sum(axis=1).tolist(), strict=True))

    @property
    def imbalance(self) -> float:
        """Training images of the largest class over those of the smallest."""
        return class_imbalance(self.counts[:, 0])

    @property
    def broken(self) -> tuple[BrokenImage, ...]:
        """Images that training cannot use, and why."""
        return tuple(BrokenImage(self.source.ids[k], why) for k, why in self.scan.broken.items())

    @property
    def duplicates(self) -> list[list[str]]:
        """Groups of paths with the same content in the same split."""
        return self._paths(self.groups.duplicates)

    @property
    def leaks(self) -> list[list[str]]:
        """Groups of paths with the same content in several splits."""
        return self._paths(self.groups.leaks)

    @property
    def conflicts(self) -> list[list[str]]:
        """Groups of paths with the same content and several labels."""
        return self._paths(self.groups.conflicts)

    @property
    def near_duplicates(self) -> list[list[str]]:
        """Groups of paths of similar images, in any split."""
        return self._paths(self.groups.near_duplicates)

    @property
    def near_leaks(self) -> list[list[str]]:
        """Groups of paths of similar images in several splits."""
        return self._paths(self.groups.near_leaks)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that make training fail."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def _paths(self, groups: Groups) -> list[list[str]]:
        return [[self.source.ids[item] for item in group] for group in groups]

    def to_dict(self) -> dict[str, Any]:
        """The document of `vitrail check --json`, without the plan."""
        scan, source, rows = self.scan, self.source, self.scan.rows
        height, width = scan.sides
        readable = scan.items("readable")
        return {
            "name": self.name,
            "images": self.images,
            "split": self.split,
            "classes": self.classes,
            "class_splits": {
                name: dict(zip(SPLITS, row, strict=True))
                for name, row in zip(source.classes, self.counts.tolist(), strict=True)
            },
            "imbalance": self.imbalance,
            "broken": [{"path": image.path, "why": image.why} for image in self.broken],
            "duplicates": self.duplicates,
            "leaks": self.leaks,
            "conflicts": self.conflicts,
            "near_duplicates": self.near_duplicates,
            "near_leaks": self.near_leaks,
            "misnamed": [
                {"path": source.ids[item], "kind": FORMATS[rows["format"][item]]}
                for item in scan.items("misnamed").tolist()
            ],
            "constant": [source.ids[item] for item in scan.items("constant").tolist()],
            "odd": {
                flag: [source.ids[item] for item in items.tolist()]
                for flag in UNUSUAL
                if len(items := scan.items(flag))
            },
            "ignored": [{"path": path, "why": why} for path, why in source.ignored.items()],
            "kinds": {FORMATS[k]: count for k, count in count_values(rows["format"][readable])},
            "channels": {str(k): count for k, count in count_values(rows["channels"][readable])},
            "short_side": summarise_range(np.minimum(height, width)),
            "aspect": summarise_range(width / height),
            "mean": list(scan.mean),
            "std": list(scan.std),
        }

    def __repr__(self) -> str:
        splits = ", ".join(f"{count:,} {split}" for split, count in self.split.items())
        images, classes = (
            format_count(self.images, "image"),
            format_count(len(self.classes), "class"),
        )
        lines = [f"Audit of {printable(self.name)}: {images} of {classes} ({splits})"]
        for finding in self.findings:
            title = printable(finding.title)
            lines.append(f"  {finding.severity}: {finding.name}: {title}")
        return "\n".join(lines if self.findings else [*lines, "  no problems found"])

    def _repr_html_(self) -> str:
        first, *lines = (escape(line.strip()) for line in repr(self).splitlines())
        return f"<p><b>{first}</b></p><ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"


def audit_data(
    source: Source,
    *,
    skip_broken: bool = False,
    workers: int | None = None,
    progress: bool = True,
) -> Audit:
    """Scans every image of a data set and reports what is wrong with it.

    With `skip_broken`, broken images are warnings instead of errors. `workers` processes
    decode images; by default one per core.
    """
    scan = scan_images(source, workers=workers, progress=progress)
    return audit_scan(scan, skip_broken=skip_broken)


def audit_scan(scan: Scan, *, skip_broken: bool = False) -> Audit:
    """Finds duplicates and other problems in the records of a scan."""
    groups, counts = find_duplicates(scan), count_classes(scan.source)
    findings = find_issues(scan, groups, counts, skip_broken=skip_broken)
    return Audit(scan, groups, counts, findings)


def count_classes(source: Source) -> NDArray[np.int64]:
    """Images of each class (rows) in each of SPLITS (columns)."""
    columns = [count_labels(source, np.flatnonzero(source.splits == split)) for split in SPLITS]
    return np.stack(columns, axis=1)


def count_values(values: NDArray[Any]) -> list[tuple[Any, int]]:
    """Each value with the number of its occurrences, the most frequent first."""
    return Counter(values.tolist()).most_common()


def summarise_range(values: NDArray[Any]) -> dict[str, float] | None:
    """Minimum, median and maximum; None for an empty array."""
    if not len(values):
        return None
    low, median, high = np.quantile(values, (0, 0.5, 1), method="nearest").tolist()
    return {"min": low, "median": median, "max": high}
