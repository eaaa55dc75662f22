"""The result of a search: its text, its notebook view and its JSON document."""

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from vitrail.tuning.result import BestTrial, SearchResult, SplitAccuracy

RESULT = SearchResult(
    trials=20,
    pruned=3,
    failed=1,
    best=BestTrial(value=0.973, settings={"train.lr": 0.0123456, "size": "<Nano>"}, trial=7),
    recipe=Path("out/best.toml"),
    val=SplitAccuracy(accuracy=0.96, interval=(0.95, 0.97)),
    test=SplitAccuracy(accuracy=0.95, interval=(0.94, 0.96)),
    tests=1,
    run=Path("out/final-007"),
    folder=Path("out"),
    report=Path("out/search.html"),
)


def test_the_repr_shows_the_best_settings_and_the_test_accuracy():
    text = repr(RESULT)
    assert "20 trials (3 pruned, 1 failed)" in text
    assert "train.lr = 0.01235" in text and "test accuracy 95.0 % (94.0 to 96.0)" in text
    assert "test accuracy" not in repr(replace(RESULT, test=None))


def test_the_notebook_view_escapes_settings():
    html = RESULT._repr_html_()
    assert "&lt;Nano&gt;" in html and "<Nano>" not in html
    assert "no test images" in replace(RESULT, test=None)._repr_html_()


def test_the_document_has_the_documented_keys():
    document = json.loads(json.dumps(RESULT.to_dict()))
    assert list(document)[:4] == ["trials", "best", "recipe", "test"]
    assert document["best"] == {"value": 0.973, "settings": RESULT.best.settings, "trial": 7}
    assert document["test"] == {"accuracy": 0.95, "interval": [0.94, 0.96]}
    assert replace(RESULT, test=None).to_dict()["test"] is None


def test_a_result_is_frozen():
    with pytest.raises(FrozenInstanceError):
        RESULT.trials = 1
