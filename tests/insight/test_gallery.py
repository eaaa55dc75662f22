"""What a model learned, as pictures."""

import numpy as np
import pytest

from tests.insight.samples import KINDS, pictures, small
from vitrail.insight.draw import png
from vitrail.insight.gallery import NEED_IMAGES, gallery

ALL = [
    "positions",
    "filters",
    "attention_distance",
    "attention_entropy",
    "token_norms",
    "feature_colours",
]


def drawn(kind, images=3):
    model, said = small(kind), []
    x = pictures(model, images) if images else None
    pixels = [np.zeros((*model.config.size, model.config.channels), np.uint8)] * images
    return list(gallery(model, x, pixels, said.append)), said


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_has_its_pictures(kind):
    found, said = drawn(kind)
    lacking = ["positions"] if kind == "no positions" else []
    assert [one.name for one in found] == [name for name in ALL if name not in lacking]
    assert len(said) == len(lacking)


def test_pictures_are_pictures():
    found, _ = drawn("plain")
    assert all(png(one.figure, 20).startswith(b"\x89PNG") for one in found)
    assert all(np.isfinite(one.array).all() for one in found)


def test_without_images_positions_and_filters_remain():
    found, said = drawn("plain", images=0)
    assert [one.name for one in found] == ["positions", "filters"]
    assert said == [NEED_IMAGES]


def test_a_model_without_positions_says_so():
    _, said = drawn("no positions")
    assert said[0].startswith("this model has no positions")
