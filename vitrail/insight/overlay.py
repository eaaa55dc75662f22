"""Arrays to pixels: a heatmap over its image, and many small maps side by side."""

from typing import Any

import numpy as np
from matplotlib import colormaps
from numpy.typing import NDArray
from PIL import Image

from vitrail.display.text import format_percent
from vitrail.insight.canvas import HEATMAP

Floats = NDArray[np.floating[Any]]
Bytes = NDArray[np.uint8]

MIN_SIDE = 448  # pixels of an overlay
MIN_TILE = 96  # pixels of a small map
SMOOTH_FROM = 8  # rows and columns of patches from which an overlay is interpolated
QUANTILE = 0.975  # of the patches; those above share the brightest colour


def overlay_heatmap(pixels: Bytes, heatmap: Floats) -> Bytes:
    """The image, desaturated and darkened, under the heatmap: higher values are more opaque."""
    height, width = pixels.shape[:2]
    scale = max(1, -(-MIN_SIDE // max(height, width)))
    size = (width * scale, height * scale)
    smooth = is_smooth(heatmap.shape)
    resampling = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
    low, high = colour_limits(heatmap)
    relative = ((heatmap - low) / max(high - low, 1e-30)).clip(0, 1).astype(np.float32)
    fine = np.asarray(Image.fromarray(relative).resize(size, resampling)).clip(0, 1)
    image = np.asarray(Image.fromarray(to_rgb(pixels)).resize(size, Image.Resampling.NEAREST))
    grey = image.mean(axis=2, keepdims=True)
    background = 0.7 * (0.6 * grey + 0.4 * image)
    opacity = 0.85 * fine[:, :, None] ** 0.8
    foreground = colormaps[HEATMAP](fine)[:, :, :3] * 255
    blended = (1 - opacity) * background + opacity * foreground  # (height, width, 3)
    rounded: Bytes = blended.round().astype(np.uint8)
    return rounded


def tile_maps(maps: Floats, cmap: str, gap: float) -> Bytes:
    """Maps (rows, columns, height, width) from 0 to 1 as one image; `gap` is in widths of a map."""
    rows, columns, height, width = maps.shape
    scale = max(1, -(-MIN_TILE // max(height, width)))
    fine = maps.repeat(scale, axis=2).repeat(scale, axis=3)
    height, width = height * scale, width * scale
    space = max(1, round(gap * width))
    page = np.full((rows, height + space, columns, width + space, 3), 255, np.uint8)
    page[:, :height, :, :width] = colormaps[cmap](fine, bytes=True)[..., :3].transpose(
        0, 2, 1, 3, 4
    )
    flat = page.reshape(rows * (height + space), columns * (width + space), 3)
    return flat[:-space, :-space]


def to_rgb(pixels: Bytes) -> Bytes:
    """Three channels; an image of any other number shows its first channel in grey."""
    return pixels if pixels.shape[2] == 3 else pixels[:, :, :1].repeat(3, axis=2)


def is_smooth(grid: tuple[int, ...]) -> bool:
    """Whether the grid is fine enough for interpolation not to hide single patches."""
    return min(grid) >= SMOOTH_FROM


def colour_limits(heatmap: Floats) -> tuple[float, float]:
    """The values of the darkest and the brightest colour.

    One patch in forty may exceed the brightest: a single outlier would darken all others.
    """
    return float(heatmap.min()), float(np.quantile(heatmap, QUANTILE, method="higher"))


def colorbar_labels(heatmap: Floats) -> tuple[str, str]:
    """The colour limits as percentages of the heatmap's sum."""
    total = max(float(heatmap.sum()), 1e-30)
    low, high = (format_percent(limit / total) for limit in colour_limits(heatmap))
    exceeded = heatmap.max() > colour_limits(heatmap)[1]
    return low, f"{high}\nof the sum" + ("\nor more" if exceeded else "")
