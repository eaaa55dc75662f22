"""The 15 common corruptions after Hendrycks and Dietterich (2019), and three more.

They change uint8 images (height, width, channels) of the model's input size. Each is a function of
the image, the strength from 1 to 5 and a random generator that depends on the image, so that the
same image is always corrupted the same way. Lengths in pixels are those of the paper for 224
pixels, scaled to the image. Frost is a generated texture instead of the paper's photographs.
"""

import io
import math
from collections.abc import Callable
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional as F

Pixels = NDArray[np.uint8]
Floats = Any  # an array (height, width, channels) from 0 to 1
Random = np.random.Generator

STRENGTHS = (1, 2, 3, 4, 5)
PAPER_SIZE = 224  # pixels of the images whose parameters the paper gives
SMALL_SIZE = 96  # smaller images get the noise of the paper's CIFAR-10-C, which is weaker


def corrupt_image(pixels: Pixels, name: str, strength: int, item: int) -> Pixels:
    """The image after a corruption; `item` seeds its randomness."""
    seed = (crc32(name.encode()), strength, item)
    values = CORRUPTIONS[name](pixels / 255.0, strength - 1, np.random.default_rng(seed))
    corrupted: Pixels = np.clip(np.rint(values * 255), 0, 255).astype(np.uint8)
    return corrupted


def scale_length(x: Floats, length: float, least: float = 0.0) -> float:
    """A length in pixels of the paper's images, for this image."""
    return max(least, length * float(min(x.shape[:2])) / PAPER_SIZE)


def is_small(x: Floats) -> bool:
    return bool(min(x.shape[:2]) < SMALL_SIZE)


def gaussian_noise(x: Floats, level: int, random: Random) -> Floats:
    scales = (0.04, 0.06, 0.08, 0.09, 0.10) if is_small(x) else (0.08, 0.12, 0.18, 0.26, 0.38)
    return x + random.normal(0, scales[level], x.shape)


def shot_noise(x: Floats, level: int, random: Random) -> Floats:
    photons = (500, 250, 100, 75, 50) if is_small(x) else (60, 25, 12, 5, 3)
    return random.poisson(x * photons[level]) / photons[level]


def impulse_noise(x: Floats, level: int, random: Random) -> Floats:
    amounts = (0.01, 0.02, 0.03, 0.05, 0.07) if is_small(x) else (0.03, 0.06, 0.09, 0.17, 0.27)
    chance, value = random.random(x.shape), random.integers(0, 2, x.shape)
    return np.where(chance < amounts[level], value, x)


def defocus_blur(x: Floats, level: int, random: Random) -> Floats:
    radius = scale_length(x, (3, 4, 6, 8, 10)[level], 0.6 + 0.2 * level)
    side = math.ceil(radius)
    y, z = np.mgrid[-side : side + 1, -side : side + 1]
    disk = np.clip(radius + 0.5 - np.hypot(y, z), 0, 1)
    return convolve(x, disk)


def glass_blur(x: Floats, level: int, random: Random) -> Floats:
    sigma, reach, repeats = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))[level]
    sigma, reach = scale_length(x, sigma, 0.3), max(1, round(scale_length(x, reach)))
    x = gaussian_blur(x, sigma)
    rows, columns = np.indices(x.shape[:2])
    for _ in range(repeats):  # every pixel takes the place of a neighbour
        shift = random.integers(-reach, reach + 1, (2, *x.shape[:2]))
        x = x[
            np.clip(rows + shift[0], 0, x.shape[0] - 1),
            np.clip(columns + shift[1], 0, x.shape[1] - 1),
        ]
    return gaussian_blur(x, sigma)


def motion_blur(x: Floats, level: int, random: Random) -> Floats:
    length = scale_length(x, (10, 15, 15, 15, 20)[level], 2 + level / 2)
    sigma = scale_length(x, (3, 5, 8, 12, 15)[level], 1 + level / 2)
    return blur_along(x, length, sigma, math.radians(random.uniform(-45, 45)))


def zoom_blur(x: Floats, level: int, random: Random) -> Floats:
    ends, steps = (1.11, 1.16, 1.21, 1.26, 1.31), (0.01, 0.01, 0.02, 0.02, 0.03)
    factors = np.arange(1, ends[level], steps[level])
    zoomed = [x, *(resample(x, 1 / factor, 0.0) for factor in factors)]
    return np.mean(zoomed, axis=0)


