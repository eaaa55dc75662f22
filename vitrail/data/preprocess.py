"""Preprocessing: resizes, center-crops and normalises pixels to a tensor."""

import math
from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.config import Interpolation, Preprocess
from vitrail.data.geometry import fit_image, resize_to_cover
from vitrail.data.reading import memory

CHUNK_VALUES = 2**19  # values per chunk, 2 MB in float32: they stay in the processor's cache


def preprocess(settings: Preprocess, pixels: np.ndarray) -> Tensor:
    """Converts an image (H, W, C) to the model's input: float32 (C, H, W), normalised.

    Prediction and explanation call this function. The loader applies its two halves,
    `resize_and_crop` and `normalise`, apart, to the same bits.
    """
    cropped = torch.from_numpy(resize_and_crop(settings, pixels))
    return normalise(settings, cropped.permute(2, 0, 1).contiguous())


def resize_and_crop(settings: Preprocess, pixels: np.ndarray) -> np.ndarray:
    """Resizes an image and crops its centre: (height, width, C), of the same type."""
    return fit_image(settings, pixels, resize)


def normalise(settings: Preprocess, images: Tensor) -> Tensor:
    """Converts (..., C, H, W) to float32, minus mean, over std, on the same device."""
    white = 255 if settings.pixels == "uint8" else 1
    mean, std = scaled_mean_std(settings.mean, settings.std, images.device, white)
    if images.device.type != "cpu":
        return images.to(torch.float32).sub_(mean).div_(std)
    values = torch.from_numpy(memory.empty_float32(images.shape))
    for chunk, pixels in iterate_chunks(values, images):
        chunk.copy_(pixels).sub_(mean).div_(std)
    return values


def iterate_chunks(values: Tensor, images: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Splits a large batch so that each chunk stays in the processor's cache."""
    if images.numel() <= CHUNK_VALUES:
        return [(values, images)]
    shape = images.shape[-3:]
    count = max(1, CHUNK_VALUES // math.prod(shape))
    return zip(*(x.reshape(-1, *shape).split(count) for x in (values, images)), strict=True)


@cache
def scaled_mean_std(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, white: int = 255
) -> tuple[Tensor, Tensor]:
    """Scales mean and std to pixels from 0 to `white`; each is (C, 1, 1)."""
    scaled = (torch.tensor([white * n for n in numbers], device=device) for numbers in (mean, std))
    first, second = (numbers[:, None, None] for numbers in scaled)
    return first, second


def shrink_to_cover(
    pixels: np.ndarray, size: tuple[int, int], interpolation: Interpolation
) -> np.ndarray:
    """Downscales an image until it just covers `size`; never enlarges it."""
    if pixels.shape[0] <= size[0] or pixels.shape[1] <= size[1]:
        return pixels
    return resize_to_cover(pixels, size, interpolation, resize)


def resize(pixels: np.ndarray, size: tuple[int, int], interpolation: Interpolation) -> np.ndarray:
    """Resizes with antialiasing; equals Pillow within one grey level, rarely two, and is faster.

    `resize_with_numpy` gives the same bits.
    """
    if pixels.shape[:2] == size:
        return pixels
    # a view of (H, W, C) as (1, C, H, W): channels last, for which torch has a fast kernel
    image = torch.from_numpy(np.require(pixels, requirements="W"))[None].permute(0, 3, 1, 2)
    resized = F.interpolate(image, size=size, mode=interpolation, antialias=True)
    return resized.permute(0, 2, 3, 1)[0].contiguous().numpy()
