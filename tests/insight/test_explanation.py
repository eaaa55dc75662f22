"""What `classifier.explain` returns."""

import html
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from tests.insight.explained import NAMES, example
from tests.insight.samples import KINDS, pictures, small
from vitrail.errors import UserError
from vitrail.insight.explain import CLASSLESS, METHODS, explain
from vitrail.insight.explanation import QUICK, best, explained


class Score:
    def __init__(self, score):
        self.score = torch.tensor([score])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_explained(kind):
    one = example(kind)
    assert set(one.heats) == set(QUICK)
    assert all(heat.shape == one.grid and heat.min() >= 0 for heat in one.heats.values())
    assert np.allclose(one.attention.sum(axis=-1), 1, atol=1e-5)
    assert one.maps(2).shape == (3, *one.grid)


def test_best_is_the_most_faithful():
    judged = {"rollout": Score(0.4), "relevance": Score(0.3), "gradient-rollout": Score(0.1)}
    assert best(judged, asked=False) == "rollout"


def test_a_class_that_is_asked_for_gets_a_method_that_tells_classes_apart():
    judged = {"rollout": Score(0.4), "relevance": Score(0.3), "gradient-rollout": Score(0.1)}
    assert best(judged, asked=True) == "relevance"
    assert example(target=3).method not in CLASSLESS


def test_heat_is_that_of_the_class_asked_for():
    model = small().eval()
    x = pictures(model, 1)
    pixels = np.zeros((16, 16, 3), np.uint8)
    one = explained(model, x, pixels, NAMES, target=4, method="relevance")
    assert np.allclose(one.heat, explain(model, x, "relevance", target=4)[0].numpy())
    assert one.target == "coho"
    assert one.probability == pytest.approx(model(x).softmax(dim=1)[0, 4].item())


def test_probabilities_are_those_of_evaluation():
    model = small()  # in training mode, with dropout
    x = pictures(model, 1)
    one = explained(model, x, np.zeros((16, 16, 3), np.uint8), NAMES)
    assert one.top[0][1] == pytest.approx(model.eval()(x).softmax(dim=1).max().item())


def test_occlusion_is_there_only_when_it_is_asked_for():
    assert "occlusion" not in example().heats
    assert example(method="occlusion").method == "occlusion"
    assert set(example(occlusion=True).heats) == set(METHODS)


def test_scores_come_with_the_best_first():
    scores = list(example().scores.values())
    assert scores == sorted(scores, reverse=True)


def test_saving_follows_the_suffix(tmp_path):
    one = example()
    for name in ("why.png", "why.html", "why.npz"):
        one.save(tmp_path / name)
    with Image.open(tmp_path / "why.png") as picture:
        assert picture.width == 2200
    assert (tmp_path / "why.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["why.html", "why.npz", "why.png"]


def test_arrays_come_back_as_they_were(tmp_path):
    one = example()
    one.save(tmp_path / "why.npz")
    with np.load(tmp_path / "why.npz", allow_pickle=False) as read:
        assert np.array_equal(read["heat relevance"], one.heats["relevance"])
        assert np.array_equal(read["attention"], one.attention)
        assert read["labels"].tolist() == [label for label, _ in one.top]


def test_a_notebook_shows_the_page_in_a_frame_that_can_touch_nothing():
    one = example()
    shown = one._repr_html_()
    assert shown.startswith('<iframe sandbox="allow-scripts"')
    inside = html.unescape(re.search(r'srcdoc="([^"]*)"', shown)[1])
    assert inside.startswith("<!doctype html>") and "script-src 'sha256-" in inside
    assert Image.open(io.BytesIO(one._repr_png_())).format == "PNG"


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"method": "magic"}, "there is no method 'magic'; choose best, relevance"),
        ({"layers": [3]}, "no such layers: .3.; give numbers from 0 to 2"),
        ({"heads": [-4]}, "no such heads"),
        ({"target": 5}, "no such class: 5"),
    ],
)
def test_wrong_wishes_are_told(wishes, words):
    with pytest.raises(UserError, match=words):
        example(**wishes)


def test_an_unknown_form_is_told(tmp_path):
    with pytest.raises(UserError, match=r"why\.gif has no known form; name it \.png"):
        example().save(tmp_path / "why.gif")


def test_nan_in_the_weights_is_told():
    model = small()
    model.blocks[0].attn.proj.weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"hold NaN or infinity in blocks\.0\.attn\.proj\.weight"):
        explained(model, pictures(model, 1), np.zeros((16, 16, 3), np.uint8), NAMES)


def test_one_patch_only_is_told():
    model = small(image=4)
    with pytest.raises(UserError, match="the whole image is one patch"):
        explained(model, pictures(model, 1), np.zeros((4, 4, 3), np.uint8), NAMES)
