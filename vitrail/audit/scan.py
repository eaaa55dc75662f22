"""Decodes every image of a data set once and records its format, size and hashes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.audit.perceptual_hash import hash_image
from vitrail.data.image import (
    DECODERS,
    MAX_PIXELS,
    SUFFIXES,
    detect_format,
    exif_orientation,
    ignore_pillow_warnings,
    load_image,
    open_header,
)
from vitrail.data.pixels import WHITE, Pixels, majority_channels
from vitrail.data.reading.workers import ReportItem, Slot, default_workers, prefetch
from vitrail.data.source import Source, sample_indices
from vitrail.data.split import hash_content
from vitrail.data.tiff import needs_tifffile
from vitrail.display.page import to_pil
from vitrail.display.progress import progress_bar
from vitrail.display.text import format_count
from vitrail.errors import OutOfResources, UserError

CHUNK = 16  # images that a worker scans before it replies
MIN_HASHED_SIDE = 32  # pixels: images with a shorter side are compared pixel by pixel
MAX_NUMPY_VALUES = 30_000  # for larger images, Pillow's histogram is faster than NumPy's
POWERS = (np.arange(256)[:, None] / 255) ** np.arange(3)  # 1, x and x² of each of the 256 levels

FORMATS = (*DECODERS, "NumPy", "pixels")  # "pixels": an array in memory, not a file
UNUSUAL = {  # properties of files that are not plain grey or RGB: title, and conversion
    "CMYK": ("CMYK", "converted to RGB"),
    "palette": ("Palette", "converted to RGB"),
    "16 bits": ("More than 8 bits", "kept as they are"),
    "transparent": ("Transparency", "composited on white"),
    "frames": ("Animation", "of which only the first frame is used"),
    "turned": ("EXIF orientation", "rotated as the EXIF orientation says"),
}
FLAGS = ("readable", "constant", "hashed", "small", "misnamed", *UNUSUAL)  # bits, from the lowest
BIT = {name: 1 << number for number, name in enumerate(FLAGS)}

ROW = np.dtype(  # the record of an image
    [
        ("content_hash", "<u8", 2),  # of the file, or of pixels in memory
        ("image_hash", "<u8"),  # perceptual hash of an image, content hash of a small one
        ("height", "<i4"),
        ("width", "<i4"),
        ("channels", "<i4"),
        ("format", "u1"),  # index into FORMATS
        ("flags", "<u2"),  # bits of FLAGS
    ]
)
Rows = NDArray[Any]  # of ROW
# For each number of channels: sums over images of 1, the mean and the mean square; (3, channels).
MomentSums = dict[int, NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class Scan:
    """The records of all images of a data set, in which `find_issues` looks for problems."""

    source: Source
    rows: Rows  # one for each item
    broken: dict[int, str]  # items that training cannot use, and why
    mean: tuple[float, ...]  # per channel, over the training images; 1 is white
    std: tuple[float, ...]

    def items(self, flag: str) -> NDArray[np.int64]:
        """The items that have one of FLAGS."""
        return np.flatnonzero(self.rows["flags"] & BIT[flag])

    @property
    def sides(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Height and width of every readable image."""
        rows = self.rows[self.items("readable")]
        return rows["height"], rows["width"]


def scan_images(source: Source, *, workers: int | None = None, progress: bool = True) -> Scan:
    """Decodes every image once; records one ROW for each."""
    rows = np.zeros(len(source), ROW)
    broken: dict[int, str] = {}
    sums: MomentSums = {}
    items = np.arange(len(source))
    chunks = (items[start : start + CHUNK] for start in range(0, len(items), CHUNK))
    workers = default_workers() if workers is None else workers
    name = source.ids.__getitem__
    with progress_bar("scanning images", len(source), show=progress) as advance:
        for chunk, result, _ in prefetch(ScanChunk(source), chunks, workers=workers, name=name):
            rows[chunk] = result.rows
            broken |= result.broken
            for channels, moments in result.sums.items():
                sums[channels] = sums.get(channels, 0) + moments
            advance(len(chunk))
    # training chooses its number of channels from the same sample
    sample = rows["channels"][sample_indices(source)]
    expected = majority_channels(sample.tolist() if sample.any() else rows["channels"].tolist())
    for item in np.flatnonzero(find_wrong_channels(rows, expected)).tolist():
        found = format_count(int(rows["channels"][item]), "channel")
        broken[item] = f"{found}; expected {expected}"
    mean, std = mean_and_std(sums, expected)
    return Scan(source, rows, dict(sorted(broken.items())), mean, std)


def find_wrong_channels(rows: Rows, expected: int) -> NDArray[np.bool_]:
    """Images whose channels cannot be converted to the expected number."""
    convertible = [0, expected, *([1, 3] if expected in (1, 3) else [])]  # 0: already broken
    wrong: NDArray[np.bool_] = ~np.isin(rows["channels"], convertible)
    return wrong


