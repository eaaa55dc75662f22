"""Decodes image files to pixels, safely for hostile files: the only decoder in the package."""

import io
import math
import os
import stat
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from vitrail import files
from vitrail.data import jpeg_xl, tiff
from vitrail.data.config import PixelType
from vitrail.data.pixels import (
    Pixels,
    as_pixels,
    composite_on_white,
    convert_channels,
    convert_pixels,
)
from vitrail.errors import OutOfResources, TooLarge, UserError

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
    ".avif": "AVIF",
    ".heic": "HEIC",
    ".heif": "HEIC",
    ".jxl": "JPEG XL",
}
READABLE = "JPEG, PNG, WebP, AVIF, GIF, BMP, TIFF or .npy"  # for messages
AVIF_BRANDS = {b"avif", b"avis"}
HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}


def open_avif(stream: io.BytesIO) -> Image.Image:
    if not AvifImagePlugin.SUPPORTED:
        raise UserError("AVIF, which this build of Pillow does not read; pip install -U pillow")
    return AvifImagePlugin.AvifImageFile(stream)


def open_heic(stream: io.BytesIO) -> Image.Image:
    try:
        from pillow_heif import HeifImageFile
    except ImportError as error:
        raise UserError(
            "HEIC needs the package pillow-heif; pip install 'vitrail[heic]'"
        ) from error
    image: Image.Image = HeifImageFile(stream)  # type: ignore[no-untyped-call]
    return image


DECODERS: dict[str, Callable[[io.BytesIO], Image.Image]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WebP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
    "AVIF": open_avif,
    "HEIC": open_heic,
    "JPEG XL": jpeg_xl.open_jpeg_xl,
}

GREY_MODES = ("1", "L", "LA", "La", "I", "F")  # and I;16, I;16B, ...

EXIF_ORIENTATION = 0x0112  # the tag
TIFF_BITS_PER_SAMPLE, TIFF_PHOTOMETRIC = 258, 262  # tags
DEEP_MODES = ("RGB", "RGBA", "RGBX")  # which Pillow decodes from 16 bits to 8

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
    pixels: PixelType | None = "uint8",
    *,
    max_bytes: int = MAX_BYTES,
    max_pixels: int = MAX_PIXELS,
) -> Pixels:
    """Decodes a file, its bytes, an array or a PIL image to (height, width, channels).

    Reads the first frame of JPEG, PNG, WebP, AVIF, GIF and BMP, of HEIC and JPEG XL if
    pillow-heif and pillow-jxl-plugin are installed, and all pages of a TIFF, which become channels,
    detected by content; applies the EXIF orientation and composites transparency on white.
    `channels` 1 converts to greyscale (ITU-R 601), 3 repeats a grey channel, None keeps what there
    is. Other numbers of channels come from TIFF and `.npy` files and arrays (height, width,
    channels) of uint8, bool, uint16 or floats. If 1 or 3 channels are wanted, the last of 2 or 4
    channels of an array is alpha, as in a file. `pixels` is the type that a model expects (see
    `convert_pixels`); None keeps uint8, uint16 or float32 as they are. A `UserError` gives the
    reason without the name of the file.
    """
    if isinstance(content, np.ndarray):
        values = pixels_from_array(content, max_pixels)
        if values.shape[2] in (2, 4) and channels in (1, 3):
            deep = values.dtype != np.uint8
            values = (
                composite_on_white(values) if deep else pixels_from_pil(Image.fromarray(values))
            )
        return convert_pixels(convert_channels(values, channels), pixels)
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
            values = pixels_from_pil(content)
        else:
            encoded = content if isinstance(content, bytes) else read_file(content, max_bytes)
            values = decode_image(encoded, max_bytes, max_pixels)
        return convert_pixels(convert_channels(values, channels), pixels)
    except UserError:
        raise
    except Exception as error:  # a hostile file can make Pillow raise anything
        raise UserError(describe_decode_error(error)) from error


@dataclass(frozen=True)
class ImageInfo:
    """The header of an image file, read without decoding the pixels."""

    format: str  # JPEG, PNG, WebP, AVIF, HEIC, JPEG XL, GIF, BMP, TIFF
    mode: str  # Pillow's: RGB, L, P, CMYK, I;16, ...
    width: int  # as stored, before the EXIF orientation is applied
    height: int
    orientation: int  # EXIF orientation from 1 to 8; 1 is upright


