"""Augmentation, each random choice a function of (seed, epoch, item).

All functions take batches, in which every image has its own random numbers; a batch may be a single
image.
"""

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.config import Augment, Preprocess
from vitrail.data.operations import (
    Numbers,
    affine_warp,
    apply_operations,
    flip_horizontally,
    operations_for,
    rotation_matrices,
    shear_matrices,
    translate,
)
from vitrail.data.preprocess import resize

Uniforms = Mapping[str, Numbers]  # for each random choice, one number in [0, 1) per image

# The order is part of the hash: append new choices at the end, or seeded runs change.
RANDOM_CHOICES = (
    *("flip", "top", "left", "area", "ratio", "rotate", "zoom", "shear"),
    *("operation 1", "magnitude 1", "sign 1", "operation 2", "magnitude 2", "sign 2"),
    *("erase", "erase top", "erase left", "erase area", "erase ratio", "erase level"),
)
OPERATIONS_PER_IMAGE = {"none": 0, "trivial": 1, "rand": 2}
CROP_RATIO = 4 / 3  # maximum aspect ratio of a random resized crop (Szegedy et al., 2015)
ERASE_AREA = (0.02, 1 / 3)  # range of the erased area fraction (Zhong et al., 2020; timm)
ERASE_RATIO = (0.3, 3.3)  # range of width over height of the erased rectangle


def sample_uniforms(seed: int, epoch: int, items: NDArray[np.int64]) -> Uniforms:
    """Returns the random numbers of each item in one epoch, the same in any batch or process.

    They are a hash of (seed, epoch, item, choice), splitmix64 (Steele et al., 2014) applied once
    per part, so no RNG state has to be saved or shared.
    """
    state = hash_combine(hash_epoch(seed, epoch), items[:, None])
    state = hash_combine(state, np.arange(len(RANDOM_CHOICES)))
    numbers = (state >> 11) * 2.0**-53
    return dict(zip(RANDOM_CHOICES, numbers.T, strict=True))


