"""One image of a data set, as large as it is kept: what the cache holds, and what it saves."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitrail.data.config import Preprocess
from vitrail.data.image import Pixels, facts, load_image
from vitrail.data.preprocess import fit, shrink
from vitrail.data.reading.workers import Note, Slot, ahead
from vitrail.data.source import Source
from vitrail.errors import Refused, UserError

Items = NDArray[np.int64]  # numbers of images in their source

SPARE = 1.3  # whole images are kept this much larger than the model sees, for random crops
CHUNK = 4  # images that a worker decodes before it answers
SAMPLE = 64  # images whose headers tell how much room all will need


@dataclass(frozen=True)
class Reader:
    source: Source
    view: Preprocess
    whole: bool  # all of the image, made smaller; else what evaluation sees of it

    def __call__(self, item: int) -> Pixels:
        """A whole image as (height, width, channels), else (channels, height, width)."""
        try:
            pixels = load_image(self.source[item].content, self.view.channels)
        except UserError as error:
            raise type(error)(f"{self.source.ids[item]}: {error}") from error
        if self.whole:
            return shrink(pixels, self.spare, self.view.interpolation)
        return np.ascontiguousarray(fit(self.view, pixels).transpose(2, 0, 1))

    @property
    def spare(self) -> tuple[int, int]:
        return int(SPARE * self.view.height), int(SPARE * self.view.width)

    def room(self, items: Items) -> int:
        """Bytes that these images need, told from the headers of a few."""
        if not self.whole:
            return len(items) * self.view.height * self.view.width * self.view.channels
        some = items[np.linspace(0, len(items) - 1, min(SAMPLE, len(items))).astype(int)]
        needs = [need for item in some.tolist() if (need := self.need(item))]
        return int(np.mean(needs) * len(items)) if needs else 0

    def need(self, item: int) -> int | None:
        """Bytes that one image needs; None if it is broken."""
        try:
            content = self.source[item].content
            header = None if isinstance(content, np.ndarray) else facts(content)
            if header is None:
                height, width = load_image(content, None).shape[:2]
            else:
                height, width = header.height, header.width
        except UserError:
            return None
        ratio = min(1.0, max(self.spare[0] / height, self.spare[1] / width))
        return int(height * width * ratio**2) * self.view.channels

    def packed(self, item: int) -> bool:
        """Whether this image is a file to decode, which is worth a worker, or already pixels."""
        try:
            return not isinstance(self.source[item].content, np.ndarray)
        except UserError:
            return True


def decode(reader: Reader, items: Items, workers: int) -> Iterator[tuple[int, Pixels | str]]:
    """Each item with its pixels, which are valid until the next one, or why it cannot be read."""
    if not len(items):
        return
    chunks = [items[start : start + CHUNK] for start in range(0, len(items), CHUNK)]
    if len(chunks) <= workers or not reader.packed(int(items[0])):
        workers = 0
    height, width = reader.spare
    room = 2 * height * width * reader.view.channels  # sides of 1 : 2
    name = reader.source.ids.__getitem__
    for chunk, images, slot in ahead(
        Decode(reader), chunks, workers=workers, room=CHUNK * room if workers else 0, name=name
    ):
        start = 0
        for item, image in zip(chunk.tolist(), images, strict=True):
            if isinstance(image, tuple):
                end = start + math.prod(image)
                yield item, slot[start:end].reshape(image)
                start = end
            else:
                yield item, image


@dataclass(frozen=True)
class Decode:
    """The work on one chunk: pixels go into the slot and only their shape is answered."""

    reader: Reader

    def __call__(
        self, chunk: Items, slot: Slot, note: Note
    ) -> list[tuple[int, ...] | Pixels | str]:
        answers: list[tuple[int, ...] | Pixels | str] = []
        start = 0
        for item in chunk.tolist():
            note(item)
            try:
                pixels = self.reader(item)
            except Refused:
                raise
            except UserError as error:
                answers.append(str(error))
                continue
            end = start + pixels.size
            if end <= len(slot):
                slot[start:end] = pixels.reshape(-1)
                answers.append(pixels.shape)
                start = end
            else:
                answers.append(pixels)
        return answers
