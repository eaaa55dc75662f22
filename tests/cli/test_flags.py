"""Flags of settings: what is asked for reaches the recipe, however it is written."""

import pytest

from vitrail.cli.main import main
from vitrail.run import run


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["--data.skip-broken"], {"data": {"skip_broken": True}}),
        (["--data.skip_broken"], {"data": {"skip_broken": True}}),
        (["--data.no-balanced"], {"data": {"balanced": False}}),
        (["--data.no_balanced"], {"data": {"balanced": False}}),
        (["--train.class_weights"], {"train": {"class_weights": True}}),
        (["--vit.qk_norm", "--vit.width", "8"], {"vit": {"qk_norm": True, "width": 8}}),
        (["--data.augment.flip", "0.5"], {"data": {"augment": {"flip": 0.5}}}),
        ([], {}),
    ],
)
def test_what_is_asked_for_is_changed_and_nothing_else(monkeypatch, words, asked):
    told = {}

    def train(source, **settings):
        told.update(settings)
        return run.Run(folder=None, metrics={}, first=False)

    monkeypatch.setattr(run, "train", train)
    main(["train", "digits", *words])
    assert told["changes"] == asked
