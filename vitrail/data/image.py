"""The one way an image file becomes pixels, safe against hostile files."""

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
from vitrail.errors import Refused, UserError

Pixels = NDArray[np.uint8]  # (height, width, channels)

MAX_BYTES = 256 * 2**20  # of a file
MAX_PIXELS = 100_000_000  # width x height; a 17 kB PNG can claim more than this

SUFFIXES = {  # what a name promises; only the content decides
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

READERS: dict[str, Callable[[io.BytesIO], Image.Image]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WebP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
}

GREY = ("1", "L", "LA", "La", "I", "F")  # and I;16 with its relatives

UPRIGHT = {  # EXIF orientation: how to turn the picture so that its top is up
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

_warnings = threading.Lock()  # Python's filters belong to the process, not to a thread


def load_image(
    content: bytes | bytearray | memoryview | str | Path | np.ndarray | Image.Image,
    channels: int | None = 3,
    *,
    max_bytes: int = MAX_BYTES,
    max_pixels: int = MAX_PIXELS,
) -> Pixels:
    """Pixels as height x width x channels from a file, its bytes, an array or a PIL image.

    Reads the first frame of JPEG, PNG, WebP, GIF, BMP and TIFF, whatever the name says, upright and
    on white where it is transparent. `channels` 1 makes colour grey (ITU-R 601), 3 repeats grey,
    None keeps 1 or 3 as it is. Any other number of channels comes from `.npy` files and arrays of
    height x width x channels: uint8, bool, uint16 (65535 is white) or floats from 0 to 1. Where
    1 or 3 are wanted, arrays of 2 or 4 are grey or colour with transparency, like such files.
    The error says why in a few words, without the name of the file.
    """
    if isinstance(content, np.ndarray):
        pixels = from_array(content, max_pixels)
        if pixels.shape[2] in (2, 4) and channels in (1, 3):
            pixels = from_pil(Image.fromarray(pixels))
        return fit(pixels, channels)
    if isinstance(content, bytearray | memoryview):
        content = bytes(content)
    if not isinstance(content, bytes | str | Path | Image.Image):
        raise UserError(
            f"a {type(content).__name__} is no image; give a path, bytes, a PIL image, "
            f"or a NumPy array of height x width x channels"
        )
    try:
        if isinstance(content, Image.Image):
            check_pixels(*content.size, max_pixels)
            return fit(from_pil(content), channels)
        if isinstance(content, str | Path):
            content = read_file(content, max_bytes)
        return fit(decode(content, max_bytes, max_pixels), channels)
    except UserError:
        raise
    except Exception as error:  # a hostile file can make Pillow raise anything
        raise UserError(reason(error)) from error


@dataclass(frozen=True)
class Facts:
    """What an image file says about itself, before its pixels are decoded."""

    kind: str  # JPEG, PNG, WebP, GIF, BMP, TIFF
    mode: str  # Pillow's: RGB, L, P, CMYK, I;16, ...
    width: int  # as stored, before it is turned upright
    height: int
    orientation: int  # EXIF's, 1 is upright


def facts(content: bytes, *, max_pixels: int = MAX_PIXELS) -> Facts | None:
    """Reads the header only; None for a `.npy` array."""
    if kind_of(content) == "NumPy":
        return None
    try:
        kind, image = open_image(content, max_pixels)
        with quiet():
            return Facts(kind, image.mode, image.width, image.height, orientation(image))
    except UserError:
        raise
    except Exception as error:  # as above
        raise UserError(reason(error)) from error


def read_file(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file of bearable size; never waits for a pipe or a device."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise UserError("not a regular file")
            check_bytes(status.st_size, max_bytes)
            with open(handle, "rb", closefd=False) as file:
                return file.read(status.st_size)  # not max_bytes: Python would set that much aside
        finally:
            os.close(handle)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise cannot_read(error) from error


def kind_of(content: bytes) -> str | None:
    """The format that the first bytes show, if it is one that `load_image` reads."""
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


def decode(content: bytes, max_bytes: int, max_pixels: int) -> Pixels:
    check_bytes(len(content), max_bytes)
    if kind_of(content) == "NumPy":
        return from_npy(content, max_pixels)
    if kind_of(content) == "JPEG" and (pixels := fast_jpeg(content, max_pixels)) is not None:
        return pixels
    kind, image = open_image(content, max_pixels)
    return from_pil(image, deep=kind == "PNG" and content[24] == 16)


def open_image(content: bytes, max_pixels: int) -> tuple[str, Image.Image]:
    """The format, and the image with its header read and its pixels still packed."""
    kind = kind_of(content)
    if kind not in READERS:
        raise UserError(not_an_image(content))
    for width, height in canvas(kind, content):
        check_pixels(width, height, max_pixels)
    with quiet():
        image = READERS[kind](io.BytesIO(content))
    check_pixels(*image.size, max_pixels)
    return kind, image


def canvas(kind: str, content: bytes) -> Iterator[tuple[int, int]]:
    """Width and height of formats that take memory for them the moment they are opened."""
    if kind == "GIF" and len(content) >= 10:
        yield little(content[6:8]), little(content[8:10])
    if kind == "WebP" and len(content) >= 30:
        if content[12:16] == b"VP8X":
            yield little(content[24:27]) + 1, little(content[27:30]) + 1
        elif content[12:16] == b"VP8L":
            bits = little(content[21:25])
            yield (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        else:
            yield little(content[26:28]) & 0x3FFF, little(content[28:30]) & 0x3FFF


def little(content: bytes) -> int:
    return int.from_bytes(content, "little")


def fast_jpeg(content: bytes, max_pixels: int) -> Pixels | None:
    """The same pixels as Pillow's, sooner; None where simplejpeg is absent or not the same."""
    decoder, turn = simplejpeg(), None
    if decoder is None:
        return None
    if (bare := bare_jpeg(content)) is not None:
        width, height, mode = bare
        check_pixels(width, height, max_pixels)
    else:
        _, image = open_image(content, max_pixels)
        mode = image.mode
        with quiet():
            turn = UPRIGHT.get(orientation(image))
    if mode not in ("RGB", "L"):
        return None
    try:
        pixels = decoder(content, "RGB" if mode == "RGB" else "GRAY", strict=True)
    except ValueError:  # Pillow decides what a damaged file is worth
        return None
    if turn is None:
        return pixels
    turned = Image.fromarray(pixels if mode == "RGB" else pixels[:, :, 0]).transpose(turn)
    return np.array(turned).reshape(turned.height, turned.width, -1)


def bare_jpeg(content: bytes) -> tuple[int, int, str] | None:
    """Width, height and mode of a JPEG without metadata, which could turn it; None for others.

    Pillow reads the same in a twentieth of the time that the pixels take.
    """
    place, found = 2, None
    while content[place : place + 1] == b"\xff":
        marker, size = content[place + 1 : place + 2], content[place + 2 : place + 4]
        if marker == b"\xda":  # here the pixels begin
            return found
        if marker in (b"\xc0", b"\xc2"):  # a frame, baseline or progressive
            height, width = (big(content[place + at : place + at + 2]) for at in (5, 7))
            mode = {1: "L", 3: "RGB"}.get(big(content[place + 9 : place + 10]))
            found = (width, height, mode) if mode else None
        elif marker not in (b"\xe0", b"\xdb", b"\xc4", b"\xdd", b"\xfe"):  # JFIF, tables, words
            return None
        place += 2 + big(size)
    return None


def big(content: bytes) -> int:
    return int.from_bytes(content, "big")


@cache
def simplejpeg() -> Callable[..., Pixels] | None:
    try:
        decoder: Callable[..., Pixels] = import_module("simplejpeg").decode_jpeg
    except ImportError:
        return None
    return decoder


def from_pil(image: Image.Image, deep: bool = False) -> Pixels:
    """Pixels of an opened image, upright, on white, with 1 or 3 channels.

    `deep` marks a PNG of 16 bits a channel, whose transparent colour counts to 65535.
    """
    if image.format == "TIFF":
        with quiet():  # its metadata are read again at the end of the pixels
            image.load()
    else:
        image.load()
    with quiet():
        turn = UPRIGHT.get(orientation(image))
    if turn is not None:
        image = image.transpose(turn)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return scale(image)[:, :, None]
    if image.mode == "LAB":
        raise UserError("Lab colours, which are not read; save it as RGB")
    grey = image.mode in GREY
    if image.has_transparency_data:
        return on_white(image, deep)[:, :, : 1 if grey else 3].copy()
    wanted = "L" if grey else "RGB"
    pixels: Pixels = np.array(image if image.mode == wanted else image.convert(wanted))
    return pixels[:, :, None] if grey else pixels


def orientation(image: Image.Image) -> int:
    """EXIF's number for which side is up; damaged metadata count as none."""
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:  # a damaged EXIF block can make Pillow raise anything; the pixels are fine
        return 1


def on_white(image: Image.Image, deep: bool) -> Pixels:
    if deep and image.mode == "RGB":  # Pillow has cut the pixels to 8 bits, not this colour
        colour = image.info["transparency"]
        image.info["transparency"] = tuple(value >> 8 for value in colour)
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return np.asarray(white)


def scale(image: Image.Image) -> Pixels:
    """Grey of more than 8 bits, brought to 8: Pillow's own conversion would cut it off at 255."""
    values = np.asarray(image)
    if image.mode == "F":
        return to_bytes(values)
    if values.min() < 0 or values.max() > 65535:
        raise UserError("32-bit integers outside 0 to 65535; save it with 8 or 16 bits")
    values = values.astype(np.uint16)
    tags = getattr(image, "tag_v2", {})
    if tags.get(258) == (12,):
        values = (values.astype(np.uint32) * 65535 // 4095).astype(np.uint16)
    if tags.get(262) == 0:  # "white is zero", which Pillow minds for 8 bits only
        values = 65535 - values
    if isinstance(clear := image.info.get("transparency"), int):
        values = np.where(values == clear, np.uint16(65535), values)
    return to_bytes(values)


def from_npy(content: bytes, max_pixels: int) -> Pixels:
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    headers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in headers:
        raise UserError(f"NumPy format {version[0]}.{version[1]}, which is not read")
    shape, fortran, dtype = headers[version](stream)
    check_array(shape, dtype, max_pixels)
    count = math.prod(shape)
    if count * dtype.itemsize > len(content) - stream.tell():
        raise UserError("truncated")
    values = np.frombuffer(content, dtype, count, stream.tell())
    return from_array(values.reshape(shape, order="F" if fortran else "C"), max_pixels)


def from_array(values: np.ndarray, max_pixels: int) -> Pixels:
    check_array(values.shape, values.dtype, max_pixels)
    pixels = to_bytes(values)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def check_array(shape: tuple[int, ...], dtype: np.dtype[Any], max_pixels: int) -> None:
    if len(shape) not in (2, 3) or 0 in shape:
        raise UserError(f"an array of shape {shape}; wanted height x width x channels")
    check_pixels(shape[1], shape[0], max_pixels)
    if math.prod(shape) > 64 * max_pixels:
        raise UserError(f"an array of shape {shape} is over the limit of {64 * max_pixels} numbers")
    if dtype.kind not in "buf" or (dtype.kind == "u" and dtype.itemsize > 2):
        raise UserError(f"an array of {dtype}; wanted uint8, uint16, bool or floats from 0 to 1")


def to_bytes(values: np.ndarray) -> Pixels:
    """A copy as uint8, where the type's white becomes 255."""
    if values.dtype == np.uint8:
        return np.array(values, order="C")
    values = np.ascontiguousarray(values)
    if values.dtype == bool:
        return np.where(values, np.uint8(255), np.uint8(0))
    if values.dtype.kind == "u":
        return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
    if not (values.min() >= 0 and values.max() <= 1):  # also true for NaN
        raise UserError("floats outside 0 to 1")
    return np.rint(values.astype(np.float32) * 255).astype(np.uint8)


def fit(pixels: Pixels, channels: int | None) -> Pixels:
    """Makes grey of colour or colour of grey; other numbers of channels must be right already."""
    have = pixels.shape[2]
    if channels in (None, have):
        return pixels
    if have == 1 and channels == 3:
        return np.repeat(pixels, 3, axis=2)
    if have == 3 and channels == 1:
        return np.array(Image.fromarray(pixels).convert("L"))[:, :, None]
    raise UserError(f"{have} channel{'s' * (have > 1)}; wanted {channels}")


def usual(channels: Iterable[int]) -> int:
    """The number of channels that most images have, grey ones counting as colour beside colour.

    Images that could not be read have 0, and do not count.
    """
    counts = Counter(number for number in channels if number)
    if counts[3]:
        counts[3] += counts.pop(1, 0)
    return max(counts, key=lambda number: counts[number], default=3)


def check_bytes(size: int, limit: int) -> None:
    if size == 0:
        raise UserError("empty file")
    if size > limit:
        raise UserError(f"{size / 2**20:.0f} MB, over the limit of {limit / 2**20:.0f} MB")


def check_pixels(width: int, height: int, limit: int) -> None:
    if width * height > limit:
        raise UserError(
            f"{width} x {height} is {width * height / 1e6:.0f} megapixels, "
            f"over the limit of {limit / 1e6:g}"
        )


def not_an_image(content: bytes) -> str:
    if content[4:8] == b"ftyp":
        return "HEIC, AVIF or a film, which is not read; save it as JPEG or PNG"
    return "not an image: no JPEG, PNG, WebP, GIF, BMP, TIFF or .npy"


def cannot_read(error: OSError | ValueError) -> UserError:
    """Why a file cannot be read, by the file's fault or, `Refused`, by the system's."""
    if isinstance(error, FileNotFoundError):
        return UserError("no such file")
    if isinstance(error, OSError) and error.errno in files.SHORT:
        return Refused(f"cannot be read: {files.refusal(error).lower()}")
    words = error.strerror if isinstance(error, OSError) else None
    return UserError(f"cannot be read: {(words or str(error)).lower()}")


def reason(error: Exception) -> str:
    """Pillow's many words for a damaged file, in few."""
    words = str(error).strip().lower()
    if "truncated" in words or "unexpected end" in words or isinstance(error, EOFError):
        return "truncated"
    if isinstance(error, MemoryError):
        return "larger than the memory"
    return f"damaged: {words or type(error).__name__}"


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps Pillow's warnings about odd metadata from the user, who can do nothing about them."""
    with _warnings, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
