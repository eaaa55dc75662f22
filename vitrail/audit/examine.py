"""One look at every image of a data set: what can be read, what it is, and what it resembles."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.audit import similar
from vitrail.data.image import (
    MAX_PIXELS,
    READERS,
    SUFFIXES,
    Pixels,
    kind_of,
    load_image,
    open_image,
    orientation,
    quiet,
    usual,
)
from vitrail.data.reading.workers import Note, Slot, ahead, default_workers
from vitrail.data.source import Source, sample
from vitrail.data.split import digest
from vitrail.display.page import viewable
from vitrail.display.progress import bar
from vitrail.errors import Refused, UserError

CHUNK = 16  # images that a worker looks at before it answers
PHOTO = 32  # pixels of the short side from which on pictures are compared by their look
LARGE = 30_000  # numbers from which on Pillow counts faster than numpy
MOMENTS = (np.arange(256)[:, None] / 255) ** np.arange(3)  # of each level: 1, itself, squared

KINDS = (*READERS, "NumPy", "pixels")  # as they are stored
ODD = {  # what an image file may be beside plain grey or colour, and what becomes of it
    "CMYK": "converted to red, green and blue",
    "palette": "converted to red, green and blue",
    "16 bits": "scaled to 8 bits a channel",
    "transparent": "laid on white",
    "frames": "of whose frames only the first is used",
    "turned": "put upright as the camera noted",
}
TRAITS = ("read", "constant", "photo", "small", "misnamed", *ODD)  # bits, the first is the lowest
BIT = {name: 1 << number for number, name in enumerate(TRAITS)}

ROW = np.dtype(  # all that is kept of an image
    [
        ("digest", "<u8", 2),  # of the file, or of the pixels where there is none
        ("look", "<u8"),  # perceptual hash of a photo, digest of a small picture's pixels
        ("height", "<i4"),
        ("width", "<i4"),
        ("channels", "<i4"),
        ("kind", "u1"),  # position in KINDS
        ("traits", "<u2"),
    ]
)
Rows = NDArray[Any]  # of ROW
Sums = dict[int, NDArray[np.float64]]  # channels: (number, mean, mean of squares), summed up


@dataclass(frozen=True, eq=False)
class Examination:
    """What was seen; `findings` judges it."""

    source: Source
    rows: Rows  # one for each item
    broken: dict[int, str]  # items that training could not use, and why
    mean: tuple[float, ...]  # per channel, over the training images; 1 is white
    std: tuple[float, ...]

    def items(self, trait: str) -> NDArray[np.int64]:
        """Those that have one of TRAITS."""
        return np.flatnonzero(self.rows["traits"] & BIT[trait])


def examine(source: Source, *, workers: int | None = None, progress: bool = True) -> Examination:
    """Decodes every image once; keeps one ROW of each."""
    rows = np.zeros(len(source), ROW)
    broken: dict[int, str] = {}
    sums: Sums = {}
    items = np.arange(len(source))
    chunks = (items[start : start + CHUNK] for start in range(0, len(items), CHUNK))
    workers = default_workers() if workers is None else workers
    name = source.ids.__getitem__
    with bar("looking at images", len(source), show=progress) as advance:
        for chunk, seen, _ in ahead(Look(source), chunks, workers=workers, name=name):
            rows[chunk] = seen.rows
            broken |= seen.broken
            for channels, sum in seen.sums.items():
                sums[channels] = sums.get(channels, 0) + sum
            advance(len(chunk))
    some = rows["channels"][sample(source)]  # training looks at these to choose its model
    wanted = usual(some.tolist() if some.any() else rows["channels"].tolist())
    for item in np.flatnonzero(misfits(rows, wanted)).tolist():
        have = int(rows["channels"][item])
        broken[item] = f"{have} channel{'s' * (have > 1)}; wanted {wanted}"
    mean, std = moments(sums, wanted)
    return Examination(source, rows, dict(sorted(broken.items())), mean, std)


def misfits(rows: Rows, wanted: int) -> NDArray[np.bool_]:
    """Images whose channels cannot be made into the wanted ones."""
    fits = np.isin(rows["channels"], [0, wanted, *([1, 3] if wanted in (1, 3) else [])])
    apart: NDArray[np.bool_] = ~fits
    return apart


def moments(sums: Sums, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel, every image counting the same."""
    total = sums.get(channels, np.zeros((3, channels)))
    if channels == 3 and 1 in sums:
        total = total + sums[1]
    if not total[0, 0]:
        return (), ()
    mean, square = total[1:] / total[0]
    std = np.sqrt(np.maximum(0, square - mean**2))
    return tuple(mean.tolist()), tuple(std.tolist())


