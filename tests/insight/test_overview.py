"""Figures of one explanation: what they show and how they are labelled."""

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from tests.insight.examples import NAMES, example, with_hot_patch
from vitrail.display.text import format_percent
from vitrail.insight.canvas import render_png
from vitrail.insight.overview import draw_heads, draw_overlay, draw_overview


def texts(figure):
    found = [text.get_text() for text in figure.texts]
    return found + [text.get_text() for axes in figure.axes for text in axes.texts]


def test_the_overview_names_class_methods_layers_and_heads():
    one = example()
    shown = texts(draw_overview(one))
    label, probability = one.top[0]
    assert f"{label}, {format_percent(probability)}" in shown
    assert {f"{method}  {score:.2f}" for method, score in one.scores.items()} <= set(shown)
    assert {f"layer {n}" for n in range(3)} | {f"head {n}" for n in range(3)} <= set(shown)
    assert "Attention of [CLS]" in shown


def test_the_overview_names_the_given_class():
    last = NAMES.index(example().top[-1][0])
    one = example(target=last)
    subtitle = f"Explained class: {one.target}, {format_percent(one.probability)}   image"
    assert subtitle in texts(draw_overview(one))


def test_only_chosen_layers_and_heads_are_drawn():
    shown = texts(draw_overview(example(layers=[-1], heads=[0, 2])))
    drawn = {text for text in shown if text.startswith(("layer", "head"))}
    assert drawn == {"layer 2", "head 0", "head 2"}


def test_figures_are_sharp_at_twice_their_size():
    width, _ = Image.open(io.BytesIO(render_png(draw_overview(example())))).size
    assert width == 2 * 1100


@pytest.mark.parametrize("kind", ["plain", "grey", "wide", "avg", "map"])
def test_every_shape_of_image_can_be_drawn(kind):
    one = example(kind)
    for figure in (draw_overview(one), draw_overlay(one, "rollout"), draw_heads(one, [1])):
        render_png(figure, 20)


def test_a_heatmap_of_zeros_can_be_drawn():
    one = with_hot_patch(example(), 0, 0)
    nothing = replace(one, heatmaps={method: np.zeros_like(one.heatmap) for method in one.heatmaps})
    render_png(draw_overview(nothing), 20)


@pytest.mark.parametrize("name", ["$\\frac{$", "a\nb\x1b[31m", "x" * 300, "\u202egnp", "日本"])
def test_no_name_breaks_a_figure(name):
    one = example(names=(name, "b", "c", "d", "e"), target=0, name=name)
    render_png(draw_overview(one), 20)
    assert all(len(text) < 150 and "\x1b" not in text for text in texts(draw_overview(one)))
