"""Pixel types: how 8-bit, 16-bit and float images become what a model expects."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.config import PixelType
from vitrail.errors import UserError

Pixels = NDArray[Any]  # (height, width, channels): uint8, uint16 or float32

WHITE: dict[str, int] = {"uint8": 255, "uint16": 65535}  # floats have no white
LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R 601, as Pillow converts RGB to grey


def as_pixels(values: np.ndarray) -> Pixels:
    """Copies an array as uint8, uint16 or finite float32; bool becomes black and white."""
    if values.dtype == bool:
        return np.where(np.ascontiguousarray(values), np.uint8(255), np.uint8(0))
    if values.dtype.kind == "u":
        return np.array(values, f"u{values.dtype.itemsize}", order="C")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinity
        pixels = np.array(values, np.float32, order="C")
    if not np.isfinite(pixels).all():
        raise UserError("NaN or infinity among its pixels; replace them by numbers")
    return pixels


def convert_pixels(pixels: Pixels, wanted: PixelType | None) -> Pixels:
    """Converts to the pixel type of a model; None keeps the type.

    "uint8" gives uint8. "uint16" gives float32 from 0 to 1, white, so that 8 bits fit in too.
    "float32" gives the numbers as they are, and refuses integers, whose unit is another one.
    """
    if wanted is None or (wanted == "uint8" and pixels.dtype == np.uint8):
        return pixels
    found = str(pixels.dtype)
    if wanted == "float32":
        if found != "float32":
            raise UserError(f"{found} pixels; the model expects floats: convert them")
        return pixels
    if found == "float32" and not (pixels.min() >= 0 and pixels.max() <= 1):
        raise UserError("floats outside [0, 1]; scale them")
    if wanted == "uint8":
        return to_uint8(pixels)
    return pixels if found == "float32" else pixels.astype(np.float32) / np.float32(WHITE[found])


def stored_dtype(wanted: PixelType) -> np.dtype[Any]:
    """The type of the arrays that `convert_pixels` returns."""
    return np.dtype(np.uint8 if wanted == "uint8" else np.float32)


def widest_type(types: Iterable[str]) -> PixelType:
    """The pixel type of a data set whose images have these types: the one that loses nothing."""
    found = set(types)
    return "float32" if "float32" in found else "uint16" if "uint16" in found else "uint8"


def to_uint8(pixels: Pixels) -> NDArray[np.uint8]:
    """Scales 16 bits, or floats from 0 to 1, to 8 bits."""
    if pixels.dtype == np.uint16:
        return ((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8)
    return np.rint(pixels * np.float32(255)).astype(np.uint8)


def composite_on_white(pixels: Pixels) -> Pixels:
    """Removes the last channel, alpha, of 16-bit or float pixels: white shows through."""
    white = WHITE.get(str(pixels.dtype), 1)
    alpha = pixels[:, :, -1:] / white
    mixed = pixels[:, :, :-1] * alpha + white * (1 - alpha)
    if pixels.dtype == np.uint16:
        mixed = np.rint(mixed)
    return np.ascontiguousarray(mixed.astype(pixels.dtype))


def convert_channels(pixels: Pixels, channels: int | None) -> Pixels:
    """Converts between greyscale and RGB; any other number of channels must match."""
    actual = pixels.shape[2]
    if channels in (None, actual):
        return pixels
    if actual == 1 and channels == 3:
        return np.repeat(pixels, 3, axis=2)
    if actual == 3 and channels == 1:
        if pixels.dtype == np.uint8:
            return np.array(Image.fromarray(pixels).convert("L"))[:, :, None]
        grey: Pixels = pixels @ LUMA
        if pixels.dtype == np.uint16:
            grey = np.rint(grey)
        return grey.astype(pixels.dtype)[:, :, None]
    raise UserError(f"{actual} channel{'s' * (actual > 1)}; expected {channels}")


def majority_channels(channels: Iterable[int]) -> int:
    """Returns the most common number of channels; grey images count as RGB if any image is RGB.

    Unreadable images have 0 channels and are ignored.
    """
    counts = Counter(number for number in channels if number)
    if counts[3]:
        counts[3] += counts.pop(1, 0)
    return max(counts, key=lambda number: counts[number], default=3)
