"""Overlays and tiles: which pixel gets which colour."""

import numpy as np
from matplotlib import colormaps

from vitrail.insight.canvas import MAGNITUDE
from vitrail.insight.overlay import (
    colorbar_labels,
    colour_limits,
    overlay_heatmap,
    tile_maps,
    to_rgb,
)


def flat(size=32, channels=3):
    return np.full((size, size, channels), 128, np.uint8)


def test_an_image_of_two_channels_shows_the_first():
    pixels = np.stack([np.full((4, 4), 7), np.full((4, 4), 200)], axis=2).astype(np.uint8)
    assert (to_rgb(pixels) == 7).all()


def test_the_overlay_is_hot_where_the_heatmap_is():
    heatmap = np.zeros((4, 4), np.float32)
    heatmap[1, 2] = 1
    image = overlay_heatmap(flat(), heatmap)
    side = image.shape[0] // 4
    hot = image[side : 2 * side, 2 * side : 3 * side]
    assert (hot == hot[0, 0]).all()  # hard edges: all of the patch, and nothing else
    cold = image.copy()
    cold[side : 2 * side, 2 * side : 3 * side] = image[0, 0]
    assert (cold == image[0, 0]).all() and hot[0, 0].sum() > 2 * image[0, 0].sum()


def test_a_fine_grid_is_smoothed_around_the_hottest_patch():
    heatmap = np.zeros((14, 14), np.float32)
    heatmap[4, 9] = 1
    image = overlay_heatmap(flat(224), heatmap).astype(int)
    place = np.unravel_index(image[:, :, 1].argmax(), image.shape[:2])
    side = image.shape[0] / 14
    assert [int(p // side) for p in place] == [4, 9]
    assert len(np.unique(image[:, :, 1])) > 20


def test_one_patch_far_above_the_rest_does_not_darken_them():
    heatmap = np.arange(196, dtype=np.float32).reshape(14, 14)
    heatmap[0, 0] = 1e6
    assert colour_limits(heatmap) == (1, 192)
    assert colorbar_labels(heatmap)[1].endswith("or more")


def test_on_few_patches_the_scale_ends_at_the_hottest():
    heatmap = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    assert colour_limits(heatmap) == (1, 4)
    assert colorbar_labels(heatmap) == ("10.0 %", "40.0 %\nof the sum")


def test_tiles_keep_rows_and_columns():
    maps = np.linspace(0, 1, 6).reshape(2, 3, 1, 1).repeat(2, axis=2).repeat(2, axis=3)
    page = tile_maps(maps, MAGNITUDE, 0.1)
    height, width = page.shape[0] / 2, page.shape[1] / 3
    for row in range(2):
        for column in range(3):
            place = page[int((row + 0.5) * height), int((column + 0.5) * width)]
            wanted = colormaps[MAGNITUDE](maps[row, column, 0, 0], bytes=True)[:3]
            assert tuple(place) == tuple(wanted)