@dataclass(frozen=True)
class Seen:
    rows: Rows
    broken: dict[int, str]
    sums: Sums  # of training images


@dataclass(frozen=True)
class Look:
    """The work on one chunk."""

    source: Source

    def __call__(self, chunk: NDArray[np.int64], slot: Slot, note: Note) -> Seen:
        seen = Seen(np.zeros(len(chunk), ROW), {}, {})
        for row, item in enumerate(chunk.tolist()):
            note(item)
            try:
                seen.rows[row], sum = self.look(item)
            except Refused:
                raise
            except UserError as error:
                seen.broken[item] = str(error)
                continue
            if self.source.splits[item] == "train":
                seen.sums[sum.shape[1]] = seen.sums.get(sum.shape[1], 0) + sum
        return seen

    def look(self, item: int) -> tuple[tuple[Any, ...], NDArray[np.float64]]:
        """One row, and what the image adds to the sums."""
        found = self.source[item]
        content = found.content
        pixels = load_image(content, None)
        height, width, channels = pixels.shape
        if isinstance(content, np.ndarray):
            kind, traits = "pixels", {"read"}
        else:
            kind, traits = kind_of(content) or "", {"read", *odd(content)}
            if SUFFIXES.get(found.suffix, kind) != kind:
                traits.add("misnamed")
        own, look = number(digest(content)), 0
        image = viewable(pixels)
        counts = levels(pixels, image)
        if (counts == height * width).any(axis=1).all():
            traits.add("constant")
        elif min(height, width) < PHOTO:
            traits.add("small")
            look = own[0] if kind == "pixels" else number(digest(pixels))[0]
        elif (hashed := similar.look(image)) is not None:
            traits.add("photo")
            look = hashed
        bits = sum(BIT[trait] for trait in traits)
        moments = counts @ MOMENTS / (height * width)
        return (own, look, height, width, channels, KINDS.index(kind), bits), moments.T


def number(sixteen: bytes) -> tuple[int, int]:
    return int.from_bytes(sixteen[:8], "little"), int.from_bytes(sixteen[8:], "little")


def levels(pixels: Pixels, image: Image.Image) -> NDArray[np.int64]:
    """How many pixels of each channel have each of the 256 values; `image` shows the same."""
    channels = pixels.shape[2]
    if pixels.size <= LARGE:
        values = pixels.reshape(-1, channels) + 256 * np.arange(channels)
        return np.bincount(values.reshape(-1), minlength=256 * channels).reshape(channels, 256)
    planes = [image] if channels in (1, 3) else map(viewable, np.split(pixels, channels, axis=2))
    return np.array([plane.histogram() for plane in planes]).reshape(channels, 256)


def odd(content: bytes) -> Iterator[str]:
    """Which of ODD an image file is that `load_image` could read."""
    if kind_of(content) == "NumPy":
        return
    kind, image = open_image(content, MAX_PIXELS)
    if image.mode == "CMYK":
        yield "CMYK"
    if image.mode in ("P", "PA"):
        yield "palette"
    deep = kind == "PNG" and content[24] == 16
    if deep or image.mode in ("I", "F") or image.mode.startswith("I;16"):
        yield "16 bits"
    if image.has_transparency_data:
        yield "transparent"
    with quiet():
        if framed(image):
            yield "frames"
        if orientation(image) != 1:
            yield "turned"


def framed(image: Image.Image) -> bool:
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception:  # a damaged second frame can make Pillow raise anything; the first is fine
        return False
