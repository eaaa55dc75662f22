"""Reads one image of a data set at the size in which it is cached or trained on."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.data.config import Preprocess
from vitrail.data.image import image_info, load_image
from vitrail.data.pixels import Pixels, stored_dtype
from vitrail.data.preprocess import resize_and_crop, shrink_to_cover
from vitrail.data.reading.contents import contents_of, expect_reads
from vitrail.data.reading.workers import ReportItem, Slot, prefetch
from vitrail.data.source import Source
from vitrail.data.sources.store import is_url
from vitrail.data.sources.store_cache import BLOCK, Range, download_ahead, iterate_arrivals
from vitrail.errors import OutOfResources, UserError

Items = NDArray[np.int64]  # indices of images in their source

CROP_MARGIN = 1.3  # uncropped images are stored this much larger than the input, for random crops
CHUNK_ITEMS = 4  # images per task of a decoding worker
MAX_STEP = 3  # mean distance between the items of a sequential pass; larger in a sample
HEADER_SAMPLE = 64  # images whose headers predict the memory for all
MAX_STAGED = 2**23  # bytes of encoded files per slot: 32 slots, of 8 workers, take 256 MB at most


@dataclass(frozen=True)
class Reader:
    source: Source
    preprocess: Preprocess
    uncropped: bool  # keep the whole image, downscaled, for random crops; else the center crop

    def __call__(self, item: int, content: bytes | None = None) -> Pixels:
        """Reads an image: uncropped as (height, width, channels), else (channels, height, width).

        `content` is the encoded file, if it is in memory already.
        """
        try:
            encoded = self.source[item].content if content is None else content
            pixels = load_image(encoded, self.preprocess.channels, self.preprocess.pixels)
        except UserError as error:
            raise type(error)(f"{self.source.ids[item]}: {error}") from error
        if self.uncropped:
            return shrink_to_cover(pixels, self.stored_size, self.preprocess.interpolation)
        return np.ascontiguousarray(resize_and_crop(self.preprocess, pixels).transpose(2, 0, 1))

    def arrivals(self, items: list[int]) -> Iterable[int]:
        """The order in which to read items, as positions: those in a store as they arrive."""
        find = self.find_range
        return iterate_arrivals([find(item) for item in items]) if find else range(len(items))

    def download(self, items: list[int]) -> None:
        """Downloads items that are in a store; in a sequential pass, starts on the next block."""
        if not items or not (find := self.find_range):
            return
        for _ in self.arrivals(items):
            pass
        if items[-1] - items[0] < MAX_STEP * len(items):
            later = (item + self.items_per_block for item in items)
            download_ahead(find(item) for item in later if item < len(self.source))

    @cached_property
    def items_per_block(self) -> int:
        return max(1, int(BLOCK // max(1.0, self.source.sizes.mean())))

    @property
    def find_range(self) -> Callable[[int], Range | None] | None:
        """A function that locates an item in a store; None if the source is not in one."""
        return getattr(self.source, "stored_range", None) if is_url(self.source.path) else None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the images."""
        return stored_dtype(self.preprocess.pixels)

    @property
    def stored_size(self) -> tuple[int, int]:
        """The height and width that an uncropped image just covers."""
        return int(CROP_MARGIN * self.preprocess.height), int(CROP_MARGIN * self.preprocess.width)

    def estimate_bytes(self, items: Items) -> int:
        """Estimates the memory for these images from the headers of a few."""
        if not self.uncropped:
            pixels = self.preprocess.height * self.preprocess.width
            return len(items) * pixels * self.preprocess.channels * self.dtype.itemsize
        sample = items[np.linspace(0, len(items) - 1, min(HEADER_SAMPLE, len(items))).astype(int)]
        expect_reads(self.source, sample)
        sizes = [size for item in sample.tolist() if (size := self.estimate_item_bytes(item))]
        return int(np.mean(sizes) * len(items)) if sizes else 0

    def estimate_item_bytes(self, item: int) -> int | None:
        """Estimates the memory for one image from its header; None if it is broken."""
        try:
            content = self.source[item].content
            header = None if isinstance(content, np.ndarray) else image_info(content)
            if header is None:
                height, width = load_image(content, None, None).shape[:2]
            else:
                height, width = header.height, header.width
        except UserError:
            return None
        ratio = min(1.0, max(self.stored_size[0] / height, self.stored_size[1] / width))
        values = int(height * width * ratio**2) * self.preprocess.channels
        return values * self.dtype.itemsize

    def is_encoded(self, item: int) -> bool:
        """Whether an image must be decoded, which is worth a worker, or is an array of pixels."""
        expect_reads(self.source, np.array([item]))
        try:
            return not isinstance(self.source[item].content, np.ndarray)
        except UserError:
            return True


