"""How pixels become a tensor: the one function behind every command, and its plain settings."""

import math
from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.config import MEANS, Interpolation, Preprocess
from vitrail.data.reading import memory
from vitrail.errors import UserError

__all__ = ["MEANS", "Preprocess", "fit", "normalise", "preprocess", "shrink"]

NEAR = 2**19  # numbers in such a piece
LONGEST = 8  # sides longer than this many short ones are cut before resizing: they fill the memory


def preprocess(settings: Preprocess, pixels: np.ndarray) -> Tensor:
    """What the model sees of an image (H, W, C) in uint8: float32 (C, H, W), normalised.

    Evaluation, prediction, explanation, export and serving all come through here.
    """
    fitted = torch.from_numpy(fit(settings, pixels))
    return normalise(settings, fitted.permute(2, 0, 1).contiguous())


def fit(settings: Preprocess, pixels: np.ndarray) -> np.ndarray:
    """The image resized and its centre cut out, still uint8 (height, width, C)."""
    if pixels.ndim != 3 or pixels.dtype != np.uint8 or pixels.shape[2] != settings.channels:
        raise UserError(
            f"pixels are {pixels.dtype} of shape {pixels.shape}; give uint8 of shape "
            f"(height, width, {settings.channels})"
        )
    height, width = settings.height, settings.width
    # rounded down, as timm does: 224 / 0.9 is 248
    target = math.floor(height / settings.crop), math.floor(width / settings.crop)
    pixels = resize_to_cover(pixels, target, settings.interpolation)
    return cut(pixels, height, width)


def normalise(settings: Preprocess, images: Tensor) -> Tensor:
    """uint8 (..., C, H, W) to float32 with the mean taken off, on whatever device they are."""
    mean, std = statistics(settings.mean, settings.std, images.device)
    if images.device.type != "cpu":
        return images.to(torch.float32).sub_(mean).div_(std)
    numbers = torch.from_numpy(memory.floats(images.shape))
    for part, pixels in parts(numbers, images):
        part.copy_(pixels).sub_(mean).div_(std)
    return numbers


def parts(numbers: Tensor, images: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """A large batch in pieces that stay in the processor's cache from one operation to the next."""
    if images.numel() <= NEAR:
        return [(numbers, images)]
    shape = images.shape[-3:]
    some = max(1, NEAR // math.prod(shape))
    pieces = (whole.reshape(-1, *shape).split(some) for whole in (numbers, images))
    return zip(*pieces, strict=True)


@cache
def statistics(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Of pixels from 0 to 255, each (C, 1, 1)."""
    both = (torch.tensor([255 * n for n in numbers], device=device) for numbers in (mean, std))
    first, second = (numbers[:, None, None] for numbers in both)
    return first, second


def shrink(pixels: np.ndarray, size: tuple[int, int], interpolation: Interpolation) -> np.ndarray:
    """The image made just large enough to cover `size`, unless it is that small already."""
    if pixels.shape[0] <= size[0] or pixels.shape[1] <= size[1]:
        return pixels
    return resize_to_cover(pixels, size, interpolation)


def resize_to_cover(
    pixels: np.ndarray, target: tuple[int, int], interpolation: Interpolation
) -> np.ndarray:
    """Keeps the proportions: one side becomes as long as wanted, the other one at least so."""
    height, width = pixels.shape[:2]
    if max(height, width) > LONGEST * min(height, width) * max(target) / min(target):
        longest = LONGEST * min(height, width) * max(target) // min(target)
        pixels = cut(pixels, min(height, longest), min(width, longest))
        height, width = pixels.shape[:2]
    if target[0] * width >= target[1] * height:  # the height decides
        return resize(pixels, (target[0], target[0] * width // height), interpolation)
    return resize(pixels, (target[1] * height // width, target[1]), interpolation)


def resize(pixels: np.ndarray, size: tuple[int, int], interpolation: Interpolation) -> np.ndarray:
    """Equals Pillow's resize to one grey level, seldom two, and is faster."""
    if pixels.shape[:2] == size:
        return pixels
    # a view of (H, W, C) as (1, C, H, W): the layout for which torch has its fast kernel
    image = torch.from_numpy(np.require(pixels, requirements="W"))[None].permute(0, 3, 1, 2)
    resized = F.interpolate(image, size=size, mode=interpolation, antialias=True)
    return resized.permute(0, 2, 3, 1)[0].contiguous().numpy()


def cut(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """The centre of an image."""
    top = round((pixels.shape[0] - height) / 2)
    left = round((pixels.shape[1] - width) / 2)
    return np.ascontiguousarray(pixels[top : top + height, left : left + width])
