"""The images behind a confusion matrix, as thumbnails of limited total size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.data.preview import load_or_none
from vitrail.data.source import Source
from vitrail.display.page import make_thumbnail
from vitrail.run.storage.predictions import SplitPredictions

MAX_TABLE_CLASSES = 30  # with more classes, a matrix is a plot beside a list of confused pairs
MAX_PAIRS = 100  # in that list, the most confused first
IMAGES_PER_CELL = 8
SIDE = 128  # pixels of a thumbnail
MAX_READ = 1_000_000_000  # bytes of images that one page reads: about half a minute for photographs

Card = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a confusion matrix, with its images."""

    label: int
    predicted: int
    indices: list[int]  # into the predictions; the most instructive come first

    @property
    def correct(self) -> bool:
        return self.label == self.predicted


def confusion_cells(predictions: SplitPredictions, classes: int) -> list[Cell]:
    """All cells that are not empty; of many classes the most confused pairs.

    Errors are sorted from the most to the least confident, correct predictions the other way.
    """
    numbers = (predictions.labels * classes + predictions.predicted).numpy()
    confidence = predictions.calibrated.numpy()
    rank = np.where(predictions.correct.numpy(), confidence, -confidence)
    order = np.lexsort((rank, numbers))
    distinct, starts = np.unique(numbers[order], return_index=True)
    groups = np.split(order, starts[1:])
    cells = [
        Cell(label=int(n) // classes, predicted=int(n) % classes, indices=group.tolist())
        for n, group in zip(distinct, groups, strict=True)
    ]
    if classes <= MAX_TABLE_CLASSES:
        return cells
    errors = [cell for cell in cells if not cell.correct]
    return sorted(errors, key=lambda cell: -len(cell.indices))[:MAX_PAIRS]


class ThumbnailAlbum:
    """Thumbnails by index into the data set, of at most `budget` characters together."""

    def __init__(self, source: Source | None, budget: int):
        self.source, self.budget, self.bytes_left = source, budget, MAX_READ
        self.cards: dict[int, Card] = {}

    def add(self, items: Iterator[int] | Sequence[int]) -> None:
        """Adds thumbnails in this order until the budget is used up."""
        if self.source is None:
            return
        for item in items:
            if item in self.cards:
                continue
            size = int(self.source.sizes[item])
            if self.budget <= 0:
                return
            if size > self.bytes_left:
                continue
            self.bytes_left -= size
            image = make_thumbnail(load_or_none(self.source, item), SIDE)
            card = {"path": self.source.ids[item], **image}
            self.cards[item] = card
            self.budget -= len(card["image"] or "") + 2 * len(card["path"])


def round_robin(groups: Sequence[Sequence[int]], rounds: int) -> Iterator[int]:
    """The first of every group, then the second of every group, and so on."""
    for i in range(rounds):
        yield from (group[i] for group in groups if i < len(group))
