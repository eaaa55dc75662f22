"""Small forests, which are fitted quickly."""

import pytest

from vitrail.heads import kinds


@pytest.fixture(autouse=True)
def few_trees(monkeypatch):
    monkeypatch.setattr(kinds, "FOREST_BYTES", 0)
    monkeypatch.setattr(kinds, "BOOSTING_TREES", 30)
