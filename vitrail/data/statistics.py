"""Mean and standard deviation of the training images, with which a model learns to expect them."""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from vitrail.data.pixels import Pixels

MAX_IMAGES = 10_000  # evenly spaced over the training split
MAX_UNCACHED = 1_000  # of them if every image has to be decoded for it
MAX_VALUES = 50_000_000  # beyond, only every second, third, ... row and column counts
DIGITS = 6  # significant ones that a recipe stores


def channel_statistics(
    images: Iterable[Pixels], *, channels_first: bool, step: int = 1
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel; 8 bits count from 0 to 1, floats as they are.

    The images weigh as many as their pixels. A channel that is constant gets a deviation of 1.
    """
    count, mean, squares = 0.0, np.zeros(1), np.zeros(1)  # squares: of deviations from the mean
    white = 1
    for image in images:
        white = 255 if image.dtype == np.uint8 else 1
        planes = image if channels_first else image.transpose(2, 0, 1)
        values = planes[:, ::step, ::step].reshape(len(planes), -1).astype(np.float64)
        own_mean = values.mean(axis=1)
        own_squares = ((values - own_mean[:, None]) ** 2).sum(axis=1)
        total = count + values.shape[1]
        shift = own_mean - mean  # Chan et al., 1979: exact where a mean is large
        squares = squares + own_squares + shift**2 * (count * values.shape[1] / total)
        mean = mean + shift * (values.shape[1] / total)
        count = total
    std = np.sqrt(squares / max(count, 1)) / white
    mean = mean / white
    constant = std <= 1e-6 * np.maximum(np.abs(mean), 1e-6)
    return round_digits(mean), round_digits(np.where(constant, 1.0, std))


def pixel_step(values: int) -> int:
    """The distance of the rows and columns that count, for this many values in all."""
    return max(1, math.ceil(math.sqrt(values / MAX_VALUES)))


def round_digits(numbers: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(f"{number:.{DIGITS}g}") for number in numbers)
