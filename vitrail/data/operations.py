"""The operations of TrivialAugment and RandAugment, each on a batch of images."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

Numbers = NDArray[np.float64]  # one per image

CHUNK_VALUES = 100_000  # values warped at a time: more leave the processor's cache, 2x slower
# Magnitude 1 of each operation, the ranges of RandAugment (Cubuk et al., 2020).
MAX_ENHANCE = 0.9  # change of brightness, contrast, colour and sharpness
MAX_POSTERIZE = 4  # bits removed
MAX_ROTATE = 30  # degrees
MAX_SHEAR = 0.3  # pixels per pixel
MAX_TRANSLATE = 0.45  # fraction of the side


def apply_operations(
    images: Tensor, chosen: NDArray[np.int64], magnitude: Numbers, sign: Numbers
) -> Tensor:
    """Applies to each image its chosen operation, in one call for all images that share it."""
    images = images.clone()
    for number, operation in enumerate(operations_for(images)):
        rows = np.flatnonzero(chosen == number)
        if len(rows):
            images[rows] = operation(images[rows], magnitude[rows], sign[rows])
    return images


# Each takes images (B, C, H, W), a magnitude in [0, 1] and a sign of -1 or 1 per image; those that
# count levels take uint8 only. The
# colour operations equal those of Pillow's ImageEnhance and ImageOps within one grey level, the
# geometric ones a bilinear Image.transform around the centre, away from the border.


def identity(images: Tensor, magnitude: Numbers, sign: Numbers) -> Tensor:
    return images


def brightness(images: Tensor, magnitude: Numbers, sign: Numbers) -> Tensor:
    return blend(torch.zeros(()), images, 1 + MAX_ENHANCE * magnitude * sign)


def contrast(images: Tensor, magnitude: Numbers, sign: Numbers) -> Tensor:
    mean = to_grey(images).float().mean((1, 2, 3), keepdim=True)
    if images.dtype == torch.uint8:
        mean = mean.add_(0.5).floor_()
    return blend(mean, images, 1 + MAX_ENHANCE * magnitude * sign)


def colour(images: Tensor, magnitude: Numbers, sign: Numbers) -> Tensor:
    return blend(to_grey(images).float(), images, 1 + MAX_ENHANCE * magnitude * sign)


def sharpness(images: Tensor, magnitude: Numbers, sign: Numbers) -> Tensor:
    return blend(smooth(images), images, 1 + MAX_ENHANCE * magnitude * sign)


def posterize(images: Tensor, magnitude: Numbers, sign: Numbers) -> Tensor:
    bits = torch.from_numpy(np.rint(MAX_POSTERIZE * magnitude)).to(torch.uint8)[:, None, None, None]
    return (images >> bits) << bits


def solarize(images: Tensor, magnitude: Numbers, sign: Numbers) -> Tensor:
    threshold = torch.from_numpy(256 * (1 - magnitude)).float()[:, None, None, None]
    return images ^ (images >= threshold) * images.new_tensor(255)  # 255 - x is x ^ 255


def autocontrast(images: Tensor, magnitude: Numbers, sign: Numbers) -> Tensor:
    low = images.amin((2, 3), keepdim=True).float()
    high = images.amax((2, 3), keepdim=True).float()
    stretched = (images - low) * (255 / (high - low))
    return torch.where(high > low, stretched, images).to(torch.uint8)


def equalize(images: Tensor, magnitude: Numbers, sign: Numbers) -> Tensor:
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


def rotate(images: Tensor, magnitude: Numbers, sign: Numbers) -> Tensor:
    matrix = rotation_matrices(np.radians(MAX_ROTATE) * magnitude * sign)
    return affine_warp(images, matrix, np.zeros((len(images), 2)))


def shear_x(images: Tensor, magnitude: Numbers, sign: Numbers) -> Tensor:
    return affine_warp(
        images, shear_matrices(MAX_SHEAR * magnitude * sign), np.zeros((len(images), 2))
    )


def shear_y(images: Tensor, magnitude: Numbers, sign: Numbers) -> Tensor:
    matrix = shear_matrices(MAX_SHEAR * magnitude * sign).transpose(0, 2, 1)
    return affine_warp(images, matrix, np.zeros((len(images), 2)))


def translate_x(images: Tensor, magnitude: Numbers, sign: Numbers) -> Tensor:
    pixels = np.rint(MAX_TRANSLATE * images.shape[3] * magnitude * sign)
    return affine_warp(
        images, np.eye(2)[None].repeat(len(images), 0), np.stack([pixels, 0 * pixels], 1)
    )


def translate_y(images: Tensor, magnitude: Numbers, sign: Numbers) -> Tensor:
    pixels = np.rint(MAX_TRANSLATE * images.shape[2] * magnitude * sign)
    return affine_warp(
        images, np.eye(2)[None].repeat(len(images), 0), np.stack([0 * pixels, pixels], 1)
    )


Operation = Callable[[Tensor, Numbers, Numbers], Tensor]

OPERATIONS: dict[str, Operation] = {
    operation.__name__: operation
    for operation in (
        *(identity, brightness, contrast, colour, sharpness, posterize, solarize),
        *(autocontrast, equalize, rotate, shear_x, shear_y, translate_x, translate_y),
    )
}


LEVEL_OPERATIONS = (posterize, solarize, autocontrast, equalize)  # on 256 levels


def operations_for(images: Tensor) -> list[Operation]:
    """All operations for uint8; without those that count levels for float images."""
    every = list(OPERATIONS.values())
    if images.dtype == torch.uint8:
        return every
    return [operation for operation in every if operation not in LEVEL_OPERATIONS]


def blend(start: Tensor, end: Tensor, factor: Numbers) -> Tensor:
    """Interpolates from `start` (factor 0) to `end` (factor 1) and beyond; uint8 is clipped."""
    factors = torch.from_numpy(factor).float()[:, None, None, None]
    blended = ((end - start) * factors).add_(start)
    return blended.clamp_(0, 255).to(torch.uint8) if end.dtype == torch.uint8 else blended


def to_grey(images: Tensor) -> Tensor:
    """Converts RGB to greyscale with Pillow's weights; other channels to their mean."""
    if images.shape[1] != 3 or images.dtype != torch.uint8:
        return images.float().mean(1, keepdim=True).to(images.dtype)
    red, green, blue = images.int().unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16)[:, None].to(torch.uint8)


