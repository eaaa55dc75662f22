"""Test-time views: mirrored and shifted images, their mean logits, their own temperature."""

import json
import logging

import numpy as np
import pytest

import vitrail
from tests.cli.conftest import call, folder
from vitrail.data.image import load_image
from vitrail.errors import UserError
from vitrail.evaluation.conformal import in_sets
from vitrail.inference.evaluate import compute_validation_logits
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


def test_promises_are_calibrated_again_for_the_views(folder):
    single = vitrail.load(folder)
    several = single.with_views(4)
    calibration = several.predictor.calibration
    assert calibration.images == single.predictor.calibration.images
    assert calibration.sets != single.predictor.calibration.sets
    assert calibration.neighbours is None
    logits, labels = compute_validation_logits(several.predictor)
    promise = several.predictor.promise(coverage=0.9)
    probabilities = several.predictor.softmax(logits.numpy(), raw=False)
    covered = in_sets(probabilities, promise.sets)[range(len(labels)), labels.numpy()]
    assert covered.mean() >= 0.9
    found = several.evaluate("digits", coverage=0.9, abstain=0.5)
    assert found.views == 4 and found.trust.sets.promised == 0.9
    assert found.temperature == several.temperature and found.trust.odd is None
    assert "4 views of each" in repr(found) and "4 views of each" in found._repr_html_()


def test_views_are_calibrated_without_the_validation_images_that_are_broken(
    folder, monkeypatch, caplog
):
    classifier, known = vitrail.load(folder), []

    def break_one(content, *rest, **how):
        known.append(content)
        if np.array_equal(content, known[0]):
            raise UserError("broken")
        return load_image(content, *rest, **how)

    monkeypatch.setattr("vitrail.data.reading.reader.load_image", break_one)
    several = classifier.with_views(2)
    assert several.predictor.calibration.images == classifier.predictor.calibration.images - 1
    assert "skipped 1 of 1797 images" in caplog.text and "not calibrated" not in caplog.text


def test_promises_of_views_reach_the_command_line(capsys, folder):
    flags = ("--views", "2", "--coverage", "0.9", "--json")
    code, out, _ = call(capsys, "evaluate", folder, "digits", *flags)
    document = json.loads(out)
    assert code == 0 and document["views"] == 2 and document["trust"]["sets"]["promised"] == 0.9
    single = vitrail.load(folder).evaluate("digits", coverage=0.9)
    assert document.keys() == single.to_dict().keys()


def test_single_and_batch_predictions_with_views_are_equal(folder):
    several = vitrail.load(folder).with_views(4)
    images = list(np.random.default_rng(0).integers(0, 256, (5, 8, 8), np.uint8))
    together = several.predict(images, coverage=0.9)
    for image, one in zip(images, together, strict=True):
        alone = several.predict(image, coverage=0.9)
        assert (alone.label, alone.set) == (one.label, one.set)
        assert alone.probability == pytest.approx(one.probability, abs=1e-5)


def test_views_are_of_the_image_and_not_of_views(folder):
    single = vitrail.load(folder)
    several = single.with_views(2)
    assert several.with_views(1).predictor is single.predictor
    assert several.with_views(4).predictor.single is single.predictor
    image = np.zeros((8, 8), np.uint8)
    np.testing.assert_array_equal(several.features(image), single.features(image))


def test_promises_of_views_without_validation_images_are_refused(folder):
    classifier = vitrail.load(folder)
    gone = type(classifier.metadata.data)(source="/does/not/exist")
    object.__setattr__(classifier.predictor, "training_data", gone)
    several = classifier.with_views(2)
    several.predict(np.zeros((8, 8), np.uint8))
    for promise in ("coverage", "abstain"):
        with pytest.raises(UserError, match=f"`{promise}` with `views` needs the validation .*;"):
            several.predict(np.zeros((8, 8), np.uint8), **{promise: 0.1})


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("evaluate", "digits", "--foreign", "digits"), "omit --views or --foreign"),
        (("predict", "a.png", "--data", "digits"), "omit --views or --data"),
    ],
)
def test_what_views_cannot_do_is_one_line(capsys, folder, arguments, wanted):
    verb, *others = arguments
    code, _, _ = call(capsys, verb, folder, *others, "--views", "2")
    assert code.startswith("error: ") and code.endswith(wanted) and "\n" not in code


@pytest.mark.parametrize("views", [0, 11, -1])
def test_an_impossible_number_of_views_is_rejected(capsys, folder, views):
    code, _, _ = call(capsys, "evaluate", folder, "digits", "--views", str(views))
    assert code == f"error: --views is {views}; give a whole number from 1 to 10"
