"""A preview of the augmentation: a few training images as the first epochs show them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.config import DataConfig, PixelType, Preprocess
from vitrail.data.image import load_image
from vitrail.data.loader import Batch, Loader
from vitrail.data.order import count_repeats
from vitrail.data.pixels import Pixels
from vitrail.data.source import Item, Source
from vitrail.errors import UserError


@dataclass(frozen=True, eq=False)
class MemorySource:
    """A few images of a source, held in memory."""

    name: str
    classes: tuple[str, ...]
    labels: NDArray[Any]
    splits: NDArray[np.str_]
    ids: Sequence[str]
    images: list[bytes | np.ndarray]  # encoded files or pixels
    path: None = None
    ignored: dict[str, str] = field(default_factory=dict)

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.array([len(image) for image in self.images], np.int64)

    @property
    def mtimes(self) -> NDArray[np.int64]:
        return np.zeros(len(self), np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Item:
        return Item(self.images[index], self.labels[index], self.ids[index])


def choose_per_class(source: Source, usable: NDArray[np.bool_], limit: int = 8) -> list[int]:
    """Returns the first usable training image of every class, then the second, up to `limit`."""
    items = np.flatnonzero(usable & (source.splits == "train"))
    labels = source.labels[items]
    if labels.ndim == 2:
        labels = labels.argmax(axis=1)  # the first label of each
    chosen: list[int] = items[np.lexsort((labels, count_repeats(labels)))][:limit].tolist()
    return chosen


def load_into_memory(source: Source, items: Sequence[int]) -> MemorySource:
    """Reads some images of a source; all of them become training images."""
    chosen = [source[item] for item in items]
    labels = source.labels[np.asarray(items, np.int64)]
    splits = np.full(len(chosen), "train", "<U5")
    ids, images = [item.id for item in chosen], [item.content for item in chosen]
    return MemorySource(source.name, source.classes, labels, splits, ids, images)


def preview_augmentation(
    source: Source,
    items: Sequence[int],
    preprocess: Preprocess,
    config: DataConfig,
    *,
    epochs: int = 7,
    seed: int = 0,
) -> Batch:
    """Returns each image as in evaluation, then as in each of the first epochs.

    Mixup and CutMix combine these images with each other, as in a batch of their own.
    """
    if config.train_size is not None:
        preprocess = replace(preprocess, size=config.train_size)
    config = replace(config, workers=0, disk_gb=0, train_size=None, balanced=False, shuffle="all")
    loader = Loader(
        load_into_memory(source, items),
        preprocess,
        config,
        batch=len(items),
        seed=seed,
        progress=False,
    )
    batches = [next(loader.evaluation("train")), *islice(loader.training(), epochs)]
    images, targets = [], []
    for batch in batches:  # each epoch has its own order
        order = np.argsort(batch.items)
        images.append(batch.images[order])
        targets.append(soft_targets(batch.targets, len(source.classes))[order])
    labels = batches[0].labels.repeat_interleave(1 + epochs)
    numbers = np.repeat(np.asarray(items, np.int64), 1 + epochs)
    return Batch(interleave(images), labels, interleave(targets), numbers, 0, 0)


def soft_targets(targets: Tensor, classes: int) -> Tensor:
    """Converts labels to class probabilities; leaves those as they are."""
    return targets if targets.ndim == 2 else F.one_hot(targets, classes).float()


def interleave(batches: list[Tensor]) -> Tensor:
    """Returns the first entry of every batch, then the second of every batch, and so on."""
    return torch.stack(batches, 1).flatten(0, 1)


def load_or_none(
    source: Source, item: int, channels: int | None = None, pixels: PixelType | None = None
) -> Pixels | None:
    """Returns the pixels of one item; None if it cannot be read."""
    try:
        return load_image(source[item].content, channels, pixels)
    except UserError:
        return None
