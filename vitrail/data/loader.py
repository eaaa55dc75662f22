"""Batches as a function of (seed, step), so that a run can resume at any step."""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.data import augment
from vitrail.data.config import Augment, DataConfig, Preprocess
from vitrail.data.order import MIX_STREAM, count_repeats, epoch_order, window_order
from vitrail.data.pixels import Pixels, stored_dtype
from vitrail.data.preprocess import normalise
from vitrail.data.reading.cache import (
    Broken,
    DecodedImages,
    available_disk,
    cache_images,
    find_broken,
)
from vitrail.data.reading.contents import contents_of
from vitrail.data.reading.memory import available_memory, local_world_size, retain_freed_memory
from vitrail.data.reading.reader import Items, Reader, decode_items
from vitrail.data.reading.workers import ReportItem, Slot, default_workers, prefetch
from vitrail.data.source import NO_LABEL, SPLITS, Source, Split, split_indices
from vitrail.data.sources.shards import ShardSource
from vitrail.data.statistics import MAX_IMAGES, MAX_UNCACHED, channel_statistics, pixel_step
from vitrail.errors import OutOfResources, UserError

SMALL_SIZE = 64  # pixels: up to here whole batches are augmented at once, above by the workers
MAX_BROKEN_LISTED = 20  # broken images that an error names
MEMORY_SHARE, DISK_SHARE = 3, 2  # a third of the memory and half of the disk hold decoded images

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Batch:
    images: Tensor  # float32 (B, C, H, W), normalised
    labels: Tensor  # int64 (B,); multi-label: float32 (B, K) of 0 and 1
    targets: Tensor  # the labels; after mixup or CutMix class probabilities, float (B, K)
    items: Items  # indices of the images in the source
    step: int
    epoch: int
    mirrored: NDArray[np.bool_] | None = None  # images that were flipped; None in evaluation


