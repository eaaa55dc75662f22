"""Pictures: what stands where, what the words say, colours that everybody can read."""

import ast
import inspect
import io
from dataclasses import replace

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image

from tests.insight.explained import NAMES, bright, example
from vitrail.insight import draw


def words(figure):
    found = [text.get_text() for text in figure.texts]
    return found + [text.get_text() for axes in figure.axes for text in axes.texts]


def flat(size=32, channels=3):
    return np.full((size, size, channels), 128, np.uint8)


def test_the_overview_names_class_methods_layers_and_heads():
    one = example()
    said = words(draw.overview(one))
    label, probability = one.top[0]
    assert f"{label}, {100 * probability:.1f} %" in said
    assert {f"{method}  {score:.2f}" for method, score in one.scores.items()} <= set(said)
    assert {f"layer {n}" for n in range(3)} | {f"head {n}" for n in range(3)} <= set(said)
    assert "Where [CLS] looks" in said


def test_the_overview_asks_why_not():
    last = NAMES.index(example().top[-1][0])
    one = example(target=last)
    question = f"Why not {one.target}, {100 * one.probability:.1f} %?   image"
    assert question in words(draw.overview(one))


def test_only_chosen_layers_and_heads_are_drawn():
    said = words(draw.overview(example(layers=[-1], heads=[0, 2])))
    drawn = {text for text in said if text.startswith(("layer", "head"))}
    assert drawn == {"layer 2", "head 0", "head 2"}


def test_pictures_are_sharp_at_twice_their_size():
    width, _ = Image.open(io.BytesIO(draw.png(draw.overview(example())))).size
    assert width == 2 * 1100


@pytest.mark.parametrize("kind", ["plain", "grey", "wide", "avg", "map"])
def test_every_shape_of_image_can_be_drawn(kind):
    one = example(kind)
    for figure in (draw.overview(one), draw.overlay(one, "rollout"), draw.heads(one, [1])):
        draw.png(figure, 20)


def test_two_channels_are_shown_by_the_first():
    pixels = np.stack([np.full((4, 4), 7), np.full((4, 4), 200)], axis=2).astype(np.uint8)
    assert (draw.colour(pixels) == 7).all()


def test_the_overlay_is_hot_where_the_heat_is():
    heat = np.zeros((4, 4), np.float32)
    heat[1, 2] = 1
    image = draw.overlaid(flat(), heat)
    side = image.shape[0] // 4
    hot = image[side : 2 * side, 2 * side : 3 * side]
    assert (hot == hot[0, 0]).all()  # hard edges: all of the patch, and nothing else
    cold = image.copy()
    cold[side : 2 * side, 2 * side : 3 * side] = image[0, 0]
    assert (cold == image[0, 0]).all() and hot[0, 0].sum() > 2 * image[0, 0].sum()


def test_a_fine_grid_is_smoothed_around_the_hottest_patch():
    heat = np.zeros((14, 14), np.float32)
    heat[4, 9] = 1
    image = draw.overlaid(flat(224), heat).astype(int)
    place = np.unravel_index(image[:, :, 1].argmax(), image.shape[:2])
    side = image.shape[0] / 14
    assert [int(p // side) for p in place] == [4, 9]
    assert len(np.unique(image[:, :, 1])) > 20


def test_one_patch_far_above_the_rest_does_not_darken_them():
    heat = np.arange(196, dtype=np.float32).reshape(14, 14)
    heat[0, 0] = 1e6
    assert draw.ends(heat) == (1, 192)
    assert draw.shares(heat)[1].endswith("or more")


def test_on_few_patches_the_scale_ends_at_the_hottest():
    heat = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    assert draw.ends(heat) == (1, 4)
    assert draw.shares(heat) == ("10.0 %", "40.0 %\nof all")


def test_a_heat_of_nothing_can_be_drawn():
    one = bright(example(), 0, 0)
    nothing = replace(one, heats={method: np.zeros_like(one.heat) for method in one.heats})
    draw.png(draw.overview(nothing), 20)


def test_every_map_stands_in_its_place():
    maps = np.linspace(0, 1, 6).reshape(2, 3, 1, 1).repeat(2, axis=2).repeat(2, axis=3)
    page = draw.montage(maps, draw.LOOK, 0.1)
    height, width = page.shape[0] / 2, page.shape[1] / 3
    for row in range(2):
        for column in range(3):
            place = page[int((row + 0.5) * height), int((column + 0.5) * width)]
            wanted = colormaps[draw.LOOK](maps[row, column, 0, 0], bytes=True)[:3]
            assert tuple(place) == tuple(wanted)


def lightness(colours):
    """CIE L* of the 256 colours."""
    rgb = colormaps[colours](np.arange(256))[:, :3]
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    y = linear @ [0.2126, 0.7152, 0.0722]
    return np.where(y > 0.008856, 116 * np.cbrt(y) - 16, 903.3 * y)


@pytest.mark.parametrize("colours", [draw.HEAT, draw.LOOK, draw.ALIKE])
def test_more_is_always_lighter(colours):
    assert (np.diff(lightness(colours)) > 0).all()


def test_jet_would_be_seen():
    assert not (np.diff(lightness("jet")) > 0).all()


@pytest.mark.parametrize("name", ["$\\frac{$", "a\nb\x1b[31m", "x" * 300, "\u202egnp", "日本"])
def test_no_name_breaks_a_picture(name):
    one = example(names=(name, "b", "c", "d", "e"), target=0, name=name)
    draw.png(draw.overview(one), 20)
    assert all(len(text) < 150 and "\x1b" not in text for text in words(draw.overview(one)))


def test_nothing_is_drawn_by_pyplot():
    tree = ast.parse(inspect.getsource(draw))
    names = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if "pyplot" in name]


def test_positions_of_a_large_grid_are_compared_by_some_of_them():
    figure = draw.positions(np.random.default_rng(0).uniform(-1, 1, (20, 16, 20, 16)))
    assert "16 x 20 positions; each map compares one of them with all (14 x 14 shown)" in words(
        figure
    )


def test_grey_filters_are_grey():
    figure = draw.filters(np.random.default_rng(0).normal(size=(4, 1, 2, 2)))
    shown = [axes.images[0].get_array() for axes in figure.axes]
    assert len(shown) == 4 and all((one[..., 0] == one[..., 2]).all() for one in shown)


def test_every_head_is_a_point():
    distance = np.arange(24, dtype=float).reshape(4, 6)
    points = draw.distances(distance, (32, 48)).axes[0].collections[0].get_offsets()
    assert sorted(map(tuple, points)) == [(i // 6, float(i)) for i in range(24)]


def test_dead_heads_are_circled():
    entropy, dead = np.ones((4, 6)), np.zeros((4, 6), bool)
    dead[1, 2] = dead[3, 5] = True
    axes = draw.entropies(entropy, 17, dead).axes[0]
    assert axes.collections[-1].get_offsets().tolist() == [[1, 1], [3, 1]]
    assert len(draw.entropies(entropy, 17, ~dead & dead).axes[0].collections) == 1


def test_the_longest_token_is_the_brightest():
    lengths = np.ones((2, 4, 4))
    lengths[1, 2, 3] = 500
    figure = draw.norms([flat()] * 2, [lengths], [0])
    maps = [np.asarray(axes.images[0].get_array()) for axes in figure.axes][2:]
    yellow = tuple(colormaps[draw.LOOK](1.0, bytes=True)[:3])
    assert tuple(maps[1][2, 3]) == yellow and not (maps[0] == yellow).all(axis=2).any()
