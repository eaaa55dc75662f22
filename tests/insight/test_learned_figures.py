"""Figures of what a model has learned."""

import numpy as np
from matplotlib import colormaps

from vitrail.insight.canvas import MAGNITUDE
from vitrail.insight.learned_figures import (
    draw_attention_distance,
    draw_attention_entropy,
    draw_filters,
    draw_positions,
    draw_token_norms,
)


def flat(size=32, channels=3):
    return np.full((size, size, channels), 128, np.uint8)


def test_a_large_grid_shows_some_of_its_positions():
    figure = draw_positions(np.random.default_rng(0).uniform(-1, 1, (20, 16, 20, 16)), "learned")
    subtitle = "Cosine similarity of each of 16 x 20 positions with all positions (14 x 14 shown)"
    assert subtitle in [text.get_text() for text in figure.texts]


def test_grey_filters_are_grey():
    figure = draw_filters(np.random.default_rng(0).normal(size=(4, 1, 2, 2)))
    shown = [axes.images[0].get_array() for axes in figure.axes]
    assert len(shown) == 4 and all((one[..., 0] == one[..., 2]).all() for one in shown)


def test_every_head_is_a_point():
    distance = np.arange(24, dtype=float).reshape(4, 6)
    points = draw_attention_distance(distance, (32, 48)).axes[0].collections[0].get_offsets()
    assert sorted(map(tuple, points)) == [(i // 6, float(i)) for i in range(24)]


def test_dead_heads_are_circled():
    entropy, dead = np.ones((4, 6)), np.zeros((4, 6), bool)
    dead[1, 2] = dead[3, 5] = True
    axes = draw_attention_entropy(entropy, 17, dead).axes[0]
    assert axes.collections[-1].get_offsets().tolist() == [[1, 1], [3, 1]]
    assert len(draw_attention_entropy(entropy, 17, ~dead & dead).axes[0].collections) == 1


def test_the_token_with_the_largest_norm_is_the_brightest():
    lengths = np.ones((2, 4, 4))
    lengths[1, 2, 3] = 500
    figure = draw_token_norms([flat()] * 2, [lengths], [0])
    maps = [np.asarray(axes.images[0].get_array()) for axes in figure.axes][2:]
    yellow = tuple(colormaps[MAGNITUDE](1.0, bytes=True)[:3])
    assert tuple(maps[1][2, 3]) == yellow and not (maps[0] == yellow).all(axis=2).any()
