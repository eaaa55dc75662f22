"""Decodes image files to pixels, safely for hostile files: the only decoder in the package."""

import io
import math
import os
import stat
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from vitrail import files
from vitrail.errors import OutOfResources, UserError

Pixels = NDArray[np.uint8]  # (height, width, channels)

MAX_BYTES = 256 * 2**20  # of a file: larger ones are not photos, and would exhaust memory
MAX_PIXELS = 100_000_000  # width x height; a 17 kB PNG can declare more than this
MAX_ARRAY_CHANNELS = 64  # an array may hold this many values per pixel of MAX_PIXELS

SUFFIXES = {  # expected format of a file name; the content decides which decoder reads it
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".jpe": "JPEG",
    ".jfif": "JPEG",
    ".png": "PNG",
    ".webp": "WebP",
    ".gif": "GIF",
    ".bmp": "BMP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".npy": "NumPy",
}

DECODERS: dict[str, Callable[[io.BytesIO], Image.Image]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WebP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
}

GREY_MODES = ("1", "L", "LA", "La", "I", "F")  # and I;16, I;16B, ...

EXIF_ORIENTATION = 0x0112  # the tag
TIFF_BITS_PER_SAMPLE, TIFF_PHOTOMETRIC = 258, 262  # tags

EXIF_TRANSPOSES = {  # the operation that turns an image of this EXIF orientation upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

OPEN_FLAGS = os.O_RDONLY  # and those that the system has
OPEN_FLAGS |= (
    getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
)

_warnings_lock = threading.Lock()  # warning filters are global, not per thread


def load_image(
    content: bytes | bytearray | memoryview | str | Path | np.ndarray | Image.Image,
    channels: int | None = 3,
    *,
    max_bytes: int = MAX_BYTES,
    max_pixels: int = MAX_PIXELS,
) -> Pixels:
    """Decodes a file, its bytes, an array or a PIL image to uint8 (height, width, channels).

    Reads the first frame of JPEG, PNG, WebP, GIF, BMP and TIFF, detected by content, applies the
    EXIF orientation and composites transparency on white. `channels` 1 converts to greyscale
    (ITU-R 601), 3 repeats a grey channel, None keeps 1 or 3 as they are. Other numbers of channels
    come from `.npy` files and arrays (height, width, channels) of uint8, bool, uint16 (65535 is
    white) or floats in [0, 1]. If 1 or 3 channels are wanted, the last of 2 or 4 channels of an
    array is alpha, as in a file. A `UserError` gives the reason without the name of the file.
    """
    if isinstance(content, np.ndarray):
        pixels = pixels_from_array(content, max_pixels)
        if pixels.shape[2] in (2, 4) and channels in (1, 3):
            pixels = pixels_from_pil(Image.fromarray(pixels))
        return convert_channels(pixels, channels)
    if isinstance(content, bytearray | memoryview):
        content = bytes(content)
    if not isinstance(content, bytes | str | Path | Image.Image):
        raise UserError(
            f"a {type(content).__name__} is not an image; give a path, bytes, a PIL image, "
            f"or a NumPy array of shape (height, width, channels)"
        )
    try:
        if isinstance(content, Image.Image):
            check_pixel_count(*content.size, max_pixels)
            return convert_channels(pixels_from_pil(content), channels)
        if isinstance(content, str | Path):
            content = read_file(content, max_bytes)
        return convert_channels(decode_image(content, max_bytes, max_pixels), channels)
    except UserError:
        raise
    except Exception as error:  # a hostile file can make Pillow raise anything
        raise UserError(describe_decode_error(error)) from error


@dataclass(frozen=True)
class ImageInfo:
    """The header of an image file, read without decoding the pixels."""

    format: str  # JPEG, PNG, WebP, GIF, BMP, TIFF
    mode: str  # Pillow's: RGB, L, P, CMYK, I;16, ...
    width: int  # as stored, before the EXIF orientation is applied
    height: int
    orientation: int  # EXIF orientation from 1 to 8; 1 is upright


def image_info(content: bytes, *, max_pixels: int = MAX_PIXELS) -> ImageInfo | None:
    """Reads the header of an encoded image; None for a `.npy` array."""
    if detect_format(content) == "NumPy":
        return None
    try:
        format, image = open_header(content, max_pixels)
        with ignore_pillow_warnings():
            orientation = exif_orientation(image)
        return ImageInfo(format, image.mode, image.width, image.height, orientation)
    except UserError:
        raise
    except Exception as error:  # a hostile file can make Pillow raise anything
        raise UserError(describe_decode_error(error)) from error


def read_file(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Reads a regular file of limited size; never blocks on a pipe or a device."""
    try:
        handle = os.open(path, OPEN_FLAGS)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise UserError("not a regular file")
            check_file_size(status.st_size, max_bytes)
            with open(handle, "rb", closefd=False) as file:
                return file.read(status.st_size)  # not max_bytes: Python would allocate that much
        finally:
            os.close(handle)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise read_error(error) from error


def detect_format(content: bytes) -> str | None:
    """Detects the format by the first bytes; None if `load_image` does not read it."""
    if content.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return "WebP"
    if content.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if content.startswith(b"BM"):
        return "BMP"
    if content.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
        return "TIFF"
    if content.startswith(b"\x93NUMPY"):
        return "NumPy"
    return None


def decode_image(content: bytes, max_bytes: int, max_pixels: int) -> Pixels:
    """Decodes an encoded image, with 1 or 3 channels; a `.npy` array keeps its channels."""
    check_file_size(len(content), max_bytes)
    format = detect_format(content)
    if format == "NumPy":
        return decode_npy(content, max_pixels)
    if format == "JPEG" and (pixels := decode_jpeg(content, max_pixels)) is not None:
        return pixels
    format, image = open_header(content, max_pixels)
    bits_per_channel = content[24] if format == "PNG" else 8
    return pixels_from_pil(image, deep=bits_per_channel == 16)


def open_header(content: bytes, max_pixels: int) -> tuple[str, Image.Image]:
    """Returns the format, and the Pillow image before its pixels are decoded."""
    format = detect_format(content)
    if format not in DECODERS:
        raise UserError(describe_non_image(content))
    for width, height in declared_sizes(format, content):
        check_pixel_count(width, height, max_pixels)
    with ignore_pillow_warnings():
        image = DECODERS[format](io.BytesIO(content))
    check_pixel_count(*image.size, max_pixels)
    return format, image


def declared_sizes(format: str, content: bytes) -> Iterator[tuple[int, int]]:
    """Yields (width, height) if Pillow allocates the canvas of this format when it opens it."""
    if format == "GIF" and len(content) >= 10:
        yield little_endian(content[6:8]), little_endian(content[8:10])
    if format == "WebP" and len(content) >= 30:
        if content[12:16] == b"VP8X":
            yield little_endian(content[24:27]) + 1, little_endian(content[27:30]) + 1
        elif content[12:16] == b"VP8L":
            bits = little_endian(content[21:25])
            yield (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        else:
            yield little_endian(content[26:28]) & 0x3FFF, little_endian(content[28:30]) & 0x3FFF


def little_endian(content: bytes) -> int:
    return int.from_bytes(content, "little")


def decode_jpeg(content: bytes, max_pixels: int) -> Pixels | None:
    """Decodes as Pillow does, but faster; None if simplejpeg is absent or would differ."""
    decoder, transpose = load_simplejpeg(), None
    if decoder is None:
        return None
    if (header := parse_plain_jpeg(content)) is not None:
        width, height, mode = header
        check_pixel_count(width, height, max_pixels)
    else:
        _, image = open_header(content, max_pixels)
        mode = image.mode
        with ignore_pillow_warnings():
            transpose = EXIF_TRANSPOSES.get(exif_orientation(image))
    if mode not in ("RGB", "L"):
        return None
    try:
        pixels = decoder(content, "RGB" if mode == "RGB" else "GRAY", strict=True)
    except ValueError:  # Pillow decides whether a damaged file is readable
        return None
    if transpose is None:
        return pixels
    upright = Image.fromarray(pixels if mode == "RGB" else pixels[:, :, 0]).transpose(transpose)
    return np.array(upright).reshape(upright.height, upright.width, -1)


def parse_plain_jpeg(content: bytes) -> tuple[int, int, str] | None:
    """Returns width, height and mode of a JPEG that has no EXIF block; None for any other file.

    Pillow needs a twentieth of the decoding time for the same.
    """
    position, header = 2, None
    while content[position : position + 1] == b"\xff":
        marker, size = content[position + 1 : position + 2], content[position + 2 : position + 4]
        if marker == b"\xda":  # start of scan: the header ends here
            return header
        if marker in (b"\xc0", b"\xc2"):  # start of a frame, baseline or progressive
            height, width = (
                big_endian(content[position + at : position + at + 2]) for at in (5, 7)
            )
            mode = {1: "L", 3: "RGB"}.get(big_endian(content[position + 9 : position + 10]))
            header = (width, height, mode) if mode else None
        elif marker not in (b"\xe0", b"\xdb", b"\xc4", b"\xdd", b"\xfe"):  # JFIF, tables, comment
            return None
        position += 2 + big_endian(size)
    return None


def big_endian(content: bytes) -> int:
    return int.from_bytes(content, "big")


@cache
def load_simplejpeg() -> Callable[..., Pixels] | None:
    try:
        decoder: Callable[..., Pixels] = import_module("simplejpeg").decode_jpeg
    except ImportError:
        return None
    return decoder


def pixels_from_pil(image: Image.Image, deep: bool = False) -> Pixels:
    """Decodes an opened image: upright, composited on white, with 1 or 3 channels.

    `deep` marks a PNG of 16 bits per channel, whose transparent colour is given in 16 bits.
    """
    if image.format == "TIFF":
        with ignore_pillow_warnings():  # Pillow reads the metadata again after the pixels
            image.load()
    else:
        image.load()
    with ignore_pillow_warnings():
        transpose = EXIF_TRANSPOSES.get(exif_orientation(image))
    if transpose is not None:
        image = image.transpose(transpose)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return scale_to_8_bits(image)[:, :, None]
    if image.mode == "LAB":
        raise UserError("Lab colours are not supported; save it as RGB")
    grey = image.mode in GREY_MODES
    if image.has_transparency_data:
        return composite_on_white(image, deep)[:, :, : 1 if grey else 3].copy()
    wanted = "L" if grey else "RGB"
    pixels: Pixels = np.array(image if image.mode == wanted else image.convert(wanted))
    return pixels[:, :, None] if grey else pixels


def exif_orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation from 1 to 8; 1, upright, if it is missing or damaged."""
    try:
        return int(image.getexif().get(EXIF_ORIENTATION, 1))
    except Exception:  # a damaged EXIF block can make Pillow raise anything; the pixels are fine
        return 1


def composite_on_white(image: Image.Image, deep: bool) -> Pixels:
    """Returns RGBA pixels on a white background."""
    if deep and image.mode == "RGB":  # Pillow reduced the pixels to 8 bits, but not this colour
        colour = image.info["transparency"]
        image.info["transparency"] = tuple(value >> 8 for value in colour)
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return np.asarray(white)


def scale_to_8_bits(image: Image.Image) -> Pixels:
    """Scales greyscale of more than 8 bits to 8; Pillow's own conversion clips it at 255."""
    values = np.asarray(image)
    if image.mode == "F":
        return to_uint8(values)
    if values.min() < 0 or values.max() > 65535:
        raise UserError("32-bit integers outside 0 to 65535; save it with 8 or 16 bits")
    values = values.astype(np.uint16)
    tags = getattr(image, "tag_v2", {})
    if tags.get(TIFF_BITS_PER_SAMPLE) == (12,):
        values = (values.astype(np.uint32) * 65535 // 4095).astype(np.uint16)
    if tags.get(TIFF_PHOTOMETRIC) == 0:  # "white is zero": Pillow inverts it for 8 bits only
        values = 65535 - values
    if isinstance(transparent := image.info.get("transparency"), int):
        values = np.where(values == transparent, np.uint16(65535), values)
    return to_uint8(values)


def decode_npy(content: bytes, max_pixels: int) -> Pixels:
    """Decodes a `.npy` file without pickles, after checking its declared size."""
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    headers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in headers:
        raise UserError(f"NumPy format {version[0]}.{version[1]} is not supported; save it as 1.0")
    shape, fortran, dtype = headers[version](stream)
    check_array_shape(shape, dtype, max_pixels)
    count = math.prod(shape)
    if count * dtype.itemsize > len(content) - stream.tell():
        raise UserError("truncated")
    values = np.frombuffer(content, dtype, count, stream.tell())
    return pixels_from_array(values.reshape(shape, order="F" if fortran else "C"), max_pixels)


def pixels_from_array(values: np.ndarray, max_pixels: int) -> Pixels:
    """Converts an array (height, width) or (height, width, channels) to uint8 pixels."""
    check_array_shape(values.shape, values.dtype, max_pixels)
    pixels = to_uint8(values)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def check_array_shape(shape: tuple[int, ...], dtype: np.dtype[Any], max_pixels: int) -> None:
    if len(shape) not in (2, 3) or 0 in shape:
        raise UserError(f"an array of shape {shape}; wanted (height, width, channels)")
    check_pixel_count(shape[1], shape[0], max_pixels)
    if math.prod(shape) > (limit := MAX_ARRAY_CHANNELS * max_pixels):
        raise UserError(f"an array of shape {shape} exceeds the limit of {limit} values")
    if dtype.kind not in "buf" or (dtype.kind == "u" and dtype.itemsize > 2):
        raise UserError(f"an array of {dtype}; wanted uint8, uint16, bool or floats in [0, 1]")


def to_uint8(values: np.ndarray) -> Pixels:
    """Copies to uint8, scaled so that the white of the type becomes 255."""
    if values.dtype == np.uint8:
        return np.array(values, order="C")
    values = np.ascontiguousarray(values)
    if values.dtype == bool:
        return np.where(values, np.uint8(255), np.uint8(0))
    if values.dtype.kind == "u":
        return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
    if not (values.min() >= 0 and values.max() <= 1):  # also true for NaN
        raise UserError("floats outside [0, 1]; scale them")
    return np.rint(values.astype(np.float32) * 255).astype(np.uint8)


def convert_channels(pixels: Pixels, channels: int | None) -> Pixels:
    """Converts between greyscale and RGB; any other number of channels must match."""
    actual = pixels.shape[2]
    if channels in (None, actual):
        return pixels
    if actual == 1 and channels == 3:
        return np.repeat(pixels, 3, axis=2)
    if actual == 3 and channels == 1:
        return np.array(Image.fromarray(pixels).convert("L"))[:, :, None]
    raise UserError(f"{actual} channel{'s' * (actual > 1)}; expected {channels}")


def majority_channels(channels: Iterable[int]) -> int:
    """Returns the most common number of channels; grey images count as RGB if any image is RGB.

    Unreadable images have 0 channels and are ignored.
    """
    counts = Counter(number for number in channels if number)
    if counts[3]:
        counts[3] += counts.pop(1, 0)
    return max(counts, key=lambda number: counts[number], default=3)


def check_file_size(size: int, limit: int) -> None:
    if size == 0:
        raise UserError("empty file")
    if size > limit:
        raise UserError(f"{size / 2**20:.0f} MB, over the limit of {limit / 2**20:.0f} MB")


def check_pixel_count(width: int, height: int, limit: int) -> None:
    if width * height > limit:
        raise UserError(
            f"{width} x {height} is {width * height / 1e6:.0f} megapixels, "
            f"over the limit of {limit / 1e6:g}"
        )


def describe_non_image(content: bytes) -> str:
    if content[4:8] == b"ftyp":
        return "HEIC, AVIF or video is not supported; save it as JPEG or PNG"
    return "not an image; wanted JPEG, PNG, WebP, GIF, BMP, TIFF or .npy"


def read_error(error: OSError | ValueError) -> UserError:
    """Converts a failed read to a `UserError`; `OutOfResources` if the file is not to blame."""
    if isinstance(error, FileNotFoundError):
        return UserError("no such file")
    if isinstance(error, OSError) and error.errno in files.RESOURCE_ERRORS:
        return OutOfResources(f"cannot be read: {files.describe_os_error(error).lower()}")
    reason = error.strerror if isinstance(error, OSError) else None
    return UserError(f"cannot be read: {(reason or str(error)).lower()}")


def describe_decode_error(error: Exception) -> str:
    """Summarises what Pillow raises for a damaged file."""
    message = str(error).strip().lower()
    if "truncated" in message or "unexpected end" in message or isinstance(error, EOFError):
        return "truncated"
    if isinstance(error, MemoryError):
        return "too large for the available memory"
    return f"damaged: {message or type(error).__name__}"


@contextmanager
def ignore_pillow_warnings() -> Iterator[None]:
    """Ignores Pillow's warnings about invalid metadata, which the user cannot act on."""
    with _warnings_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