def snow(x: Floats, level: int, random: Random) -> Floats:
    mean, scale, zoom, threshold, length, sigma, weight = (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    )[level]
    flakes = random.normal(mean, scale, (*x.shape[:2], 1))
    flakes = resample(flakes, 1 / max(1.0, scale_length(x, zoom)), 0.0)
    flakes = np.where(flakes < threshold, 0, np.clip(flakes, 0, 1))
    angle = math.radians(random.uniform(-135, -45))
    flakes = blur_along(flakes, scale_length(x, length, 2), scale_length(x, sigma, 1), angle)
    grey = x.mean(axis=2, keepdims=True)
    x = weight * x + (1 - weight) * np.maximum(x, grey * 1.5 + 0.5)
    return x + flakes + flakes[::-1, ::-1]


def frost(x: Floats, level: int, random: Random) -> Floats:
    keep, add = ((0.95, 0.35), (0.8, 0.6), (0.7, 0.7), (0.65, 0.8), (0.55, 0.9))[level]
    crystals = plasma(x.shape[:2], 1.6, random) ** 2  # bright veins on dark ground
    veins = 1 - np.abs(2 * plasma(x.shape[:2], 1.9, random) - 1)
    texture = np.clip(0.6 * crystals + 0.6 * veins**4, 0, 1)
    tint = np.linspace(0.8, 1.0, x.shape[2])  # bluish in RGB: the last channel is blue
    return keep * x + add * texture[..., None] * tint


def fog(x: Floats, level: int, random: Random) -> Floats:
    amounts, decays = (1.5, 2.0, 2.5, 2.5, 3.0), (2.0, 2.0, 1.7, 1.5, 1.4)
    if is_small(x):
        amounts, decays = (0.2, 0.5, 0.75, 1.0, 1.5), (3.0, 3.0, 2.5, 2.0, 1.75)
    highest = max(x.max(), 1e-6)
    mist = plasma(x.shape[:2], decays[level], random)[..., None]
    return (x + amounts[level] * mist) * highest / (highest + amounts[level])


def brighten(x: Floats, level: int, random: Random) -> Floats:
    amounts = (0.05, 0.1, 0.15, 0.2, 0.3) if is_small(x) else (0.1, 0.2, 0.3, 0.4, 0.5)
    value = np.maximum(x.max(axis=2, keepdims=True), 1e-6)  # V of HSV, which keeps hue
    return x * np.minimum(1, value + amounts[level]) / value


def lower_contrast(x: Floats, level: int, random: Random) -> Floats:
    factors = (0.75, 0.5, 0.4, 0.3, 0.15) if is_small(x) else (0.4, 0.3, 0.2, 0.1, 0.05)
    mean = x.mean(axis=(0, 1), keepdims=True)
    return (x - mean) * factors[level] + mean


def elastic_transform(x: Floats, level: int, random: Random) -> Floats:
    side = min(x.shape[:2])
    amounts = (0.010, 0.018, 0.026, 0.036, 0.048)  # of the side: largest displacement
    coarse = torch.from_numpy(random.uniform(-1, 1, (1, 2, 7, 7)))
    field = F.interpolate(coarse, size=x.shape[:2], mode="bicubic", align_corners=True)[0]
    shift = (field * 2 * amounts[level] * side).numpy()
    return sample(x, shift[0], shift[1])


def pixelate(x: Floats, level: int, random: Random) -> Floats:
    factors = (0.95, 0.9, 0.85, 0.75, 0.65) if is_small(x) else (0.6, 0.5, 0.4, 0.3, 0.25)
    return shrink_and_enlarge(x, factors[level], "box", "nearest")


def jpeg_compression(x: Floats, level: int, random: Random) -> Floats:
    qualities = (80, 65, 58, 50, 40) if is_small(x) else (25, 18, 15, 10, 7)
    return compress(x, qualities[level])


def jpeg_quality(x: Floats, level: int, random: Random) -> Floats:
    return compress(x, (90, 75, 60, 45, 30)[level])


def small_size(x: Floats, level: int, random: Random) -> Floats:
    """The image as if it had been taken with fewer pixels, and enlarged."""
    return shrink_and_enlarge(x, (0.75, 0.5, 0.35, 0.25, 0.15)[level], "bilinear", "bilinear")


def rotation(x: Floats, level: int, random: Random) -> Floats:
    degrees = (5, 10, 15, 30, 45)[level] * (1 if random.random() < 0.5 else -1)
    return resample(x, 1.0, math.radians(degrees))


Corruption = Callable[[Floats, int, Random], Floats]
COMMON: dict[str, Corruption] = {  # in the paper's order: noise, blur, weather, digital
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "defocus_blur": defocus_blur,
    "glass_blur": glass_blur,
    "motion_blur": motion_blur,
    "zoom_blur": zoom_blur,
    "snow": snow,
    "frost": frost,
    "fog": fog,
    "brightness": brighten,
    "contrast": lower_contrast,
    "elastic_transform": elastic_transform,
    "pixelate": pixelate,
    "jpeg_compression": jpeg_compression,
}
CORRUPTIONS: dict[str, Corruption] = {
    **COMMON,
    "jpeg_quality": jpeg_quality,
    "small_size": small_size,
    "rotation": rotation,
}