def image_info(content: bytes, *, max_pixels: int = MAX_PIXELS) -> ImageInfo | None:
    """Reads the header of an encoded image; None for a `.npy` array."""
    if detect_format(content) == "NumPy":
        return None
    try:
        if detect_format(content) == "TIFF" and tiff.needs_tifffile(content):
            return ImageInfo("TIFF", "", *tiff.tifffile_size(content), 1)
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
    if content.startswith((jpeg_xl.CODESTREAM, jpeg_xl.CONTAINER)):
        return "JPEG XL"
    return detect_heif(content)


def can_decode(format: str | None) -> bool:
    """Whether images of this format can be decoded here."""
    if format == "HEIC":
        return find_spec("pillow_heif") is not None
    if format == "JPEG XL":
        return jpeg_xl.find_plugin() is not None
    return format in (*DECODERS, "NumPy")


def detect_heif(content: bytes) -> str | None:
    """AVIF or HEIC, by the brands in the first box of the file; None for a video."""
    if content[4:8] != b"ftyp":
        return None
    end = min(big_endian(content[:4]), 256)
    brands = {content[8:12], *(content[at : at + 4] for at in range(16, end, 4))}
    if brands & AVIF_BRANDS:
        return "AVIF"
    return "HEIC" if brands & HEIC_BRANDS else None


def decode_image(content: bytes, max_bytes: int, max_pixels: int) -> Pixels:
    """Decodes an encoded image: 1 or 3 channels, or as many as a TIFF or a `.npy` array has."""
    check_file_size(len(content), max_bytes)
    format = detect_format(content)
    if format == "NumPy":
        return decode_npy(content, max_pixels)
    if format == "JPEG" and (pixels := decode_jpeg(content, max_pixels)) is not None:
        return pixels
    if format == "TIFF":
        return decode_tiff(content, max_pixels)
    format, image = open_header(content, max_pixels)
    if format == "PNG" and content[24] == 16:  # byte 24 of a PNG is its bit depth
        return decode_deep_png(content, image)
    return pixels_from_pil(image)


def decode_tiff(content: bytes, max_pixels: int) -> Pixels:
    """Decodes all pages of a TIFF; their channels follow each other."""
    with ignore_pillow_warnings():
        if tiff.needs_tifffile(content):
            return tiff.read_with_tifffile(
                content, lambda shape, dtype: check_array_shape(shape, dtype, max_pixels)
            )
    _, image = open_header(content, max_pixels)
    pages = []
    for page in tiff.iterate_pages(
        image, lambda width, height: check_pixel_count(width, height, max_pixels)
    ):
        if is_deep_colour(page):
            _, second = open_header(content, max_pixels)
            second.seek(page.tell())
            pages.append(decode_deep_colour(page, second))
        else:
            pages.append(pixels_from_pil(page))
    return tiff.stack_pages(pages)


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
    if format == "JPEG XL":
        yield jpeg_xl.read_size(content)
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


def pixels_from_pil(image: Image.Image) -> Pixels:
    """Decodes an opened image: upright, composited on white, with 1 or 3 channels."""
    image = decode_upright(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return deep_grey(image)[:, :, None]
    if image.mode == "LAB":
        raise UserError("Lab colours are not supported; save it as RGB")
    if image.mode == "RGBX":  # a TIFF whose fourth channel is not alpha, such as infrared
        return np.array(image)
    grey = image.mode in GREY_MODES
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        return np.asarray(white)[:, :, : 1 if grey else 3].copy()
    wanted = "L" if grey else "RGB"
    pixels: Pixels = np.array(image if image.mode == wanted else image.convert(wanted))
    return pixels[:, :, None] if grey else pixels


def decode_upright(image: Image.Image) -> Image.Image:
    """Decodes the pixels and applies the EXIF orientation."""
    if image.format == "TIFF":
        with ignore_pillow_warnings():  # Pillow reads the metadata again after the pixels
            image.load()
    else:
        image.load()
    with ignore_pillow_warnings():
        transpose = EXIF_TRANSPOSES.get(exif_orientation(image))
    return image if transpose is None else image.transpose(transpose)


def is_deep_colour(image: Image.Image) -> bool:
    """Whether Pillow would reduce the colours of this undecoded image from 16 to 8 bits."""
    return any(
        ";16" in str(part) and image.mode in DEEP_MODES
        for tile in getattr(image, "tile", [])
        for part in (tile.args if isinstance(tile.args, tuple) else (tile.args,))
    )


def decode_deep_png(content: bytes, image: Image.Image) -> Pixels:
    """Decodes a PNG of 16 bits per channel, which Pillow reduces to 8 if it is not grey."""
    if not is_deep_colour(image):
        return pixels_from_pil(image)
    if content[25] == 4:  # grey and alpha: the bytes of an RGBA image of 8 bits
        header = content[12:24] + b"\x08\x06" + content[26:29]
        disguised = content[:12] + header + zlib.crc32(header).to_bytes(4, "big") + content[33:]
        octets = np.asarray(decode_upright(PngImagePlugin.PngImageFile(io.BytesIO(disguised))))
        return composite_on_white(octets.astype(">u1").view(">u2").astype(np.uint16))
    return decode_deep_colour(image, PngImagePlugin.PngImageFile(io.BytesIO(content)))


def decode_deep_colour(image: Image.Image, second: Image.Image) -> Pixels:
    """Decodes 16-bit colours: `image` gives the high bytes, `second`, the same file, the low ones.

    Pillow takes one byte of each pair, the first or the second as the raw mode says.
    """
    order = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}
    swapped = {
        f"{mode};16{one}": f"{mode};16{two}" for mode in DEEP_MODES for one, two in order.items()
    }
    transparent = image.info.get("transparency")
    tiles = []
    for tile in second.tile:  # type: ignore[attr-defined]
        args = tile.args if isinstance(tile.args, tuple) else (tile.args,)
        args = tuple(swapped.get(part, part) for part in args)
        tiles.append(tile._replace(args=args if isinstance(tile.args, tuple) else args[0]))
    second.tile = tiles  # type: ignore[attr-defined]
    high, low = (np.asarray(decode_upright(part)).astype(np.uint16) for part in (image, second))
    pixels = (high << 8) | low
    if image.mode == "RGBA":
        return composite_on_white(pixels)
    if isinstance(transparent, tuple):
        pixels[(pixels == np.array(transparent)).all(axis=2)] = 65535
    return pixels


