"""Test-time views: mirrored and shifted images, their mean logits, their own temperature."""

import json
import logging

import numpy as np
import pytest

import vitrail
from tests.cli.conftest import call, folder
from vitrail.inference.views import make_view

__all__ = ["folder"]


def test_views_are_the_image_its_mirror_image_and_shifts():
    x = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    assert np.array_equal(make_view(x, 0), x)
    assert np.array_equal(make_view(x, 1), x[..., ::-1])
    shifted = make_view(x, 2)  # one row up and one column left; the border is repeated
    assert np.array_equal(shifted[:, :, :-1, :-1], x[:, :, 1:, 1:])
    assert np.array_equal(shifted[:, :, -1, :-1], x[:, :, -1, 1:])
    assert np.array_equal(make_view(x, 3), shifted[..., ::-1])


def test_logits_are_the_mean_over_the_views(folder):
    single = vitrail.load(folder)
    several = single.with_views(4)
    x = np.random.default_rng(0).normal(size=(3, 1, 8, 8)).astype(np.float32)
    mean = np.mean([single.predictor.logits(make_view(x, n)) for n in range(4)], axis=0)
    np.testing.assert_allclose(several.predictor.logits(x), mean, atol=1e-5)
    assert several.temperature not in (None, single.temperature)
    assert single.with_views(1).predictor is single.predictor


def test_mirrored_digits_lower_the_accuracy_and_the_user_is_warned(capsys, folder, caplog):
    with caplog.at_level(logging.WARNING):
        code, out, _ = call(capsys, "evaluate", folder, "digits", "--views", "2", "--json")
    assert code == 0 and json.loads(out)["views"] == 2
    assert "2 views lower the accuracy on validation images" in caplog.text


def test_without_its_training_data_views_are_not_calibrated(folder, caplog):
    classifier = vitrail.load(folder)
    gone = type(classifier.metadata.data)(source="/does/not/exist")
    object.__setattr__(classifier.predictor, "training_data", gone)
    with caplog.at_level(logging.WARNING):
        assert classifier.with_views(2).temperature is None
    assert "the probabilities of 2 views are not calibrated: " in caplog.text


@pytest.mark.parametrize("views", [0, 11, -1])
def test_an_impossible_number_of_views_is_rejected(capsys, folder, views):
    code, _, _ = call(capsys, "evaluate", folder, "digits", "--views", str(views))
    assert code == f"error: --views is {views}; give a whole number from 1 to 10"
