"""What `classifier.explain` returns."""

import html
import io
import re
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from PIL import Image

from tests.insight.examples import NAMES, example
from tests.insight.samples import KINDS, pictures, small
from vitrail.errors import UserError
from vitrail.insight.explain import explain
from vitrail.insight.explanation import best_method, explain_image
from vitrail.insight.methods import CLASS_AGNOSTIC, FAST, METHODS


class Score:
    def __init__(self, score):
        self.score = torch.tensor([score])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_explained(kind):
    one = example(kind)
    assert set(one.heatmaps) == set(FAST)
    assert all(heat.shape == one.grid and heat.min() >= 0 for heat in one.heatmaps.values())
    assert np.allclose(one.attention.sum(axis=-1), 1, atol=1e-5)
    assert one.attention_maps(2).shape == (3, *one.grid)


def test_best_is_the_most_faithful():
    results = {"rollout": Score(0.4), "relevance": Score(0.3), "gradient-rollout": Score(0.1)}
    assert best_method(results, target_given=False) == "rollout"


def test_a_given_class_is_explained_by_a_class_specific_method():
    results = {"rollout": Score(0.4), "relevance": Score(0.3), "gradient-rollout": Score(0.1)}
    assert best_method(results, target_given=True) == "relevance"
    assert example(target=3).method not in CLASS_AGNOSTIC


def test_the_heatmap_is_that_of_the_given_class():
    model = small().eval()
    x = pictures(model, 1)
    pixels = np.zeros((16, 16, 3), np.uint8)
    one = explain_image(model, x, pixels, NAMES, target=4, method="relevance")
    assert np.allclose(one.heatmap, explain(model, x, "relevance", target=4)[0].numpy())
    assert one.target == "coho"
    assert one.probability == pytest.approx(model(x).softmax(dim=1)[0, 4].item())


def test_probabilities_are_those_of_evaluation():
    model = small()  # in training mode, with dropout
    x = pictures(model, 1)
    one = explain_image(model, x, np.zeros((16, 16, 3), np.uint8), NAMES)
    assert one.top[0][1] == pytest.approx(model.eval()(x).softmax(dim=1).max().item())


def test_a_temperature_calibrates_the_shown_probabilities():
    model = small().eval()
    x, pixels = pictures(model, 1), np.zeros((16, 16, 3), np.uint8)
    one = explain_image(model, x, pixels, NAMES, temperature=2.5)
    softmax = (model(x)[0] / 2.5).softmax(dim=0)
    assert one.probability == one.top[0][1] == pytest.approx(softmax.max().item())


def test_the_repr_names_image_class_and_method():
    one = example(name="fish.jpg", target=3, method="relevance")
    assert repr(one).startswith("Explanation('fish.jpg', target='barracouta', probability=0.")
    assert "method='relevance', score=" in repr(one) and "grid=(4, 4)" in repr(one)


def test_an_explanation_is_frozen():
    with pytest.raises(FrozenInstanceError):
        example().method = "rollout"


def test_occlusion_runs_only_on_request():
    assert "occlusion" not in example().heatmaps
    assert example(method="occlusion").method == "occlusion"
    assert set(example(occlusion=True).heatmaps) == set(METHODS)


def test_scores_are_sorted_best_first():
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


def test_saved_arrays_are_the_arrays(tmp_path):
    one = example()
    one.save(tmp_path / "why.npz")
    with np.load(tmp_path / "why.npz", allow_pickle=False) as read:
        assert np.array_equal(read["heatmap relevance"], one.heatmaps["relevance"])
        assert np.array_equal(read["attention"], one.attention)
        assert read["labels"].tolist() == [label for label, _ in one.top]


def test_a_notebook_shows_the_page_in_a_sandboxed_frame():
    one = example()
    shown = one._repr_html_()
    assert shown.startswith('<iframe sandbox="allow-scripts"')
    inside = html.unescape(re.search(r'srcdoc="([^"]*)"', shown)[1])
    assert inside.startswith("<!doctype html>") and "script-src 'sha256-" in inside
    assert Image.open(io.BytesIO(one._repr_png_())).format == "PNG"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "magic"}, "method 'magic' is unknown; choose one of best, relevance"),
        ({"layers": [3]}, "no such layers: .3.; give indices from 0 to 2"),
        ({"heads": [-4]}, "no such heads"),
        ({"target": 5}, "no such class: 5"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(UserError, match=message):
        example(**settings)


def test_an_unknown_suffix_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"why\.gif has an unknown suffix; name it \.png"):
        example().save(tmp_path / "why.gif")


def test_nan_in_the_weights_is_named():
    model = small()
    model.blocks[0].attn.proj.weight.data[0, 0] = float("nan")
    with pytest.raises(
        UserError, match=r"contain NaN or infinity in blocks\.0\.attn\.proj\.weight"
    ):
        explain_image(model, pictures(model, 1), np.zeros((16, 16, 3), np.uint8), NAMES)


def test_an_image_of_one_patch_is_rejected():
    model = small(image=4)
    with pytest.raises(UserError, match="the whole image is one patch"):
        explain_image(model, pictures(model, 1), np.zeros((4, 4, 3), np.uint8), NAMES)