def smooth(images: Tensor) -> Tensor:
    """Applies Pillow's SMOOTH: the mean of the 3 x 3 neighbours, the centre weighted five times."""
    x = images.float() if images.dtype == torch.uint8 else images.clone()
    row = x[:, :, :, :-2] + x[:, :, :, 1:-1] + x[:, :, :, 2:]
    box = row[:, :, :-2] + row[:, :, 1:-1] + row[:, :, 2:]
    smoothed = (box + 4 * x[:, :, 1:-1, 1:-1]) / 13
    x[:, :, 1:-1, 1:-1] = smoothed.add_(0.5).floor_() if images.dtype == torch.uint8 else smoothed
    return x


def rotation_matrices(angle: Numbers) -> Numbers:
    """Returns (B, 2, 2) for angles in radians."""
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], 1)


def shear_matrices(shear: Numbers) -> Numbers:
    """Returns (B, 2, 2) for horizontal shears in pixels per pixel."""
    one = np.ones_like(shear)
    return np.stack([np.stack([one, shear], -1), np.stack([0 * one, one], -1)], 1)


def affine_warp(images: Tensor, matrix: Numbers, offset: Numbers) -> Tensor:
    """Samples each output pixel (x, y) at `matrix` @ (x, y) + `offset`, in pixels from the centre.

    Pixels outside the image get the median colour of its border: the paper of a scanned digit,
    the sky of a photo.
    """
    height, width = images.shape[-2:]
    count = max(1, CHUNK_VALUES // images[0].numel())
    if len(images) > count:
        chunks = [slice(start, start + count) for start in range(0, len(images), count)]
        return torch.cat([affine_warp(images[one], matrix[one], offset[one]) for one in chunks])
    x = torch.arange(width) + (0.5 - width / 2)
    y = torch.arange(height)[:, None] + (0.5 - height / 2)
    m = torch.from_numpy(matrix).float()[:, :, :, None, None]
    o = torch.from_numpy(offset).float()[:, :, None, None]
    grid_x = (m[:, 0, 0] * x + m[:, 0, 1] * y + o[:, 0]) * (2 / width)
    grid_y = (m[:, 1, 0] * x + m[:, 1, 1] * y + o[:, 1]) * (2 / height)
    border = border_colour(images).float()
    warped = F.grid_sample(
        images - border,
        torch.stack([grid_x, grid_y], -1),
        padding_mode="zeros",
        align_corners=False,
    )
    warped = warped.add_(border)
    return warped.round_().to(torch.uint8) if images.dtype == torch.uint8 else warped


def translate(images: Tensor, dx: NDArray[np.int64], dy: NDArray[np.int64]) -> Tensor:
    """Equals `affine_warp` by whole pixels, several times faster.

    In NumPy, which copies small blocks in a third of torch's time.
    """
    pixels, (height, width) = images.numpy(), images.shape[-2:]
    x, y = int(abs(dx).max()), int(abs(dy).max())
    padded = np.empty((*pixels.shape[:2], height + 2 * y, width + 2 * x), pixels.dtype)
    padded[:] = border_colour(images).numpy()
    padded[:, :, y : y + height, x : x + width] = pixels
    windows: NDArray[np.void] = np.ndarray(  # every window of the image's size, row by row
        (*pixels.shape[:2], 2 * y + 1, 2 * x + 1, height),
        np.dtype((np.void, width * pixels.itemsize)),
        padded,
        strides=(*padded.strides, padded.strides[2]),
    )
    translated = windows[np.arange(len(pixels)), :, y + dy, x + dx]
    return torch.from_numpy(translated.view(pixels.dtype).reshape(pixels.shape))


def flip_horizontally(images: Tensor, flipped: NDArray[np.bool_]) -> Tensor:
    """Flips some of the images in place; NumPy gathers them, as above."""
    pixels, indices = images.numpy(), np.flatnonzero(flipped)
    pixels[indices] = torch.from_numpy(pixels[indices]).flip(-1).numpy()
    return images


def border_colour(images: Tensor) -> Tensor:
    """Returns the median of eight border pixels, at corners and midpoints: (B, C, 1, 1)."""
    height, width = images.shape[-2:]
    y = [0, 0, 0, height // 2, height // 2, height - 1, height - 1, height - 1]
    x = [0, width // 2, width - 1, 0, width - 1, 0, width // 2, width - 1]
    median = np.partition(images.numpy()[:, :, y, x], 3, axis=-1)[:, :, 3, None, None]
    return torch.from_numpy(median)
