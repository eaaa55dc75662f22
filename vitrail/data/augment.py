"""Random crops, moves, flips and colours, erasing, mixup and cutmix, each a function of the seed.

Everything works on whole batches, where every image has its own luck; a batch may be one image.
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
    OPERATIONS,
    Numbers,
    mirror,
    operate,
    rotation,
    slant,
    slide,
    warp,
)
from vitrail.data.preprocess import resize

Luck = Mapping[str, Numbers]  # for each choice below, one number in [0, 1) per image

CHOICES = (
    *("flip", "top", "left", "area", "ratio", "rotate", "zoom", "shear"),
    *("operation 1", "strength 1", "sign 1", "operation 2", "strength 2", "sign 2"),
    *("erase", "erase top", "erase left", "erase area", "erase ratio", "erase level"),
)
ROUNDS = {"none": 0, "trivial": 1, "rand": 2}


def luck(seed: int, epoch: int, items: NDArray[np.int64]) -> Luck:
    """The random numbers of each item in one epoch, whatever batch or process asks for them.

    A hash of (seed, epoch, item, choice) instead of a generator's state: splitmix64 (Steele et
    al., 2014) once for each part.
    """
    state = hashed(hashed(luck_of_epoch(seed, epoch), items[:, None]), np.arange(len(CHOICES)))
    numbers = (state >> 11) * 2.0**-53
    return dict(zip(CHOICES, numbers.T, strict=True))


@lru_cache(maxsize=1)
def luck_of_epoch(seed: int, epoch: int) -> NDArray[np.uint64]:
    """What all its items begin with."""
    return hashed(hashed(np.zeros(1, np.uint64), np.array([seed])), np.array([epoch]))


def hashed(state: NDArray[np.uint64], part: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A hash of what was hashed before and a further part."""
    return scramble(state + (part.astype(np.uint64) + 1) * 0x9E3779B97F4A7C15)


