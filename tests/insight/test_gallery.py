"""The figures of what a model has learned."""

import numpy as np
import pytest

from tests.insight.samples import KINDS, pictures, small
from vitrail.insight.canvas import render_png
from vitrail.insight.gallery import NEED_IMAGES, draw_gallery

ALL = [
    "positions",
    "filters",
    "attention_distance",
    "attention_entropy",
    "token_norms",
    "feature_pca",
]


def draw(kind, images=3):
    model, messages = small(kind), []
    x = pictures(model, images) if images else None
    pixels = [np.zeros((*model.config.size, model.config.channels), np.uint8)] * images
    return list(draw_gallery(model, x, pixels, messages.append)), messages


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_has_its_figures(kind):
    found, messages = draw(kind)
    lacking = ["positions"] if kind == "no positions" else []
    assert [one.name for one in found] == [name for name in ALL if name not in lacking]
    assert len(messages) == len(lacking)


def test_figures_render_and_arrays_are_finite():
    found, _ = draw("plain")
    assert all(render_png(one.figure, 20).startswith(b"\x89PNG") for one in found)
    assert all(np.isfinite(one.array).all() for one in found)


def test_without_images_positions_and_filters_remain():
    found, messages = draw("plain", images=0)
    assert [one.name for one in found] == ["positions", "filters"]
    assert messages == [NEED_IMAGES]


def test_a_model_without_positions_is_reported():
    _, messages = draw("no positions")
    assert messages[0].startswith('this model has positions "none"')


@pytest.mark.parametrize(
    ("kind", "title"),
    [
        ("plain", "Position embeddings (learned)"),
        ("sincos", "Position embeddings (fixed sine-cosine)"),
        ("rotary", "Position embeddings (rotary)"),
    ],
)
def test_the_positions_figure_names_the_kind_of_positions(kind, title):
    found, _ = draw(kind, images=0)
    assert found[0].figure.texts[0].get_text() == title
