"""The kinds of heads: each learns, chooses on training images, and says what it needs."""

import builtins
from dataclasses import replace

import numpy as np
import pytest

from tests.heads.samples import rows
from vitrail.errors import UserError
from vitrail.heads import kinds
from vitrail.heads.features import Examples
from vitrail.heads.head import raw, spread
from vitrail.heads.shots import judge

NAMES = ["a", "b", "c"]


@pytest.mark.parametrize("name", kinds.KINDS)
def test_every_kind_learns(name):
    fitted = kinds.fit(name, *rows(120), NAMES)
    x, y = rows(60, seed=1)
    said = spread(fitted.estimator, raw(fitted.estimator, x), 3).argmax(axis=1)
    assert (said == y).mean() > 0.85


def test_parameters_are_chosen_among_the_grid_by_cross_validation():
    fitted = kinds.fit("logistic", *rows(120), NAMES)
    assert fitted.parameters["C"] in kinds.KINDS["logistic"].grid["logisticregression__C"]
    assert 0.8 < fitted.cross_validation <= 1


def test_neighbours_are_chosen_by_leaving_one_out():
    x, y = rows(30)
    _, score = kinds.best_neighbours(x, np.random.default_rng(0).permutation(y), 3)
    assert score < 0.8  # an image that had a vote on itself would be right with k = 1


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(UserError, match=r"no head 'random_forrest'; the nearest is random-forest"):
        kinds.find("random_forrest")


@pytest.mark.parametrize("name", kinds.KINDS)
def test_a_class_with_one_image_is_told_or_learned(name):
    x, y = rows(120)
    kept = (y != 2) | (np.arange(120) == 2)
    if kinds.KINDS[name].grid:
        told = "class 'c' has 1 training image, fewer than the 3 folds"
        with pytest.raises(UserError, match=told):
            kinds.fit(name, x[kept], y[kept], NAMES)
    else:
        assert list(kinds.fit(name, x[kept], y[kept], NAMES).estimator.classes_) == [0, 1, 2]


def test_parameters_of_many_images_are_chosen_on_some_of_all_classes():
    y = np.repeat([0, 1, 2], [9000, 900, 4])
    chosen = kinds.sample(y, 500)
    assert len(chosen) < 520
    assert np.bincount(y[chosen]).min() == kinds.FOLDS


def test_a_kind_that_learns_from_part_of_the_images_says_so(monkeypatch):
    few = replace(kinds.KINDS["rbf-svm"], most=60)
    monkeypatch.setitem(kinds.KINDS, "rbf-svm", few)
    assert kinds.fit("rbf-svm", *rows(120), NAMES).parameters["images"] == 60
    assert "images" not in kinds.fit("rbf-svm", *rows(60), NAMES).parameters


def test_what_is_not_installed_is_named(monkeypatch):
    importing = builtins.__import__

    def without(name, *rest):
        if name == "skops":
            raise ImportError("no", name="skops")
        return importing(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"need skops.*pip install 'vitrail\[heads\]'"):
        kinds.needed()


def examples(count, seed=0, apart=3.0):
    x, y = rows(count, seed=seed, apart=apart)
    return Examples(x=x, y=y, items=np.arange(count))


def test_more_shots_are_better_and_every_draw_is_another():
    train, test = examples(120, apart=0.7), examples(60, seed=1, apart=0.7)
    few, many = (judge("nearest-mean", train, test, n, NAMES) for n in (2, 30))
    assert few.mean < many.mean and few.spread > 0 and few.draws == 5


def test_shots_can_be_repeated():
    train, test = examples(120), examples(60, seed=1)
    assert judge("logistic", train, test, 3, NAMES) == judge("logistic", train, test, 3, NAMES)


def test_a_kind_that_needs_more_shots_has_no_number():
    assert judge("lda", examples(30), examples(30), 1, NAMES).mean is None


def test_fewer_images_than_shots_are_told():
    with pytest.raises(UserError, match="class 'a' has 10 training images, fewer than 11 shots"):
        judge("logistic", examples(30), examples(30), 11, NAMES)