def mean_and_std(sums: MomentSums, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel; every image has the same weight."""
    total = sums.get(channels, np.zeros((3, channels)))
    if channels == 3 and 1 in sums:
        total = total + sums[1]
    if not total[0, 0]:
        return (), ()
    mean, square = total[1:] / total[0]
    std = np.sqrt(np.maximum(0, square - mean**2))
    return tuple(mean.tolist()), tuple(std.tolist())


@dataclass(frozen=True)
class ChunkResult:
    rows: Rows
    broken: dict[int, str]
    sums: MomentSums  # of training images


@dataclass(frozen=True)
class ScanChunk:
    """The task of a worker: scans the images of one chunk."""

    source: Source

    def __call__(self, chunk: NDArray[np.int64], slot: Slot, report: ReportItem) -> ChunkResult:
        result = ChunkResult(np.zeros(len(chunk), ROW), {}, {})
        for row, item in enumerate(chunk.tolist()):
            report(item)
            try:
                result.rows[row], moments = self.scan_image(item)
            except OutOfResources:
                raise
            except UserError as error:
                result.broken[item] = str(error)
                continue
            if self.source.splits[item] == "train":
                channels = moments.shape[1]
                result.sums[channels] = result.sums.get(channels, 0) + moments
        return result

    def scan_image(self, index: int) -> tuple[tuple[Any, ...], NDArray[np.float64]]:
        """The record of an image, and its term in the sums of moments."""
        item = self.source[index]
        content = item.content
        pixels = load_image(content, None, None)
        height, width, channels = pixels.shape
        if isinstance(content, np.ndarray):
            format, flags = "pixels", {"readable"}
        else:
            format, flags = detect_format(content) or "", {"readable", *find_unusual(content)}
            if SUFFIXES.get(item.suffix, format) != format:
                flags.add("misnamed")
        content_hash, image_hash = split_hash(hash_content(content)), 0
        image = to_pil(pixels)
        flat, moments = measure_pixels(pixels, image)
        if flat:
            flags.add("constant")
        elif min(height, width) < MIN_HASHED_SIDE:
            flags.add("small")
            is_array = format == "pixels"  # whose content is its pixels
            image_hash = content_hash[0] if is_array else split_hash(hash_content(pixels))[0]
        elif (perceptual := hash_image(image)) is not None:
            flags.add("hashed")
            image_hash = perceptual
        bits = sum(BIT[flag] for flag in flags)
        row = content_hash, image_hash, height, width, channels, FORMATS.index(format), bits
        return row, moments


def split_hash(digest: bytes) -> tuple[int, int]:
    """A hash of 16 bytes as two integers."""
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def measure_pixels(pixels: Pixels, image: Image.Image) -> tuple[bool, NDArray[np.float64]]:
    """Whether every channel has one value only; and 1, mean and mean square of each channel."""
    height, width, channels = pixels.shape
    if pixels.dtype == np.uint8:
        counts = count_levels(pixels, image)
        flat = bool((counts == height * width).any(axis=1).all())
        return flat, (counts @ POWERS / (height * width)).T
    values = pixels.reshape(-1, channels) / WHITE.get(str(pixels.dtype), 1)
    moments = np.stack([np.ones(channels), values.mean(axis=0), (values**2).mean(axis=0)])
    return bool((values == values[0]).all()), moments


def count_levels(pixels: Pixels, image: Image.Image) -> NDArray[np.int64]:
    """A histogram of 256 levels for each channel; `image` is `pixels` as a PIL image."""
    channels = pixels.shape[2]
    if pixels.size <= MAX_NUMPY_VALUES:
        values = pixels.reshape(-1, channels) + 256 * np.arange(channels)
        return np.bincount(values.reshape(-1), minlength=256 * channels).reshape(channels, 256)
    planes = [image] if channels in (1, 3) else map(to_pil, np.split(pixels, channels, axis=2))
    return np.array([plane.histogram() for plane in planes]).reshape(channels, 256)


def find_unusual(content: bytes) -> Iterator[str]:
    """The keys of UNUSUAL that apply to a readable image file."""
    if detect_format(content) == "NumPy":
        return
    if detect_format(content) == "TIFF" and needs_tifffile(content):
        return
    format, image = open_header(content, MAX_PIXELS)
    if image.mode == "CMYK":
        yield "CMYK"
    if image.mode in ("P", "PA"):
        yield "palette"
    deep = format == "PNG" and content[24] == 16  # byte 24 of a PNG is its bit depth
    if deep or image.mode in ("I", "F") or image.mode.startswith("I;16"):
        yield "16 bits"
    if image.has_transparency_data:
        yield "transparent"
    with ignore_pillow_warnings():
        if format != "TIFF" and is_animated(image):
            yield "frames"
        if exif_orientation(image) != 1:
            yield "turned"


def is_animated(image: Image.Image) -> bool:
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception:  # a damaged second frame can make Pillow raise anything; the first is fine
        return False
