"""Measures of features: neighbours of data that is sorted by class."""

import torch

from vitrail.evaluation import features


def test_neighbours_are_searched_among_all_classes_of_sorted_data(monkeypatch):
    monkeypatch.setattr(features, "MAX_ROWS", 40)
    labels = torch.arange(10).repeat_interleave(20)
    x = torch.ones(200, 2)  # all alike: only the first class, if the rows were the first ones
    assert features.neighbour_accuracy(x, labels, k=3) < 0.5