def scramble(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def augment(images: Tensor, settings: Augment, luck: Luck) -> Tensor:
    """Varies uint8 images (B, C, H, W) that already have the size the model sees."""
    images = move(images, settings, luck)
    for number in range(1, ROUNDS[settings.policy] + 1):
        strength = np.full(len(images), settings.magnitude)
        if settings.policy == "trivial":
            strength = strength * luck[f"strength {number}"]
        sign = np.where(luck[f"sign {number}"] < 0.5, -1.0, 1.0)
        chosen = (luck[f"operation {number}"] * len(OPERATIONS)).astype(int)
        images = operate(images, chosen, strength, sign)
    return images


def crop(pixels: np.ndarray, settings: Augment, view: Preprocess, luck: Luck) -> np.ndarray:
    """A random part of one image (H, W, C) of any size, as large as the model sees: (C, H, W).

    Without `scale` it is the part that evaluation sees, moved by `shift` as far as there is image.
    """
    height, width = pixels.shape[:2]
    if settings.scale < 1:
        box = random_box(settings, luck, (height, width), view.width / view.height)
        top, left, tall, wide = (float(side[0]) for side in box)
    else:
        ratio = view.crop * min(height / view.height, width / view.width)
        tall, wide = ratio * view.height, ratio * view.width
        top = moved(height, tall, settings.shift, luck["top"][0])
        left = moved(width, wide, settings.shift, luck["left"][0])
    tall, wide = max(1, round(tall)), max(1, round(wide))
    top, left = min(round(top), height - tall), min(round(left), width - wide)
    part = pixels[top : top + tall, left : left + wide]
    planes = resize(part, (view.height, view.width), view.interpolation).transpose(2, 0, 1)
    return planes[:, :, ::-1] if luck["flip"][0] < settings.flip else planes


def moved(whole: int, part: float, shift: float, number: float) -> float:
    """Where a part starts that lies in the middle, but for a random move inside the whole."""
    start = (whole - part) / 2 + (2 * number - 1) * shift * part
    return float(min(max(start, 0), whole - part))


def random_box(
    settings: Augment, luck: Luck, size: tuple[int, int], shape: float
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Top, left, height and width of a random part: area from `scale` on, sides up to 4 : 3.

    `shape` is width over height of what is wanted; a side longer than the image is cut off.
    """
    height, width = size
    area = height * width * (settings.scale + (1 - settings.scale) * luck["area"])
    ratio = shape * (4 / 3) ** (2 * luck["ratio"] - 1)
    tall = np.minimum(height, np.sqrt(area / ratio))
    wide = np.minimum(width, np.sqrt(area * ratio))
    return (height - tall) * luck["top"], (width - wide) * luck["left"], tall, wide


def move(images: Tensor, settings: Augment, luck: Luck) -> Tensor:
    """Crops, shifts, turns, zooms, slants and mirrors, all in one sampling of the pixels."""
    a = settings
    if not (a.flip or a.shift or a.scale < 1 or a.rotate or a.zoom or a.shear):
        return images
    mirrored = luck["flip"] < a.flip
    height, width = images.shape[-2:]
    right, down = whole(luck["left"], a.shift * width), whole(luck["top"], a.shift * height)
    if not (a.scale < 1 or a.rotate or a.zoom or a.shear):
        return mirror(slide(images, right, down) if a.shift else images.clone(), mirrored)
    turn = np.radians(a.rotate) * (2 * luck["rotate"] - 1)
    matrix = rotation(turn) @ slant(a.shear * (2 * luck["shear"] - 1))
    matrix = matrix / ((1 + a.zoom) ** (2 * luck["zoom"] - 1))[:, None, None]
    matrix[:, :, 0] *= np.where(mirrored, -1, 1)[:, None]
    if a.scale < 1:
        top, left, tall, wide = random_box(a, luck, (height, width), width / height)
        matrix *= np.stack([wide / width, tall / height], 1)[:, :, None]
        offset = np.stack([left + (wide - width) / 2, top + (tall - height) / 2], 1)
    else:
        offset = np.stack([right, down], 1)
    return warp(images, matrix, offset.astype(np.float64))


def whole(number: Numbers, farthest: float) -> NDArray[np.int64]:
    """A number in [0, 1) as one of the whole numbers that lie up to `farthest` from 0."""
    side = round(farthest)
    return np.floor(number * (2 * side + 1)).astype(np.int64) - side


def erase(images: Tensor, settings: Augment, luck: Luck) -> Tensor:
    """Paints a rectangle of one random grey over some normalised images (Zhong et al., 2020)."""
    if not settings.erase:
        return images
    height, width = images.shape[-2:]
    area = height * width * (0.02 + (1 / 3 - 0.02) * luck["erase area"])
    ratio = 0.3 * 11 ** luck["erase ratio"]
    tall, wide = np.minimum(height, np.sqrt(area / ratio)), np.minimum(width, np.sqrt(area * ratio))
    tall = np.where(luck["erase"] < settings.erase, tall, 0)
    top, left = (height - tall) * luck["erase top"], (width - wide) * luck["erase left"]
    rows, columns = within(top, tall, height), within(left, wide, width)
    painted = (rows[:, :, None] & columns[:, None, :])[:, None]
    level = torch.from_numpy(math.sqrt(3) * (2 * luck["erase level"] - 1)).float()  # variance 1
    level = level.to(images.device)[:, None, None, None]
    return torch.where(painted.to(images.device), level, images)


def within(start: Numbers, length: Numbers, size: int) -> Tensor:
    middle = np.arange(size) + 0.5
    return torch.from_numpy((middle >= start[:, None]) & (middle < (start + length)[:, None]))


def mix(
    images: Tensor, labels: Tensor, classes: int, settings: Augment, random: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Mixes each image and its label with another one of the batch: by mixup or by cutmix.

    With both on, each batch tosses a coin. The targets say how much there is of each class.
    """
    partner = torch.from_numpy(random.permutation(len(images))).to(images.device)
    cutting = settings.cutmix > 0 and (settings.mixup == 0 or random.random() < 0.5)
    alpha = settings.cutmix if cutting else settings.mixup
    kept = random.beta(alpha, alpha)
    if cutting:
        images, kept = paste(images, partner, kept, random)
    else:
        images = images * kept + images[partner] * (1 - kept)
    sure = F.one_hot(labels, classes).float()
    return images, sure * kept + sure[partner] * (1 - kept)


def paste(
    images: Tensor, partner: Tensor, kept: float, random: np.random.Generator
) -> tuple[Tensor, float]:
    """Pastes one rectangle of the partners into all images; also the share that is still seen."""
    height, width = images.shape[-2:]
    y, x = int(random.integers(height)), int(random.integers(width))
    tall, wide = (round(side * math.sqrt(1 - kept)) for side in (height, width))
    top, bottom = max(0, y - tall // 2), min(height, y + (tall + 1) // 2)
    left, right = max(0, x - wide // 2), min(width, x + (wide + 1) // 2)
    images = images.clone()
    images[:, :, top:bottom, left:right] = images[partner, :, top:bottom, left:right]
    return images, 1 - (bottom - top) * (right - left) / (height * width)
