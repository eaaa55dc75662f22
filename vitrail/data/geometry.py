"""Where an image is resized to and cropped, whichever function resizes it. Free of torch."""

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from vitrail.data.config import Interpolation, Preprocess
from vitrail.data.pixels import stored_dtype
from vitrail.errors import UserError

MAX_ASPECT = 8  # a longer side is cropped before resizing, or it would exhaust memory

# an image (H, W, C), the size wanted and the interpolation, to the resized image
Resize: TypeAlias = Callable[[np.ndarray, tuple[int, int], Interpolation], np.ndarray]


def fit_image(settings: Preprocess, pixels: np.ndarray, resize: Resize) -> np.ndarray:
    """Resizes an image and crops its centre: (height, width, C), of the same type."""
    dtype = stored_dtype(settings.pixels)
    if pixels.ndim != 3 or pixels.dtype != dtype or pixels.shape[2] != settings.channels:
        raise UserError(
            f"pixels are {pixels.dtype} of shape {pixels.shape}; give {dtype} of shape "
            f"(height, width, {settings.channels})"
        )
    height, width = settings.height, settings.width
    # rounded down, as in timm: 224 / 0.9 is 248
    target = math.floor(height / settings.crop), math.floor(width / settings.crop)
    pixels = resize_to_cover(pixels, target, settings.interpolation, resize)
    return center_crop(pixels, height, width)


def resize_to_cover(
    pixels: np.ndarray, target: tuple[int, int], interpolation: Interpolation, resize: Resize
) -> np.ndarray:
    """Resizes to just cover `target`, keeping the aspect ratio."""
    height, width = pixels.shape[:2]
    if max(height, width) > MAX_ASPECT * min(height, width) * max(target) / min(target):
        longest = MAX_ASPECT * min(height, width) * max(target) // min(target)
        pixels = center_crop(pixels, min(height, longest), min(width, longest))
        height, width = pixels.shape[:2]
    if target[0] * width >= target[1] * height:  # the height is the limiting side
        return resize(pixels, (target[0], target[0] * width // height), interpolation)
    return resize(pixels, (target[1] * height // width, target[1]), interpolation)


def center_crop(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Crops the centre of an image."""
    top = round((pixels.shape[0] - height) / 2)
    left = round((pixels.shape[1] - width) / 2)
    return np.ascontiguousarray(pixels[top : top + height, left : left + width])