def to_tensor(x: Floats) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).permute(2, 0, 1)[None].float()


def to_array(x: torch.Tensor) -> Floats:
    array: Floats = x[0].permute(1, 2, 0).double().numpy()
    return array


def convolve(x: Floats, kernel: Floats) -> Floats:
    """Each channel with one kernel, which is normalised; edges are repeated."""
    channels = x.shape[2]
    weight = torch.from_numpy(kernel / kernel.sum()).float()[None, None].repeat(channels, 1, 1, 1)
    down, across = kernel.shape[0] // 2, kernel.shape[1] // 2
    padded = F.pad(to_tensor(x), (across, across, down, down), mode="replicate")
    return to_array(F.conv2d(padded, weight, groups=channels))


def gaussian_blur(x: Floats, sigma: float) -> Floats:
    side = max(1, math.ceil(3 * sigma))
    line = np.exp(-(np.arange(-side, side + 1) ** 2) / (2 * sigma**2))
    return convolve(convolve(x, line[:, None]), line[None])


def blur_along(x: Floats, length: float, sigma: float, angle: float) -> Floats:
    """A blur along a line, which fades with its distance."""
    side = math.ceil(length)
    kernel = np.zeros((2 * side + 1, 2 * side + 1))
    for step in np.arange(0, length + 0.25, 0.25):
        row = side + round(step * math.sin(angle))
        column = side + round(step * math.cos(angle))
        kernel[row, column] = max(kernel[row, column], math.exp(-(step**2) / (2 * sigma**2)))
    return convolve(x, kernel)


def resample(x: Floats, scale: float, angle: float) -> Floats:
    """The image zoomed by 1 / scale and turned around its centre; edges are repeated."""
    c, s = scale * math.cos(angle), scale * math.sin(angle)
    ratio = x.shape[0] / x.shape[1]
    theta = torch.tensor([[[c, s * ratio, 0.0], [-s / ratio, c, 0.0]]], dtype=torch.float32)
    grid = F.affine_grid(theta, [1, x.shape[2], *x.shape[:2]], align_corners=False)
    return to_array(F.grid_sample(to_tensor(x), grid, padding_mode="border", align_corners=False))


def sample(x: Floats, down: Floats, across: Floats) -> Floats:
    """Shifts each pixel by its own offset, with bilinear interpolation."""
    height, width = x.shape[:2]
    rows, columns = np.indices((height, width))
    grid = np.stack(
        [(2 * (columns + across) + 1) / width - 1, (2 * (rows + down) + 1) / height - 1], axis=-1
    )
    points = torch.from_numpy(grid)[None].float()
    return to_array(
        F.grid_sample(to_tensor(x), points, padding_mode="reflection", align_corners=False)
    )


def plasma(shape: tuple[int, ...], decay: float, random: Random) -> Floats:
    """Fractal noise from 0 to 1: each octave has twice the detail, and 1 / `decay` the height."""
    total = torch.zeros(1, 1, *shape, dtype=torch.float64)
    cells, amplitude = 2, 1.0
    while cells <= 2 * max(shape):
        noise = torch.from_numpy(random.random((1, 1, cells + 1, cells + 1)))
        total += amplitude * F.interpolate(noise, size=shape, mode="bilinear", align_corners=True)
        cells, amplitude = 2 * cells, amplitude / decay
    values: Floats = total[0, 0].numpy()
    return (values - values.min()) / max(float(np.ptp(values)), 1e-9)


def shrink_and_enlarge(x: Floats, factor: float, down: str, up: str) -> Floats:
    size = [max(1, round(side * factor)) for side in x.shape[:2]]
    mode = "area" if down == "box" else "bilinear"
    smooth = {"antialias": True} if mode == "bilinear" else {}
    small = F.interpolate(to_tensor(x), size=size, mode=mode, **smooth)
    return to_array(F.interpolate(small, size=x.shape[:2], mode=up))


def compress(x: Floats, quality: int) -> Floats:
    """Through a JPEG file; more than three channels go one by one."""
    pixels = np.clip(np.rint(x * 255), 0, 255).astype(np.uint8)
    if pixels.shape[2] not in (1, 3):
        parts = [compress(x[..., [channel]], quality) for channel in range(pixels.shape[2])]
        return np.concatenate(parts, axis=2)
    stream = io.BytesIO()
    Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[..., 0]).save(
        stream, "JPEG", quality=quality
    )
    decoded: Floats = np.asarray(Image.open(stream)) / 255.0
    return decoded.reshape(x.shape)
