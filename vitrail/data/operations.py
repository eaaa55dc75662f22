"""Changes of colour and place that augmentation picks from, each for a whole batch of images."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

Numbers = NDArray[np.float64]  # one per image

CACHE = (
    100_000  # numbers worked on at once: more leave the processor's cache, which doubles the time
)


def operate(images: Tensor, chosen: NDArray[np.int64], strength: Numbers, sign: Numbers) -> Tensor:
    """Gives each image its chosen operation: one call for all images that share it."""
    images = images.clone()
    for number, operation in enumerate(OPERATIONS.values()):
        rows = np.flatnonzero(chosen == number)
        if len(rows):
            images[rows] = operation(images[rows], strength[rows], sign[rows])
    return images


# Each takes images, a strength from 0 to 1 and a sign; Pillow has the same under these names.


def identity(images: Tensor, strength: Numbers, sign: Numbers) -> Tensor:
    return images


def brightness(images: Tensor, strength: Numbers, sign: Numbers) -> Tensor:
    return blend(torch.zeros(()), images, 1 + 0.9 * strength * sign)


def contrast(images: Tensor, strength: Numbers, sign: Numbers) -> Tensor:
    mean = grey(images).float().mean((1, 2, 3), keepdim=True).add_(0.5).floor_()
    return blend(mean, images, 1 + 0.9 * strength * sign)


def colour(images: Tensor, strength: Numbers, sign: Numbers) -> Tensor:
    return blend(grey(images).float(), images, 1 + 0.9 * strength * sign)


def sharpness(images: Tensor, strength: Numbers, sign: Numbers) -> Tensor:
    return blend(smooth(images), images, 1 + 0.9 * strength * sign)


def posterize(images: Tensor, strength: Numbers, sign: Numbers) -> Tensor:
    lost = torch.from_numpy(np.rint(4 * strength)).to(torch.uint8)[:, None, None, None]
    return (images >> lost) << lost


def solarize(images: Tensor, strength: Numbers, sign: Numbers) -> Tensor:
    threshold = torch.from_numpy(256 * (1 - strength)).float()[:, None, None, None]
    return images ^ (images >= threshold) * images.new_tensor(255)  # 255 - x is x ^ 255


def autocontrast(images: Tensor, strength: Numbers, sign: Numbers) -> Tensor:
    low = images.amin((2, 3), keepdim=True).float()
    high = images.amax((2, 3), keepdim=True).float()
    stretched = (images - low) * (255 / (high - low))
    return torch.where(high > low, stretched, images).to(torch.uint8)


def equalize(images: Tensor, strength: Numbers, sign: Numbers) -> Tensor:
    values = images.flatten(0, 1).flatten(1).long()
    planes, pixels = values.shape
    flat = values + 256 * torch.arange(planes)[:, None]
    count = flat.flatten().bincount(minlength=256 * planes).unflatten(0, (planes, 256))
    last = count.gather(1, values.amax(1, keepdim=True))
    step = (pixels - last) // 255
    below = count.cumsum(1) - count
    table = torch.where(
        step > 0, (step // 2 + below) // step.clamp(min=1), torch.arange(256).expand(planes, -1)
    )
    return table.clamp_(max=255).gather(1, values).to(torch.uint8).view_as(images)


def rotate(images: Tensor, strength: Numbers, sign: Numbers) -> Tensor:
    matrix = rotation(np.radians(30) * strength * sign)
    return warp(images, matrix, np.zeros((len(images), 2)))


def shear_x(images: Tensor, strength: Numbers, sign: Numbers) -> Tensor:
    return warp(images, slant(0.3 * strength * sign), np.zeros((len(images), 2)))


def shear_y(images: Tensor, strength: Numbers, sign: Numbers) -> Tensor:
    matrix = slant(0.3 * strength * sign).transpose(0, 2, 1)
    return warp(images, matrix, np.zeros((len(images), 2)))


def move_x(images: Tensor, strength: Numbers, sign: Numbers) -> Tensor:
    far = np.rint(0.45 * images.shape[3] * strength * sign)
    return warp(images, np.eye(2)[None].repeat(len(images), 0), np.stack([far, 0 * far], 1))


def move_y(images: Tensor, strength: Numbers, sign: Numbers) -> Tensor:
    far = np.rint(0.45 * images.shape[2] * strength * sign)
    return warp(images, np.eye(2)[None].repeat(len(images), 0), np.stack([0 * far, far], 1))


OPERATIONS: dict[str, Callable[[Tensor, Numbers, Numbers], Tensor]] = {
    operation.__name__: operation
    for operation in (
        *(identity, brightness, contrast, colour, sharpness, posterize, solarize),
        *(autocontrast, equalize, rotate, shear_x, shear_y, move_x, move_y),
    )
}


def blend(start: Tensor, end: Tensor, share: Numbers) -> Tensor:
    """From `start` (share 0) to `end` (share 1) and beyond, cut to what uint8 can hold."""
    shares = torch.from_numpy(share).float()[:, None, None, None]
    return ((end - start) * shares).add_(start).clamp_(0, 255).to(torch.uint8)


def grey(images: Tensor) -> Tensor:
    """What a grey picture would show, with Pillow's weights; of other sensors, the mean."""
    if images.shape[1] != 3:
        return images.float().mean(1, keepdim=True).to(torch.uint8)
    red, green, blue = images.int().unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16)[:, None].to(torch.uint8)


