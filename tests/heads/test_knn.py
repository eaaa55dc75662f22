"""Nearest neighbours in torch: the same as scikit-learn's."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

from vitrail.errors import UserError
from vitrail.heads import knn
from vitrail.heads.knn import NearestNeighbours, NeighbourSearch, select_smallest


def features(count, width=24, seed=0):
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


@pytest.mark.parametrize(("metric", "theirs"), [("euclidean", "euclidean"), ("cosine", "cosine")])
@pytest.mark.parametrize("count", [50, 3000])
def test_neighbours_are_those_of_scikit_learn(metric, theirs, count):
    known, x = features(count), features(40, seed=1)
    wanted = NearestNeighbors(n_neighbors=7, metric=theirs, algorithm="brute").fit(known)
    distances, places = wanted.kneighbors(x)
    ours, found = NeighbourSearch(known, metric).kneighbors(x, 7)
    assert np.array_equal(found, places)
    assert np.allclose(ours, distances, atol=1e-5)


def test_ties_of_distance_go_to_the_earlier_row():
    known = np.repeat(features(6, 4), 50, axis=0)  # fifty copies of each row
    _, found = NeighbourSearch(known).kneighbors(known[::50], 10)
    assert np.array_equal(found, np.arange(6)[:, None] * 50 + np.arange(10))


def test_with_ties_the_distances_are_still_those_of_scikit_learn():
    # scikit-learn does not define which of equally near rows it returns
    known = np.random.default_rng(0).integers(0, 3, (800, 5)).astype(np.float32)
    x = np.random.default_rng(1).integers(0, 3, (60, 5)).astype(np.float32)
    wanted, _ = NearestNeighbors(n_neighbors=9, algorithm="brute").fit(known).kneighbors(x)
    assert np.allclose(NeighbourSearch(known).kneighbors(x, 9)[0], wanted)


def test_ties_of_votes_go_to_the_lower_class_as_in_scikit_learn():
    known, x = features(300), features(80, seed=1)
    y = np.random.default_rng(2).integers(0, 4, 300)
    theirs = KNeighborsClassifier(4, algorithm="brute").fit(known, y)
    ours = NearestNeighbours(4).fit(known, y)
    assert np.array_equal(ours.predict(x), theirs.predict(x))
    assert np.allclose(ours.predict_proba(x), theirs.predict_proba(x))


def test_distances_below_the_precision_of_float32_are_ranked_in_float64():
    known = 1e4 + 1e-3 * np.random.default_rng(0).normal(size=(900, 3))
    found = NeighbourSearch(known).kneighbors(known[:50], 4)[1]
    exact = ((known[:50, None] - known[None]) ** 2).sum(axis=2)
    assert np.array_equal(found, np.argsort(exact, axis=1, kind="stable")[:, :4])


@pytest.mark.parametrize("kind", ["plain", "copies", "alike"])
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_unordered_neighbours_are_the_same_rows(kind, metric):
    known = {
        "plain": features(3000),
        "copies": np.repeat(features(6, 4), 50, axis=0),
        "alike": 1e4 + 1e-3 * np.random.default_rng(0).normal(size=(900, 3)),
    }[kind]
    x, search = known[::40], NeighbourSearch(known, metric)
    assert np.array_equal(np.sort(search.kneighbor_sets(x, 7)), np.sort(search.kneighbors(x, 7)[1]))


def test_chunks_give_the_same_neighbours(monkeypatch):
    known, x = features(500), features(30, seed=1)
    whole = NeighbourSearch(known).kneighbors(x, 5)
    monkeypatch.setattr(knn, "CHUNK_DISTANCES", 1000)  # two rows at a time
    parts = NeighbourSearch(known).kneighbors(x, 5)
    assert np.array_equal(whole[1], parts[1])


def test_fewer_images_than_neighbours_are_an_error():
    with pytest.raises(UserError, match="k is 5; give an integer from 1 to 3"):
        NearestNeighbours(5).fit(features(3), np.arange(3))


@pytest.mark.parametrize("width", [11, 90, 400, 999, 5003, 50_017])
def test_select_smallest_equals_a_full_sort(width):
    rows = torch.randn(7, width, generator=torch.Generator().manual_seed(0))
    values, places = select_smallest(rows, 11)
    assert torch.equal(values, rows.sort(dim=1).values[:, :11])
    assert torch.equal(rows.gather(1, places), values)