def decode_items(reader: Reader, items: Items, workers: int) -> Iterator[tuple[int, Pixels | str]]:
    """Yields each item with its pixels, valid until the next one, or why it cannot be read."""
    if not len(items):
        return
    chunks = [items[start : start + CHUNK_ITEMS] for start in range(0, len(items), CHUNK_ITEMS)]
    if len(chunks) <= workers or not reader.is_encoded(int(items[0])):
        workers = 0
    name = reader.source.ids.__getitem__
    for chunk, images, slot in prefetch(
        DecodeChunk(reader),
        chunks,
        workers=workers,
        slot_size=decoding_slot_size(reader, chunks) if workers else 0,
        stage=StageContents(reader.source),
        name=name,
    ):
        start = 0
        for item, image in zip(chunk.tolist(), images, strict=True):
            if isinstance(image, tuple):
                end = start + math.prod(image) * reader.dtype.itemsize
                yield item, slot[start:end].view(reader.dtype).reshape(image)
                start = end
            else:
                yield item, image


def decoding_slot_size(reader: Reader, chunks: list[Items]) -> int:
    """Returns the bytes that hold a chunk of decoded images, and of buffered encoded ones."""
    height, width = reader.stored_size
    values = 2 * CHUNK_ITEMS * height * width * reader.preprocess.channels  # sides of 1 : 2
    decoded = values * reader.dtype.itemsize
    if not len(contents_of(reader.source)):
        return decoded
    encoded = max(int(reader.source.sizes[chunk].sum()) for chunk in chunks)
    return max(decoded, min(encoded, MAX_STAGED))


class StagedChunk(NamedTuple):
    """The items of a chunk and the size of each content in the slot; 0: to be read from disk."""

    items: Items
    sizes: list[int]


@dataclass(frozen=True)
class StageContents:
    """Moves the contents that earlier passes read from the source's buffer into a worker's slot."""

    source: Source

    def __call__(self, chunk: Items, slot: Slot) -> StagedChunk:
        contents = contents_of(self.source)
        start, sizes = 0, []
        for item in chunk.tolist():
            content = contents.take(item)
            if content is None or start + len(content) > len(slot):
                sizes.append(0)
                continue
            end = start + len(content)
            slot[start:end] = np.frombuffer(content, np.uint8)
            sizes.append(len(content))
            start = end
        return StagedChunk(chunk, sizes)


@dataclass(frozen=True)
class DecodeChunk:
    """Decodes a chunk in a worker: pixels go into the slot, and only their shapes are returned."""

    reader: Reader

    def __call__(
        self, chunk: Items | StagedChunk, slot: Slot, report_item: ReportItem
    ) -> list[tuple[int, ...] | Pixels | str]:
        if isinstance(chunk, StagedChunk):
            items, contents = chunk.items, unstage(chunk, slot)
        else:
            items, contents = chunk, [None] * len(chunk)
        pairs = list(zip(items.tolist(), contents, strict=True))
        self.reader.download([item for item, content in pairs if content is None])
        results: list[tuple[int, ...] | Pixels | str] = []
        start = 0
        for item, content in pairs:
            report_item(item)
            try:
                pixels = self.reader(item, content)
            except OutOfResources:
                raise
            except UserError as error:
                results.append(str(error))
                continue
            end = start + pixels.nbytes
            if end <= len(slot):
                slot[start:end] = pixels.reshape(-1).view(np.uint8)
                results.append(pixels.shape)
                start = end
            else:
                results.append(pixels)
        return results


def unstage(chunk: StagedChunk, slot: Slot) -> list[bytes | None]:
    """Copies the contents out of the slot, before decoded pixels overwrite them."""
    ends = np.cumsum(chunk.sizes)
    return [
        slot[end - size : end].tobytes() if size else None
        for size, end in zip(chunk.sizes, ends.tolist(), strict=True)
    ]