@lru_cache(maxsize=1)
def hash_epoch(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Hashes what all items of an epoch share."""
    return hash_combine(hash_combine(np.zeros(1, np.uint64), np.array([seed])), np.array([epoch]))


def hash_combine(state: NDArray[np.uint64], part: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Extends a hash by a further part."""
    return splitmix64_mix(state + (part.astype(np.uint64) + 1) * 0x9E3779B97F4A7C15)


def splitmix64_mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def augment(images: Tensor, settings: Augment, uniforms: Uniforms) -> Tensor:
    """Augments images (B, C, H, W) of the model's input size: affine, then the policy."""
    images = random_affine(images, settings, uniforms)
    choices = len(operations_for(images))
    for number in range(1, OPERATIONS_PER_IMAGE[settings.policy] + 1):
        magnitude = np.full(len(images), settings.magnitude)
        if settings.policy == "trivial":
            magnitude = magnitude * uniforms[f"magnitude {number}"]
        sign = np.where(uniforms[f"sign {number}"] < 0.5, -1.0, 1.0)
        chosen = (uniforms[f"operation {number}"] * choices).astype(int)
        images = apply_operations(images, chosen, magnitude, sign)
    return images


def random_crop(
    pixels: np.ndarray, settings: Augment, preprocess: Preprocess, uniforms: Uniforms
) -> np.ndarray:
    """Crops one image (H, W, C) of any size at random, resizes and flips it: (C, H, W).

    With `scale` it is a random resized crop; without, the center crop of evaluation, translated
    by up to `shift` inside the image.
    """
    height, width = pixels.shape[:2]
    if settings.scale < 1:
        aspect = preprocess.width / preprocess.height
        box = random_box(settings, uniforms, (height, width), aspect)
        top, left, box_height, box_width = (float(side[0]) for side in box)
    else:
        ratio = preprocess.crop * min(height / preprocess.height, width / preprocess.width)
        box_height, box_width = ratio * preprocess.height, ratio * preprocess.width
        top = shifted_start(height, box_height, settings.shift, uniforms["top"][0])
        left = shifted_start(width, box_width, settings.shift, uniforms["left"][0])
    rows, columns = max(1, round(box_height)), max(1, round(box_width))
    y, x = min(round(top), height - rows), min(round(left), width - columns)
    size = preprocess.height, preprocess.width
    crop = resize(pixels[y : y + rows, x : x + columns], size, preprocess.interpolation)
    planes = crop.transpose(2, 0, 1)
    return planes[:, :, ::-1] if uniforms["flip"][0] < settings.flip else planes


def shifted_start(size: int, crop: float, shift: float, uniform: float) -> float:
    """Returns where a centred crop starts after a random shift, clipped to the image."""
    start = (size - crop) / 2 + (2 * uniform - 1) * shift * crop
    return float(min(max(start, 0), size - crop))


def random_box(
    settings: Augment, uniforms: Uniforms, size: tuple[int, int], aspect: float
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Samples top, left, height and width of a random resized crop (Szegedy et al., 2015).

    `aspect` is width over height of the output; a side longer than the image is clipped.
    """
    height, width = size
    area = height * width * (settings.scale + (1 - settings.scale) * uniforms["area"])
    ratio = aspect * CROP_RATIO ** (2 * uniforms["ratio"] - 1)
    box_height = np.minimum(height, np.sqrt(area / ratio))
    box_width = np.minimum(width, np.sqrt(area * ratio))
    top, left = (height - box_height) * uniforms["top"], (width - box_width) * uniforms["left"]
    return top, left, box_height, box_width


def random_affine(images: Tensor, settings: Augment, uniforms: Uniforms) -> Tensor:
    """Crops, translates, rotates, zooms, shears and flips with one interpolation."""
    a = settings
    if not (a.flip or a.shift or a.scale < 1 or a.rotate or a.zoom or a.shear):
        return images
    flipped = uniforms["flip"] < a.flip
    height, width = images.shape[-2:]
    dx = uniform_offset(uniforms["left"], a.shift * width)
    dy = uniform_offset(uniforms["top"], a.shift * height)
    if not (a.scale < 1 or a.rotate or a.zoom or a.shear):
        return flip_horizontally(translate(images, dx, dy) if a.shift else images.clone(), flipped)
    angle = np.radians(a.rotate) * (2 * uniforms["rotate"] - 1)
    matrix = rotation_matrices(angle) @ shear_matrices(a.shear * (2 * uniforms["shear"] - 1))
    matrix = matrix / ((1 + a.zoom) ** (2 * uniforms["zoom"] - 1))[:, None, None]
    matrix[:, :, 0] *= np.where(flipped, -1, 1)[:, None]
    if a.scale < 1:
        top, left, box_height, box_width = random_box(a, uniforms, (height, width), width / height)
        matrix *= np.stack([box_width / width, box_height / height], 1)[:, :, None]
        offset = np.stack([left + (box_width - width) / 2, top + (box_height - height) / 2], 1)
    else:
        offset = np.stack([dx, dy], 1)
    return affine_warp(images, matrix, offset.astype(np.float64))


def uniform_offset(uniforms: Numbers, maximum: float) -> NDArray[np.int64]:
    """Maps numbers in [0, 1) to whole pixels, uniform over -`maximum` to `maximum`."""
    limit = round(maximum)
    return np.floor(uniforms * (2 * limit + 1)).astype(np.int64) - limit


def random_erasing(images: Tensor, settings: Augment, uniforms: Uniforms) -> Tensor:
    """Fills a rectangle of some normalised images with one random grey (Zhong et al., 2020)."""
    if not settings.erase:
        return images
    height, width = images.shape[-2:]
    low, high = ERASE_AREA
    area = height * width * (low + (high - low) * uniforms["erase area"])
    ratio = ERASE_RATIO[0] * (ERASE_RATIO[1] / ERASE_RATIO[0]) ** uniforms["erase ratio"]
    box_height = np.minimum(height, np.sqrt(area / ratio))
    box_width = np.minimum(width, np.sqrt(area * ratio))
    box_height = np.where(uniforms["erase"] < settings.erase, box_height, 0)
    top = (height - box_height) * uniforms["erase top"]
    left = (width - box_width) * uniforms["erase left"]
    rows = interval_mask(top, box_height, height)
    columns = interval_mask(left, box_width, width)
    mask = (rows[:, :, None] & columns[:, None, :])[:, None]
    # uniform with variance 1, like the normalised pixels
    level = torch.from_numpy(math.sqrt(3) * (2 * uniforms["erase level"] - 1)).float()
    level = level.to(images.device)[:, None, None, None]
    return torch.where(mask.to(images.device), level, images)


def interval_mask(start: Numbers, length: Numbers, size: int) -> Tensor:
    """Marks the pixels whose centres are inside each interval: bool (B, size)."""
    centres = np.arange(size) + 0.5
    return torch.from_numpy((centres >= start[:, None]) & (centres < (start + length)[:, None]))


def mixup_or_cutmix(
    images: Tensor, labels: Tensor, classes: int, settings: Augment, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Mixes each image and its label with another one of the batch; returns images and targets.

    If both are enabled, each batch uses either with probability 0.5. The targets are class
    probabilities (B, K).
    """
    partner = torch.from_numpy(rng.permutation(len(images))).to(images.device)
    use_cutmix = settings.cutmix > 0 and (settings.mixup == 0 or rng.random() < 0.5)
    alpha = settings.cutmix if use_cutmix else settings.mixup
    weight = rng.beta(alpha, alpha)
    if use_cutmix:
        images, weight = cutmix(images, partner, weight, rng)
    else:
        images = images * weight + images[partner] * (1 - weight)
    one_hot = labels if labels.ndim == 2 else F.one_hot(labels, classes).float()
    return images, one_hot * weight + one_hot[partner] * (1 - weight)


def cutmix(
    images: Tensor, partner: Tensor, weight: float, rng: np.random.Generator
) -> tuple[Tensor, float]:
    """Pastes one rectangle of the partners into all images (Yun et al., 2019).

    `weight` is the wanted area fraction of the own image; the second result is the actual one,
    after the rectangle was clipped to the image.
    """
    height, width = images.shape[-2:]
    y, x = int(rng.integers(height)), int(rng.integers(width))
    rows, columns = (round(side * math.sqrt(1 - weight)) for side in (height, width))
    top, bottom = max(0, y - rows // 2), min(height, y + (rows + 1) // 2)
    left, right = max(0, x - columns // 2), min(width, x + (columns + 1) // 2)
    images = images.clone()
    images[:, :, top:bottom, left:right] = images[partner, :, top:bottom, left:right]
    return images, 1 - (bottom - top) * (right - left) / (height * width)
