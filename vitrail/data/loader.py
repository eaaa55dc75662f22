"""Batches that are functions of (seed, step), so a run can stop and go on anywhere."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data import augment
from vitrail.data.config import Augment, DataConfig, Preprocess
from vitrail.data.preprocess import normalise
from vitrail.data.reading.cache import Broken, Kept, free_disk, free_memory, keep, scan
from vitrail.data.reading.memory import keep_freed_memory
from vitrail.data.reading.reader import Items, Reader
from vitrail.data.reading.workers import Note, Slot, ahead, default_workers, ranks_here
from vitrail.data.source import Source, Split, indices
from vitrail.errors import Refused, UserError

SMALL = 64  # pixels: up to here a whole batch is augmented at once, above each image by a worker
TOLD = 20  # broken images that an error names
ORDER, MIX = 1, 2  # what a random generator is for, so that no two are the same

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Batch:
    images: Tensor  # float32 (B, C, H, W), normalised
    labels: Tensor  # int64 (B,)
    targets: Tensor  # the labels; where images were mixed, the share of each class, float (B, K)
    items: Items  # which images of the source these are
    step: int
    epoch: int


@dataclass(frozen=True, eq=False)
class Task:
    """What goes into one batch, decided before any image is read."""

    step: int
    epoch: int
    items: Items
    draws: Items  # what each image's luck hangs on: the item, or another number if it came before


class Loader:
    """Batches of a source for training and for evaluation, on one rank of `world`.

    `batch` counts the images of a step over all ranks: they see parts of the same batches, however
    many they are; the parts may differ by one image. The last images of an epoch that fill no batch
    are left out of it; which ones changes with every epoch.
    """

    def __init__(
        self,
        source: Source,
        view: Preprocess,
        config: DataConfig | None = None,
        *,
        batch: int = 128,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        device: str | torch.device = "cpu",
        progress: bool = True,
    ):
        if batch < world:
            raise UserError(
                f"a batch of {batch} leaves some of {world} processes without an image; "
                f"give at least {world}"
            )
        keep_freed_memory()
        self.source, self.view, self.config = source, view, config or DataConfig()
        self.batch, self.seed, self.rank, self.world = batch, seed, rank, world
        self.device, self.progress = torch.device(device), progress
        self.small = max(view.height, view.width) <= SMALL
        wanted, most = self.config.workers, self.config.cache_gb
        self.workers = default_workers() if wanted is None else wanted
        self.memory = free_memory() // 3 // ranks_here() if most is None else int(most * 1e9)
        most = self.config.disk_gb
        self.disk = free_disk() // 2 if most is None else int(most * 1e9)
        self.broken: Broken = {}  # left out, with `skip_broken`
        self._kept: dict[tuple[Split, bool], Kept | None] = {}  # by split, and whole or not
        self._items: dict[Split, Items] = {}

    def prepare(self, *splits: Split, training: bool = True) -> None:
        """Decodes the splits (all without a name) if there is room to keep them.

        All images that turn out to be broken are told in one error; or, with `skip_broken`, left
        out. Where there is no room, a broken image is an error when its batch comes. `training`
        false keeps the train split as evaluation sees it, like the others.
        """
        broken: Broken = {}
        for split in splits or ("train", "val", "test"):
            reader = self._reader(training and split == "train")
            if (split, reader.whole) not in self._kept:
                broken |= self._prepare(split, reader)
        if broken and not self.config.skip_broken:
            self._kept.clear()  # who goes on all the same is told again
            self._items.clear()
            raise UserError(
                f"{listed(broken)}; mend or remove them, or leave them out with --data.skip-broken"
            )
        if broken:
            log.warning(f"left out {len(broken)} of {len(self.source)} images: they are broken")
        self.broken |= broken

    def _prepare(self, split: Split, reader: Reader) -> Broken:
        items = indices(self.source, split)
        # the test split is read once: worth memory, in which broken files show early, but no file
        disk = 0 if split == "test" else self.disk
        found = keep(
            reader,
            items,
            memory=self.memory,
            disk=disk,
            workers=self.workers,
            progress=self.progress,
        )
        kept, broken = found or (None, {})
        if kept is not None and kept.file is None:
            self.memory -= int(kept.starts[-1])
        if kept is None and self.config.skip_broken:
            broken = scan(reader, items, workers=self.workers, progress=self.progress)
        self._kept[split, reader.whole] = kept
        self._items[split] = np.setdiff1d(items, list(broken))
        return broken

    def _reader(self, training: bool) -> Reader:
        """Large images are kept whole for training, to be cut anew each time."""
        return Reader(self.source, self.view, whole=training and not self.small)

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        if "train" not in self._items:
            self.prepare("train")
        count = len(self._items["train"])
        if count < self.batch:
            raise UserError(f"{count} training images fill no batch of {self.batch}; take less")
        return count // self.batch

    def training(self, start: int = 0, end: int | None = None) -> Iterator[Batch]:
        """Augmented batches from step `start` on; nothing is read ahead for `end` and later."""
        self.prepare("train")
        tasks = islice(self._plan(start), None if end is None else end - start)
        for task, images in self._images("train", tasks, training=True):
            with one_thread():
                batch = self._finished(task, images)
            yield batch

    def _finished(self, task: Task, images: Tensor) -> Batch:
        """What is done with a whole batch: all augmentation of small images, mixing of any."""
        settings = self.config.augment
        luck = augment.luck(self.seed, task.epoch, task.draws)
        if self.small:
            images = augment.augment(images, settings, luck)
        x = augment.erase(self._normalised(images), settings, luck)
        labels = self._labels(task.items)
        targets = labels
        if settings.mixup or settings.cutmix:
            random = np.random.default_rng((MIX, self.seed, task.step, self.rank))
            x, targets = augment.mix(x, labels, len(self.source.classes), settings, random)
        return Batch(x, labels, targets, task.items, task.step, task.epoch)

    def evaluation(
        self, split: Split, batch: int | None = None, most: int | None = None
    ) -> Iterator[Batch]:
        """This rank's share of a split, each image once and in order; the last batch is smaller.

        With `most`, not more images than that, evenly chosen.
        """
        items = self.share(split, most)
        if not len(items):
            return
        size = batch or max(1, self.batch // self.world)
        tasks = (
            Task(number, 0, part, part)
            for number, start in enumerate(range(0, len(items), size))
            for part in [items[start : start + size]]
        )
        for task, images in self._images(split, tasks, training=False, size=size):
            labels = self._labels(task.items)
            yield Batch(self._normalised(images), labels, labels, task.items, task.step, 0)

    def share(self, split: Split, most: int | None = None) -> Items:
        """The images that this rank evaluates, dealt out one by one."""
        if split not in self._items:
            self.prepare(split, training=False)
        items = self._items[split]
        if most is not None and most < len(items):
            items = items[np.linspace(0, len(items) - 1, most).round().astype(int)]
        return items[self.rank :: self.world]

    def alone(self) -> "Loader":
        """The same data for a process that sees all of it."""
        loader = copy.copy(self)
        loader.rank, loader.world = 0, 1
        return loader

    def _plan(self, start: int) -> Iterator[Task]:
        """This rank's part of every batch from step `start` on."""
        items, steps = self._items["train"], self.steps
        first, last = (self.batch * (self.rank + end) // self.world for end in (0, 1))
        epoch, number = divmod(start, steps)
        while True:
            chosen = items[order(self.source.labels[items], self.seed, epoch, self.config.balanced)]
            draws = chosen
            if self.config.balanced:
                draws = chosen + len(self.source) * repeats(chosen)
            for step in range(number, steps):
                mine = slice(step * self.batch + first, step * self.batch + last)
                yield Task(epoch * steps + step, epoch, chosen[mine], draws[mine])
            epoch, number = epoch + 1, 0

    def _images(
        self, split: Split, tasks: Iterator[Task], *, training: bool, size: int | None = None
    ) -> Iterator[tuple[Task, Tensor]]:
        """The uint8 images (B, C, H, W) of each task, which are valid until the next one."""
        reader = self._reader(training)
        read = self._kept.get((split, reader.whole)) or reader
        if isinstance(read, Kept) and not reader.whole and (together := read.together) is not None:
            yield from picked(torch.from_numpy(together), read, tasks)
            return
        shape = self.view.channels, self.view.height, self.view.width
        count = size or -(-self.batch // self.world)
        cut = self.config.augment if reader.whole else None
        packed = reader.whole or reader.packed(int(self._items[split][0]))
        images = ahead(
            Pictures(read, self.view, cut, self.seed),
            tasks,
            workers=self.workers if packed else 0,
            room=count * int(np.prod(shape)),
            name=self.source.ids.__getitem__,
        )
        for task, _, slot in images:
            yield task, torch.from_numpy(slot).view(count, *shape)[: len(task.items)]

    def _normalised(self, images: Tensor) -> Tensor:
        return normalise(self.view, images.to(self.device, non_blocking=True))

    def _labels(self, items: Items) -> Tensor:
        return torch.from_numpy(self.source.labels[items]).to(self.device)


def listed(broken: Broken) -> str:
    """All broken images with the reasons, or as many as one line can tell."""
    images = "1 image" if len(broken) == 1 else f"{len(broken):,} images"
    whys = list(broken.values())
    if (more := len(whys) - TOLD) > 0:
        whys[TOLD:] = [f"and {more:,} more, which `vitrail check DATA --json` lists"]
    return f"{images} cannot be read: {'; '.join(whys)}"


@contextmanager
def one_thread() -> Iterator[None]:
    """For work of a millisecond: to wait for a second thread takes longer on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def picked(together: Tensor, kept: Kept, tasks: Iterator[Task]) -> Iterator[tuple[Task, Tensor]]:
    """Batches of images that all lie in one array: no process, no loop over images."""
    for task in tasks:
        rows = torch.from_numpy(kept.rows(task.items))
        with one_thread():
            images = together.index_select(0, rows)
        yield task, images


class Pictures:
    """What a worker does with a task: it fills a slot with the images of a batch.

    With `settings`, whole images are cut and varied; without, they come as they are.
    """

    def __init__(self, read: Kept | Reader, view: Preprocess, settings: Augment | None, seed: int):
        self.read, self.view, self.settings, self.seed = read, view, settings, seed
        a = settings or Augment()
        self.rest = Augment(  # what is left to do with an image that was cut
            rotate=a.rotate, zoom=a.zoom, shear=a.shear, policy=a.policy, magnitude=a.magnitude
        )

    def __call__(self, task: Task, slot: Slot, note: Note) -> None:
        rows = slot.reshape(-1, self.view.channels, self.view.height, self.view.width)
        luck = augment.luck(self.seed, task.epoch, task.draws)
        for row, item in enumerate(task.items.tolist()):
            note(item)
            own = {name: numbers[row : row + 1] for name, numbers in luck.items()}
            rows[row] = self.picture(self.pixels(item), own)

    def pixels(self, item: int) -> NDArray[np.uint8]:
        try:
            return self.read(item)
        except Refused:
            raise
        except UserError as error:
            raise UserError(
                f"{error}; put it back as it was, or leave it out with --data.skip-broken"
            ) from error

    def picture(self, pixels: NDArray[np.uint8], luck: augment.Luck) -> NDArray[np.uint8]:
        if self.settings is None:
            return pixels
        planes = augment.crop(pixels, self.settings, self.view, luck)
        if self.rest == Augment():
            return planes
        image = torch.from_numpy(np.ascontiguousarray(planes))
        return augment.augment(image[None], self.rest, luck)[0].numpy()


def order(labels: NDArray[np.int64], seed: int, epoch: int, balanced: bool) -> Items:
    """The order of one epoch. Balanced, it is as long, but every class has the same share of it."""
    random = np.random.default_rng((ORDER, seed, epoch))
    if not balanced:
        return random.permutation(len(labels))
    _, counts = np.unique(labels, return_counts=True)
    groups = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    shares = np.full(len(groups), len(labels) // len(groups))
    shares[random.permutation(len(groups))[: len(labels) % len(groups)]] += 1
    chosen = []
    for group, share in zip(groups, shares, strict=True):
        rounds = [random.permutation(group) for _ in range(-(-share // len(group)))]
        chosen += [np.concatenate([group[:0], *rounds])[:share]]
    return random.permutation(np.concatenate(chosen))


def repeats(items: Items) -> Items:
    """How often each item came already: 0 for the first time."""
    by_item = np.argsort(items, kind="stable")
    ordered = items[by_item]
    new = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    position = np.arange(len(items))
    since = position - np.maximum.accumulate(np.where(new, position, 0))
    counts = np.empty_like(items)
    counts[by_item] = since
    return counts
