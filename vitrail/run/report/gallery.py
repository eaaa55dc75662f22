"""The images behind a confusion matrix, as thumbnails that together stay small."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.data.preview import try_load
from vitrail.data.source import Source
from vitrail.display.page import thumbnail
from vitrail.run.predictions import Seen

DETAILED = 30  # classes up to which every cell of a matrix can be opened; of more, some pairs
PAIRS = 100  # pairs of classes then, those confused most
EACH = 8  # pictures of a cell at most
SIDE = 128  # pixels of a thumbnail
READ = 1_000_000_000  # bytes of images that one page reads at most: half a minute of photographs

Card = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Images of one class that were taken for one class."""

    label: int
    predicted: int
    places: list[int]  # among the answers; those most worth seeing first

    @property
    def right(self) -> bool:
        return self.label == self.predicted


def cells(seen: Seen, classes: int) -> list[Cell]:
    """All cells that are not empty; of many classes the pairs that are confused most.

    The surest mistakes come first, and of right answers those that were least sure.
    """
    where = (seen.labels * classes + seen.predicted).numpy()
    sure = np.where(seen.right.numpy(), seen.probability.numpy(), -seen.probability.numpy())
    order = np.lexsort((sure, where))
    found, starts = np.unique(where[order], return_index=True)
    groups = np.split(order, starts[1:])
    made = [
        Cell(label=int(n) // classes, predicted=int(n) % classes, places=group.tolist())
        for n, group in zip(found, groups, strict=True)
    ]
    if classes <= DETAILED:
        return made
    wrong = [cell for cell in made if not cell.right]
    return sorted(wrong, key=lambda cell: -len(cell.places))[:PAIRS]


class Album:
    """Thumbnails by position in the data set, within `room` characters of the page."""

    def __init__(self, source: Source | None, room: int):
        self.source, self.room, self.left = source, room, READ
        self.cards: dict[int, Card] = {}

    def add(self, items: Iterator[int] | Sequence[int]) -> None:
        """Makes cards in this order until there is no more room."""
        if self.source is None:
            return
        for item in items:
            if item in self.cards:
                continue
            size = int(self.source.sizes[item])
            if self.room <= 0:
                return
            if size > self.left:
                continue
            self.left -= size
            card = {"path": self.source.ids[item], **thumbnail(try_load(self.source, item), SIDE)}
            self.cards[item] = card
            self.room -= len(card["image"] or "") + 2 * len(card["path"])


def in_turn(groups: Sequence[Sequence[int]], most: int) -> Iterator[int]:
    """The first of every group, then the second of every group, and so on."""
    for turn in range(most):
        yield from (group[turn] for group in groups if turn < len(group))