def exif_orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation from 1 to 8; 1, upright, if it is missing or damaged."""
    try:
        return int(image.getexif().get(EXIF_ORIENTATION, 1))
    except Exception:  # a damaged EXIF block can make Pillow raise anything; the pixels are fine
        return 1


def deep_grey(image: Image.Image) -> Pixels:
    """Greyscale of more than 8 bits, as uint16 or float32; Pillow's own conversion clips it."""
    values = np.asarray(image)
    if image.mode == "F":
        return as_pixels(values)
    if values.min() < 0 or values.max() > 65535:
        raise UserError("32-bit integers outside 0 to 65535; save it with 16 bits or as floats")
    values = values.astype(np.uint16)
    tags = getattr(image, "tag_v2", {})
    if tags.get(TIFF_BITS_PER_SAMPLE) == (12,):
        values = (values.astype(np.uint32) * 65535 // 4095).astype(np.uint16)
    if tags.get(TIFF_PHOTOMETRIC) == 0:  # "white is zero": Pillow inverts it for 8 bits only
        values = 65535 - values
    if isinstance(transparent := image.info.get("transparency"), int):
        values = np.where(values == transparent, np.uint16(65535), values)
    return values


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
    """Copies an array (height, width) or (height, width, channels) as pixels."""
    check_array_shape(values.shape, values.dtype, max_pixels)
    pixels = as_pixels(values)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def check_array_shape(shape: tuple[int, ...], dtype: np.dtype[Any], max_pixels: int) -> None:
    if len(shape) not in (2, 3) or 0 in shape:
        raise UserError(f"an array of shape {shape}; wanted (height, width, channels)")
    check_pixel_count(shape[1], shape[0], max_pixels)
    if math.prod(shape) > (limit := MAX_ARRAY_CHANNELS * max_pixels):
        raise TooLarge(f"an array of shape {shape} exceeds the limit of {limit} values")
    if dtype.kind not in "buf" or (dtype.kind == "u" and dtype.itemsize > 2):
        raise UserError(f"an array of {dtype}; wanted uint8, uint16, bool or floats")


def check_file_size(size: int, limit: int) -> None:
    if size == 0:
        raise UserError("empty file")
    if size > limit:
        raise TooLarge(f"{size / 2**20:.0f} MB, over the limit of {limit / 2**20:.0f} MB")


def check_pixel_count(width: int, height: int, limit: int) -> None:
    if not width * height:
        raise UserError(f"{width} x {height} has no pixels; give an image that has some")
    if width * height > limit:
        raise TooLarge(
            f"{width} x {height} is {width * height / 1e6:.0f} megapixels, "
            f"over the limit of {limit / 1e6:g}"
        )


def describe_non_image(content: bytes) -> str:
    if content[4:8] == b"ftyp":
        return "a video; save a frame of it as JPEG or PNG"
    return f"not an image; wanted {READABLE}"


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