# What a teacher adds to the targets of a training batch: columns (B, A).
Annotate = Callable[[Batch], Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """The contents of one batch, decided before any image is read."""

    step: int
    epoch: int
    items: Items
    random_ids: Items  # seed the augmentation: the item, or another number if it is a repeat


class Loader:
    """Batches of a source for training and evaluation, on one of `world_size` ranks.

    `batch` is the global batch size: the ranks get parts of the same batches, whose sizes differ
    by at most one image. An epoch drops the images that do not fill a batch, different ones each
    time.
    """

    def __init__(
        self,
        source: Source,
        preprocess: Preprocess,
        config: DataConfig | None = None,
        *,
        batch: int = 128,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: str | torch.device = "cpu",
        progress: bool = True,
    ):
        if batch < world_size:
            raise UserError(
                f"a batch of {batch} leaves some of {world_size} processes without an image; "
                f"set `train.batch` to at least {world_size}"
            )
        retain_freed_memory()
        self.source, self.preprocess, self.config = source, preprocess, config or DataConfig()
        self.batch, self.seed, self.rank, self.world_size = batch, seed, rank, world_size
        self.device, self.progress = torch.device(device), progress
        self.small = (
            self.config.train_size is None
            and max(preprocess.height, preprocess.width) <= SMALL_SIZE
        )
        self.inputs: Tensor | None = None  # what training batches hold instead of images
        self.unlabelled: Loader | None = None  # its images follow those of each training batch
        self.annotate: Annotate | None = None  # class probabilities and its columns are the targets
        workers, memory, disk = self.config.workers, self.config.cache_gb, self.config.disk_gb
        self.workers = default_workers() if workers is None else workers
        self.memory = (  # bytes left for decoded images
            available_memory() // MEMORY_SHARE // local_world_size()
            if memory is None
            else int(memory * 1e9)
        )
        self.disk = available_disk() // DISK_SHARE if disk is None else int(disk * 1e9)
        self.broken: Broken = {}  # skipped, with `skip_broken`
        self._caches: dict[tuple[Split, bool], DecodedImages | None] = {}  # by split, uncropped
        self._items: dict[Split, Items] = {}

    def prepare(self, *splits: Split, training: bool = True) -> None:
        """Decodes the splits, all by default, if they fit into the cache.

        One error names all broken images; with `skip_broken` they are skipped instead. If a split
        is not cached, a broken image is an error when its batch comes. `training` false caches the
        train split center-cropped, as for evaluation.
        """
        broken: Broken = {}
        try:
            for split in splits or SPLITS:
                reader = self._reader(training and split == "train")
                if (split, reader.uncropped) not in self._caches:
                    broken |= self._prepare(split, reader)
        finally:
            contents_of(self.source).clear()
        if broken and not self.config.skip_broken:
            self._caches.clear()  # a second call raises the error again
            self._items.clear()
            raise UserError(
                f"{describe_broken(broken)}; repair or remove them, "
                f"or skip them with `data.skip_broken=True`"
            )
        if broken:
            log.warning(f"skipped {len(broken)} of {len(self.source)} images: they are broken")
        self.broken |= broken

    def _prepare(self, split: Split, reader: Reader) -> Broken:
        items = split_indices(self.source, split)
        # test images are read once: memory shows broken ones early, a file would not pay off
        disk = 0 if split == "test" else self.disk
        cached = cache_images(
            reader,
            items,
            memory=self.memory,
            disk=disk,
            workers=self.workers,
            progress=self.progress,
        )
        images, broken = cached or (None, {})
        if images is not None and images.file is None:
            self.memory -= int(images.starts[-1])
        if images is None and self.config.skip_broken:
            broken = find_broken(reader, items, workers=self.workers, progress=self.progress)
        self._caches[split, reader.uncropped] = images
        self._items[split] = np.setdiff1d(items, list(broken))
        return broken

    def _reader(self, training: bool) -> Reader:
        """Large training images are cached uncropped, for a new random crop each time."""
        preprocess = self.train_preprocess if training else self.preprocess
        return Reader(self.source, preprocess, uncropped=training and not self.small)

    def measure(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Computes mean and standard deviation of each channel of the training images."""
        self.prepare("train")
        reader, items = self._reader(training=True), self._items["train"]
        cached = self._caches["train", reader.uncropped]
        limit = MAX_UNCACHED if cached is None else MAX_IMAGES
        chosen = items[np.linspace(0, len(items) - 1, min(limit, len(items))).astype(int)]
        images: Iterator[Pixels] = map(cached, chosen.tolist()) if cached else iter(())
        if cached is None:
            decoded = decode_items(reader, chosen, self.workers)
            images = (image for _, image in decoded if not isinstance(image, str))
        size = reader.estimate_bytes(chosen) // reader.dtype.itemsize
        step = pixel_step(size)
        return channel_statistics(images, channels_first=not reader.uncropped, step=step)

    @property
    def train_preprocess(self) -> Preprocess:
        """The preprocessing of training images, which may be smaller than those of evaluation."""
        size = self.config.train_size
        return self.preprocess if size is None else replace(self.preprocess, size=size)

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        if "train" not in self._items:
            self.prepare("train")
        count = len(self._items["train"])
        if count < self.batch:
            raise UserError(
                f"{count} training images are fewer than one batch of {self.batch}; "
                f"lower `train.batch`"
            )
        return count // self.batch

    def training(
        self, start: int = 0, end: int | None = None, *, unlabelled_from: int = 0
    ) -> Iterator[Batch]:
        """Yields augmented batches from step `start` on; prefetches nothing from `end` on.

        From step `unlabelled_from` on, the images of `unlabelled` are beside the labelled ones.
        """
        batches = self._labelled_batches(start, end)
        if self.unlabelled is None:
            yield from batches
            return
        first = max(start, unlabelled_from)
        yield from islice(batches, first - start)
        if end is None or first < end:
            others = self.unlabelled.training(first, end)
            yield from map(place_beside, batches, others)

    def _labelled_batches(self, start: int, end: int | None) -> Iterator[Batch]:
        self.prepare("train")
        tasks = islice(self._plan(start), None if end is None else end - start)
        if self.inputs is not None:
            yield from self._stored_batches(self.inputs, tasks)
            return
        for task, images in self._images("train", tasks, training=True):
            with limit_threads(1):  # on a busy machine, a second one costs more than it saves
                batch = self._make_batch(task, images)
            yield batch

    def _stored_batches(self, inputs: Tensor, tasks: Iterator[Task]) -> Iterator[Batch]:
        """Yields rows of `inputs`, (views, training images, ...), mirrored or not."""
        for task in tasks:
            uniforms = augment.sample_uniforms(self.seed, task.epoch, task.random_ids)
            mirrored = uniforms["flip"] < self.config.augment.flip
            rows = torch.from_numpy(np.searchsorted(self._items["train"], task.items))
            x = inputs[torch.from_numpy(mirrored.astype(np.int64)), rows]
            yield self._mixed_batch(task, x, mirrored)

    def _make_batch(self, task: Task, images: Tensor) -> Batch:
        """Applies what needs the whole batch: all augmentation of small images, mixing of any."""
        settings = self.config.augment
        uniforms = augment.sample_uniforms(self.seed, task.epoch, task.random_ids)
        if self.small:
            images = augment.augment(images, settings, uniforms)
        x = augment.random_erasing(self._normalise(images), settings, uniforms)
        return self._mixed_batch(task, x, uniforms["flip"] < settings.flip)

    def _mixed_batch(self, task: Task, x: Tensor, mirrored: NDArray[np.bool_]) -> Batch:
        """The batch after mixup or CutMix, with what a teacher adds to its targets."""
        settings, labels = self.config.augment, self._labels(task.items)
        targets = labels
        if settings.mixup or settings.cutmix:
            rng = np.random.default_rng((MIX_STREAM, self.seed, task.step, self.rank))
            classes = len(self.source.classes)
            x, targets = augment.mixup_or_cutmix(x, labels, classes, settings, rng)
        return self._annotated(
            Batch(x, labels, targets, task.items, task.step, task.epoch, mirrored)
        )

    def _annotated(self, batch: Batch) -> Batch:
        """The batch with what a teacher adds to its targets, if there is one."""
        if self.annotate is None:
            return batch
        targets = batch.targets
        if targets.ndim == 1:
            classes = len(self.source.classes)
            one_hot = F.one_hot(targets.clamp(min=0), classes).float()
            targets = one_hot * (targets != NO_LABEL)[:, None]
        return replace(batch, targets=torch.cat([targets, self.annotate(batch)], dim=1))

    def evaluation(
        self, split: Split, batch: int | None = None, limit: int | None = None
    ) -> Iterator[Batch]:
        """Yields this rank's part of a split in order, each image once; the last batch is smaller.

        `limit` is a maximum number of images, evenly spaced over the split.
        """
        items = self.rank_items(split, limit)
        if not len(items):
            return
        size = batch or max(1, self.batch // self.world_size)
        tasks = (
            Task(number, 0, part, part)
            for number, start in enumerate(range(0, len(items), size))
            for part in [items[start : start + size]]
        )
        for task, images in self._images(split, tasks, training=False, size=size):
            labels = self._labels(task.items)
            yield Batch(self._normalise(images), labels, labels, task.items, task.step, 0)

    def rank_items(self, split: Split, limit: int | None = None) -> Items:
        """Returns the images that this rank evaluates, every `world_size`-th of the split."""
        if split not in self._items:
            self.prepare(split, training=False)
        items = self._items[split]
        if limit is not None and limit < len(items):
            items = items[np.linspace(0, len(items) - 1, limit).round().astype(int)]
        return items[self.rank :: self.world_size]

    def as_single_process(self) -> "Loader":
        """Returns a loader of the same data for one process that gets all of it."""
        loader = copy.copy(self)
        loader.rank, loader.world_size = 0, 1
        return loader

    def with_labels(self) -> "Loader":
        """Returns a loader for one process, of the training and validation images with a label."""
        loader = self.as_single_process()
        labelled = self.source.labels != NO_LABEL
        for split in SPLITS[:2]:
            items = loader.rank_items(split)
            loader._items = {**loader._items, split: items[labelled[items]]}
        return loader

    def restrict(self, items: Items) -> "Loader":
        """Returns a loader for one process that trains on these images only, without a teacher."""
        loader = self.as_single_process()
        loader.annotate = loader.unlabelled = None
        loader.progress = False
        loader.batch = min(self.batch, len(items))
        loader._items = {**self._items, "train": np.sort(items)}
        return loader

    def _plan(self, start: int) -> Iterator[Task]:
        """Yields this rank's part of every batch from step `start` on."""
        items, steps = self._items["train"], self.steps
        first, last = (self.batch * (self.rank + end) // self.world_size for end in (0, 1))
        epoch, number = divmod(start, steps)
        while True:
            chosen = items[self._order(items, epoch)]
            random_ids = chosen
            if self.config.balanced:
                random_ids = chosen + len(self.source) * count_repeats(chosen)
            for step in range(number, steps):
                part = slice(step * self.batch + first, step * self.batch + last)
                yield Task(epoch * steps + step, epoch, chosen[part], random_ids[part])
            epoch, number = epoch + 1, 0

    def _order(self, items: Items, epoch: int) -> Items:
        """The positions of the items in the order of an epoch, which no rank or resume changes."""
        if self.config.shuffle == "all":
            labels = self.source.labels[items]
            return epoch_order(labels, self.seed, epoch, self.config.balanced)
        if not isinstance(self.source, ShardSource):
            raise UserError(
                f"`data.shuffle` is 'windows', which is for tar shards, and {self.source.name} has "
                f"none; set `data.shuffle='all'`"
            )
        shards, sizes = self.source.shard_indices[items], self.source.sizes[items]
        return window_order(shards, sizes, self.batch, self.seed, epoch)

    def _images(
        self, split: Split, tasks: Iterator[Task], *, training: bool, size: int | None = None
    ) -> Iterator[tuple[Task, Tensor]]:
        """Yields the images (B, C, H, W) of each task, valid until the next one."""
        reader = self._reader(training)
        cached = self._caches.get((split, reader.uncropped))
        if cached is not None and not reader.uncropped and (stack := cached.stacked) is not None:
            yield from gather_batches(torch.from_numpy(stack), cached, tasks)
            return
        preprocess = reader.preprocess
        shape = preprocess.channels, preprocess.height, preprocess.width
        count = size or -(-self.batch // self.world_size)
        settings = self.config.augment if reader.uncropped else None
        needs_worker = reader.uncropped or reader.is_encoded(int(self._items[split][0]))
        images = prefetch(
            FillBatch(cached or reader, preprocess, settings, self.seed),
            tasks,
            workers=self.workers if needs_worker else 0,
            slot_size=count * int(np.prod(shape)) * reader.dtype.itemsize,
            name=self.source.ids.__getitem__,
        )
        for task, _, slot in images:
            batch = torch.from_numpy(slot.view(reader.dtype)).view(count, *shape)
            yield task, batch[: len(task.items)]

    def _normalise(self, images: Tensor) -> Tensor:
        # CUDA copies unpinned memory before it returns; MPS may read it after the slot is reused
        non_blocking = self.device.type == "cuda"
        return normalise(self.preprocess, images.to(self.device, non_blocking=non_blocking))

    def _labels(self, items: Items) -> Tensor:
        labels = torch.from_numpy(self.source.labels[items])
        return (labels.float() if labels.ndim == 2 else labels).to(self.device)


def place_beside(batch: Batch, other: Batch) -> Batch:
    """The batch with images (B, 1 + ratio, C, H, W): each labelled one, then some of the other."""
    rows = other.images.unflatten(0, (len(batch.images), -1))
    return replace(batch, images=torch.cat([batch.images[:, None], rows], dim=1))


def describe_broken(broken: Broken) -> str:
    """Lists broken images with the reasons, as many as fit into a message."""
    images = "1 image" if len(broken) == 1 else f"{len(broken):,} images"
    reasons = list(broken.values())
    if (more := len(reasons) - MAX_BROKEN_LISTED) > 0:
        reasons[MAX_BROKEN_LISTED:] = [
            f"and {more:,} more, which `vitrail check DATA --json` lists"
        ]
    return f"{images} cannot be read: {'; '.join(reasons)}"


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Sets the number of threads that torch uses in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gather_batches(
    stack: Tensor, cached: DecodedImages, tasks: Iterator[Task]
) -> Iterator[tuple[Task, Tensor]]:
    """Yields batches of images that are all in one array, without workers or loops over images."""
    for task in tasks:
        rows = torch.from_numpy(cached.rows(task.items))
        with limit_threads(1):
            images = stack.index_select(0, rows)
        yield task, images


class FillBatch:
    """The work on a task in a worker: fills a slot with the images of a batch.

    With `settings`, it crops and augments uncropped images; without, it copies them.
    """

    def __init__(
        self,
        read: DecodedImages | Reader,
        preprocess: Preprocess,
        settings: Augment | None,
        seed: int,
    ):
        self.read, self.preprocess, self.settings, self.seed = read, preprocess, settings, seed
        a = settings or Augment()
        self.after_crop = Augment(  # `random_crop` does the rest
            rotate=a.rotate, zoom=a.zoom, shear=a.shear, policy=a.policy, magnitude=a.magnitude
        )

    def __call__(self, task: Task, slot: Slot, report_item: ReportItem) -> None:
        shape = self.preprocess.channels, self.preprocess.height, self.preprocess.width
        rows = slot.view(stored_dtype(self.preprocess.pixels)).reshape(-1, *shape)
        uniforms = augment.sample_uniforms(self.seed, task.epoch, task.random_ids)
        items = task.items.tolist()
        rows_in_order: Iterable[int] = range(len(items))
        if isinstance(self.read, Reader):
            rows_in_order = self.read.arrivals(items)
        for row in rows_in_order:
            report_item(item := items[row])
            own = {name: numbers[row : row + 1] for name, numbers in uniforms.items()}
            rows[row] = self.augment_image(self.read_pixels(item), own)

    def read_pixels(self, item: int) -> Pixels:
        try:
            return self.read(item)
        except OutOfResources:
            raise
        except UserError as error:
            raise UserError(
                f"{error}; restore the file, or skip it with `data.skip_broken=True`"
            ) from error

    def augment_image(self, pixels: Pixels, uniforms: augment.Uniforms) -> Pixels:
        if self.settings is None:
            return pixels
        planes = augment.random_crop(pixels, self.settings, self.preprocess, uniforms)
        if self.after_crop == Augment():
            return planes
        image = torch.from_numpy(np.ascontiguousarray(planes))
        return augment.augment(image[None], self.after_crop, uniforms)[0].numpy()
