"""The kinds of heads: fitting, cross-validation and few-shot accuracy."""

import builtins
from dataclasses import replace

import numpy as np
import pytest

from tests.heads.samples import rows
from vitrail.errors import UserError
from vitrail.heads import fit
from vitrail.heads.features import Examples
from vitrail.heads.few_shot import evaluate_few_shot
from vitrail.heads.fit import fit_kind
from vitrail.heads.head import score_all_classes
from vitrail.heads.kinds import KINDS, find_kind, require_sklearn

NAMES = ["a", "b", "c"]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_learns(name):
    fitted = fit_kind(name, *rows(120), NAMES)
    x, y = rows(60, seed=1)
    predicted = score_all_classes(fitted.estimator, x, 3).argmax(axis=1)
    assert (predicted == y).mean() > 0.85


def test_parameters_are_chosen_among_the_grid_by_cross_validation():
    fitted = fit_kind("logistic", *rows(120), NAMES)
    assert fitted.parameters["C"] in KINDS["logistic"].grid["logisticregression__C"]
    assert 0.8 < fitted.cross_validation <= 1


def test_neighbours_are_chosen_by_leave_one_out():
    x, y = rows(30)
    _, score = fit.choose_neighbours(x, np.random.default_rng(0).permutation(y), 3)
    assert score < 0.8  # an image that voted for itself would be correct with k = 1


def test_an_unknown_kind_is_an_error_that_names_the_nearest():
    with pytest.raises(
        UserError, match=r"unknown head 'random_forrest'; the nearest is random-forest"
    ):
        find_kind("random_forrest")


@pytest.mark.parametrize("name", KINDS)
def test_a_class_with_one_image_is_fitted_or_an_error(name):
    x, y = rows(120)
    kept = (y != 2) | (np.arange(120) == 2)
    if KINDS[name].grid:
        message = "class 'c' has 1 training image, fewer than the 3 folds"
        with pytest.raises(UserError, match=message):
            fit_kind(name, x[kept], y[kept], NAMES)
    else:
        assert list(fit_kind(name, x[kept], y[kept], NAMES).estimator.classes_) == [0, 1, 2]


def test_cross_validation_samples_every_class():
    y = np.repeat([0, 1, 2], [9000, 900, 4])
    chosen = fit.stratified_sample(y, 500)
    assert len(chosen) < 520
    assert np.bincount(y[chosen]).min() == fit.FOLDS


def test_a_kind_fitted_on_a_sample_reports_its_size(monkeypatch):
    few = replace(KINDS["rbf-svm"], max_images=60)
    monkeypatch.setitem(KINDS, "rbf-svm", few)
    assert fit_kind("rbf-svm", *rows(120), NAMES).parameters["images"] == 60
    assert "images" not in fit_kind("rbf-svm", *rows(60), NAMES).parameters


def test_a_missing_package_is_named(monkeypatch):
    importing = builtins.__import__

    def without(name, *rest):
        if name == "skops":
            raise ImportError("no", name="skops")
        return importing(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"need skops.*pip install 'vitrail\[heads\]'"):
        require_sklearn()


def examples(count, seed=0, distance=3.0):
    x, y = rows(count, seed=seed, distance=distance)
    return Examples(x=x, y=y, items=np.arange(count))


def test_more_shots_are_better_and_draws_differ():
    train, test = examples(120, distance=0.7), examples(60, seed=1, distance=0.7)
    few, many = (evaluate_few_shot("nearest-mean", train, test, n, NAMES) for n in (2, 30))
    assert few.mean < many.mean and few.std > 0 and few.draws == 5


def test_few_shot_accuracy_is_reproducible():
    train, test = examples(120), examples(60, seed=1)
    assert evaluate_few_shot("logistic", train, test, 3, NAMES) == evaluate_few_shot(
        "logistic", train, test, 3, NAMES
    )


def test_a_kind_that_needs_more_shots_has_no_accuracy():
    assert evaluate_few_shot("lda", examples(30), examples(30), 1, NAMES).mean is None


def test_fewer_images_than_shots_are_an_error():
    with pytest.raises(UserError, match="class 'a' has 10 training images, fewer than 11 shots"):
        evaluate_few_shot("logistic", examples(30), examples(30), 11, NAMES)