def smooth(images: Tensor) -> Tensor:
    """Pillow's SMOOTH: the mean of the 3 x 3 neighbours, the middle counting five times."""
    x = images.float()
    three = x[:, :, :, :-2] + x[:, :, :, 1:-1] + x[:, :, :, 2:]
    nine = three[:, :, :-2] + three[:, :, 1:-1] + three[:, :, 2:]
    x[:, :, 1:-1, 1:-1] = ((nine + 4 * x[:, :, 1:-1, 1:-1]) / 13).add_(0.5).floor_()
    return x


def rotation(turn: Numbers) -> Numbers:
    cos, sin = np.cos(turn), np.sin(turn)
    return np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], 1)


def slant(shear: Numbers) -> Numbers:
    one = np.ones_like(shear)
    return np.stack([np.stack([one, shear], -1), np.stack([0 * one, one], -1)], 1)


def warp(images: Tensor, matrix: Numbers, offset: Numbers) -> Tensor:
    """Each pixel shows what was at `matrix` @ (x, y) + `offset`, in pixels from the centre.

    Where there was nothing, it shows the usual colour of the border: the paper of a scanned digit,
    the sky of a photo.
    """
    height, width = images.shape[-2:]
    some = max(1, CACHE // images[0].numel())
    if len(images) > some:
        parts = [slice(start, start + some) for start in range(0, len(images), some)]
        return torch.cat([warp(images[part], matrix[part], offset[part]) for part in parts])
    x = torch.arange(width) + (0.5 - width / 2)
    y = torch.arange(height)[:, None] + (0.5 - height / 2)
    m = torch.from_numpy(matrix).float()[:, :, :, None, None]
    o = torch.from_numpy(offset).float()[:, :, None, None]
    to_x = (m[:, 0, 0] * x + m[:, 0, 1] * y + o[:, 0]) * (2 / width)
    to_y = (m[:, 1, 0] * x + m[:, 1, 1] * y + o[:, 1]) * (2 / height)
    border = border_colour(images).float()
    moved = F.grid_sample(
        images - border, torch.stack([to_x, to_y], -1), padding_mode="zeros", align_corners=False
    )
    return moved.add_(border).round_().to(torch.uint8)


def slide(images: Tensor, right: NDArray[np.int64], down: NDArray[np.int64]) -> Tensor:
    """`warp` by whole pixels only, several times faster.

    In numpy, whose copies of small pieces take a third of the time of torch's.
    """
    pixels, (height, width) = images.numpy(), images.shape[-2:]
    x, y = int(abs(right).max()), int(abs(down).max())
    padded = np.empty((*pixels.shape[:2], height + 2 * y, width + 2 * x), np.uint8)
    padded[:] = border_colour(images).numpy()
    padded[:, :, y : y + height, x : x + width] = pixels
    windows: NDArray[np.void] = np.ndarray(  # every part of the size of an image, row by row
        (*pixels.shape[:2], 2 * y + 1, 2 * x + 1, height),
        np.dtype((np.void, width)),
        padded,
        strides=(*padded.strides, padded.strides[2]),
    )
    moved = windows[np.arange(len(pixels)), :, y + down, x + right]
    return torch.from_numpy(moved.view(np.uint8).reshape(pixels.shape))


def mirror(images: Tensor, mirrored: NDArray[np.bool_]) -> Tensor:
    """Turns some of the images round, in place. Numpy chooses them, as above."""
    pixels, some = images.numpy(), np.flatnonzero(mirrored)
    pixels[some] = torch.from_numpy(pixels[some]).flip(-1).numpy()
    return images


def border_colour(images: Tensor) -> Tensor:
    """The median of eight pixels, the corners and the middles of the sides: (B, C, 1, 1)."""
    height, width = images.shape[-2:]
    y = [0, 0, 0, height // 2, height // 2, height - 1, height - 1, height - 1]
    x = [0, width // 2, width - 1, 0, width - 1, 0, width // 2, width - 1]
    median = np.partition(images.numpy()[:, :, y, x], 3, axis=-1)[:, :, 3, None, None]
    return torch.from_numpy(median)
