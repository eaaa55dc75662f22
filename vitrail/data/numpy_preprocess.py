"""Preprocessing without PyTorch, to the same bits: for engines that start without torch.

PyTorch resizes uint8 images in integers, as Pillow does: weights are rounded to 16 bits, products
are added in 32. Integers below 2**53 are exact in float64, so matrix products give the same sums.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vitrail.data.config import Interpolation, Preprocess
from vitrail.data.geometry import fit_image

BLOCK = 16  # outputs of one matrix product: their inputs overlap, and few weights are zero
ROWS = 256  # of an image that are resized at once, so that large photos need little memory


def preprocess_with_numpy(settings: Preprocess, pixels: np.ndarray) -> NDArray[np.float32]:
    """Converts an image, uint8 (H, W, C), to the model's input: float32 (C, H, W), normalised.

    Equal to `vitrail.data.preprocess.preprocess` to the last bit.
    """
    cropped = fit_image(settings, pixels, resize_with_numpy).transpose(2, 0, 1)
    mean, std = (
        np.array([255 * n for n in numbers], np.float32)[:, None, None]
        for numbers in (settings.mean, settings.std)
    )
    values = cropped.astype(np.float32, order="C")
    np.subtract(values, mean, out=values)
    return np.divide(values, std, out=values)


def resize_with_numpy(
    pixels: np.ndarray, size: tuple[int, int], interpolation: Interpolation
) -> np.ndarray:
    """Resizes with antialiasing: first every row, then every column, rounded in between."""
    if pixels.shape[1] != size[1]:
        parts = np.array_split(pixels, math.ceil(len(pixels) / ROWS))
        pixels = np.concatenate(
            [
                transpose_image(resize_first_axis(transpose_image(rows), size[1], interpolation))
                for rows in parts
            ]
        )
    if pixels.shape[0] != size[0]:
        pixels = resize_first_axis(pixels, size[0], interpolation)
    return np.ascontiguousarray(pixels)


def transpose_image(pixels: np.ndarray) -> np.ndarray:
    """Copies (H, W, C) to (W, H, C), a whole pixel at a time."""
    height, width, channels = pixels.shape
    whole = np.ascontiguousarray(pixels).view(f"V{channels}").reshape(height, width)
    return np.ascontiguousarray(whole.T).view(np.uint8).reshape(width, height, channels)


def resize_first_axis(pixels: np.ndarray, size: int, interpolation: Interpolation) -> np.ndarray:
    """Resizes (N, ...) to (size, ...)."""
    blocks, bits = resize_weights(len(pixels), size, interpolation)
    values = pixels.reshape(len(pixels), -1)
    resized = np.empty((size, values.shape[1]), np.uint8)
    for first, (start, weights) in zip(range(0, size, BLOCK), blocks, strict=True):
        stop = start + weights.shape[1]
        sums = (weights @ values[start:stop].astype(np.float64)).astype(np.int32)
        sums += 1 << (bits - 1)
        sums >>= bits
        resized[first : first + len(weights)] = np.minimum(np.maximum(sums, 0), 255)
    return resized.reshape(size, *pixels.shape[1:])


@lru_cache(maxsize=64)
def resize_weights(
    length: int, size: int, interpolation: Interpolation
) -> tuple[list[tuple[int, NDArray[np.float64]]], int]:
    """For each block of outputs its first input and its weights; and the bits of the weights.

    The weights are integers: 2**bits stands for 1.
    """
    radius = {"bilinear": 1.0, "bicubic": 2.0}[interpolation]
    scale = length / size
    stretch = max(scale, 1.0)  # antialiasing: the filter covers all inputs of an output
    centers = scale * (np.arange(size) + 0.5)
    starts = np.maximum((centers - radius * stretch + 0.5).astype(np.int64), 0)
    stops = np.minimum((centers + radius * stretch + 0.5).astype(np.int64), length)
    taps = np.arange(int((stops - starts).max()))
    offsets = (starts[:, None] + taps - centers[:, None] + 0.5) / stretch
    weights = resampling_filter(np.abs(offsets), interpolation)
    weights[taps >= (stops - starts)[:, None]] = 0.0
    weights /= weights.sum(axis=1, keepdims=True)
    bits = 0  # as many as the largest weight leaves room for in 16
    while bits < 22 and int(0.5 + weights.max() * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    integers = np.trunc(weights * (1 << bits) + np.copysign(0.5, weights))
    blocks = []
    for first in range(0, size, BLOCK):
        part = slice(first, first + BLOCK)
        begin, end = int(starts[first]), int(stops[part].max())
        block = np.zeros((len(starts[part]), end - begin + len(taps)))
        columns = (starts[part] - begin)[:, None] + taps
        np.put_along_axis(block, columns, integers[part], axis=1)
        blocks.append((begin, block[:, : end - begin]))
    return blocks, bits


def resampling_filter(x: NDArray[np.float64], interpolation: Interpolation) -> NDArray[np.float64]:
    """The weight of an input at distance `x`: a triangle, or Keys' cubic with a = -0.5."""
    if interpolation == "bilinear":
        return np.where(x < 1, 1 - x, 0.0)
    near = ((-0.5 + 2) * x - (-0.5 + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
