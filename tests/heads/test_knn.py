"""Nearest neighbours in torch: the same as scikit-learn's."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

from vitrail.errors import UserError
from vitrail.heads import knn
from vitrail.heads.knn import NearestNeighbours, Search, smallest


def features(count, width=24, seed=0):
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


@pytest.mark.parametrize(("metric", "theirs"), [("euclid", "euclidean"), ("cosine", "cosine")])
@pytest.mark.parametrize("count", [50, 3000])
def test_neighbours_are_those_of_scikit_learn(metric, theirs, count):
    among, x = features(count), features(40, seed=1)
    wanted = NearestNeighbors(n_neighbors=7, metric=theirs, algorithm="brute").fit(among)
    distances, places = wanted.kneighbors(x)
    ours, found = Search(among, metric)(x, 7)
    assert np.array_equal(found, places)
    assert np.allclose(ours, distances, atol=1e-5)


def test_of_equally_near_rows_the_earlier_ones_count():
    among = np.repeat(features(6, 4), 50, axis=0)  # fifty copies of each row
    _, found = Search(among)(among[::50], 10)
    assert np.array_equal(found, np.arange(6)[:, None] * 50 + np.arange(10))


def test_with_ties_the_distances_are_still_those_of_scikit_learn():
    # which of equally near rows it takes, scikit-learn leaves to chance
    among = np.random.default_rng(0).integers(0, 3, (800, 5)).astype(np.float32)
    x = np.random.default_rng(1).integers(0, 3, (60, 5)).astype(np.float32)
    wanted, _ = NearestNeighbors(n_neighbors=9, algorithm="brute").fit(among).kneighbors(x)
    assert np.allclose(Search(among)(x, 9)[0], wanted)


def test_of_equally_many_votes_the_lower_class_wins_as_in_scikit_learn():
    among, x = features(300), features(80, seed=1)
    y = np.random.default_rng(2).integers(0, 4, 300)
    theirs = KNeighborsClassifier(4, algorithm="brute").fit(among, y)
    ours = NearestNeighbours(4).fit(among, y)
    assert np.array_equal(ours.predict(x), theirs.predict(x))
    assert np.allclose(ours.predict_proba(x), theirs.predict_proba(x))


def test_what_float32_cannot_tell_apart_is_computed_again():
    among = 1e4 + 1e-3 * np.random.default_rng(0).normal(size=(900, 3))
    found = Search(among)(among[:50], 4)[1]
    exact = ((among[:50, None] - among[None]) ** 2).sum(axis=2)
    assert np.array_equal(found, np.argsort(exact, axis=1, kind="stable")[:, :4])


@pytest.mark.parametrize("kind", ["plain", "copies", "alike"])
@pytest.mark.parametrize("metric", ["euclid", "cosine"])
def test_who_is_among_the_nearest_is_the_same_in_any_order(kind, metric):
    among = {
        "plain": features(3000),
        "copies": np.repeat(features(6, 4), 50, axis=0),
        "alike": 1e4 + 1e-3 * np.random.default_rng(0).normal(size=(900, 3)),
    }[kind]
    x, search = among[::40], Search(among, metric)
    assert np.array_equal(np.sort(search.among(x, 7)), np.sort(search(x, 7)[1]))


def test_rows_come_in_parts_without_a_difference(monkeypatch):
    among, x = features(500), features(30, seed=1)
    whole = Search(among)(x, 5)
    monkeypatch.setattr(knn, "ROOM", 1000)  # two rows at a time
    parts = Search(among)(x, 5)
    assert np.array_equal(whole[1], parts[1])


def test_fewer_images_than_neighbours_are_told():
    with pytest.raises(UserError, match="k is 5; give a number from 1 to 3"):
        NearestNeighbours(5).fit(features(3), np.arange(3))


@pytest.mark.parametrize("width", [11, 90, 400, 999, 5003, 50_017])
def test_the_smallest_numbers_of_rows_of_any_width(width):
    rows = torch.randn(7, width, generator=torch.Generator().manual_seed(0))
    values, places = smallest(rows, 11)
    assert torch.equal(values, rows.sort(dim=1).values[:, :11])
    assert torch.equal(rows.gather(1, places), values)
