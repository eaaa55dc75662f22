"""Forests small enough to be grown in a moment."""

import pytest

from vitrail.heads import kinds


@pytest.fixture(autouse=True)
def few_trees(monkeypatch):
    monkeypatch.setattr(kinds, "TREES_ROOM", 0)
    monkeypatch.setattr(kinds, "ROUNDS_ROOM", 30)
