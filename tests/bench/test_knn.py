"""The bench of nearest neighbours, on a handful of them."""

import json

import pytest

from bench import knn


def test_both_find_the_same_neighbours(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["knn", "--images", "300", "--asked", "20", "--json"])
    monkeypatch.setattr(knn, "ROUNDS", 1)
    knn.main()
    rows = json.loads(capsys.readouterr().out)
    assert [row["metric"] for row in rows] == ["cosine", "euclid"]
    assert all(row["same"] == pytest.approx(1) and row["ours"] > 0 for row in rows)
