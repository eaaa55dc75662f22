"""A few training images as the first epochs would show them to the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.config import DataConfig, Preprocess
from vitrail.data.image import Pixels, load_image
from vitrail.data.loader import Batch, Loader, repeats
from vitrail.data.source import Item, Source
from vitrail.errors import UserError


@dataclass(frozen=True, eq=False)
class Few:
    """Some images of a source, held in memory, all to train on."""

    name: str
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    splits: NDArray[np.str_]
    ids: Sequence[str]
    contents: list[bytes | np.ndarray]
    path: None = None
    ignored: dict[str, str] = field(default_factory=dict)

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.array([len(content) for content in self.contents], np.int64)

    @property
    def dates(self) -> NDArray[np.int64]:
        return np.zeros(len(self), np.int64)

    def __len__(self) -> int:
        return len(self.contents)

    def __getitem__(self, index: int) -> Item:
        return Item(self.contents[index], int(self.labels[index]), self.ids[index])


def one_of_each(source: Source, usable: NDArray[np.bool_], most: int = 8) -> list[int]:
    """The first usable training image of every class, then the second, as far as there is room."""
    items = np.flatnonzero(usable & (source.splits == "train"))
    labels = source.labels[items]
    chosen: list[int] = items[np.lexsort((labels, repeats(labels)))][:most].tolist()
    return chosen


def few(source: Source, items: Sequence[int]) -> Few:
    chosen = [source[item] for item in items]
    labels = np.array([item.label for item in chosen], np.int64)
    splits = np.full(len(chosen), "train", "<U5")
    contents = [item.content for item in chosen]
    return Few(source.name, source.classes, labels, splits, [i.id for i in chosen], contents)


def preview(
    source: Source,
    items: Sequence[int],
    view: Preprocess,
    config: DataConfig,
    *,
    epochs: int = 7,
    seed: int = 0,
) -> Batch:
    """For each item the image as evaluation sees it, then as each of the epochs shows it.

    Images are mixed with each other, as in a batch of these items alone.
    """
    config = replace(config, workers=0, disk_gb=0, balanced=False)
    loader = Loader(few(source, items), view, config, batch=len(items), seed=seed, progress=False)
    batches = [next(loader.evaluation("train")), *islice(loader.training(), epochs)]
    images, targets = [], []
    for batch in batches:  # each epoch has its own order
        order = np.argsort(batch.items)
        images.append(batch.images[order])
        targets.append(shares(batch.targets, len(source.classes))[order])
    labels = batches[0].labels.repeat_interleave(1 + epochs)
    numbers = np.repeat(np.asarray(items, np.int64), 1 + epochs)
    return Batch(interleave(images), labels, interleave(targets), numbers, 0, 0)


def shares(targets: Tensor, classes: int) -> Tensor:
    """How much there is of each class, also where nothing was mixed."""
    return targets if targets.ndim == 2 else F.one_hot(targets, classes).float()


def interleave(batches: list[Tensor]) -> Tensor:
    """The first of every batch, then the second of every batch, and so on."""
    return torch.stack(batches, 1).flatten(0, 1)


def try_load(source: Source, item: int, channels: int | None = None) -> Pixels | None:
    """The pixels of one item, or None if it cannot be read any more."""
    try:
        return load_image(source[item].content, channels)
    except UserError:
        return None
