"""Flags of settings: what the command line gives reaches the recipe, however it is written."""

from typing import get_type_hints

import pytest

import vitrail
from vitrail.cli.flags import CHOSEN_SECTIONS, CHOSEN_SETTINGS
from vitrail.cli.main import main
from vitrail.data.config import Preprocess
from vitrail.run import auto, fine_tuning
from vitrail.run.recipe import flatten_settings
from vitrail.run.result import Run
from vitrail.zoo.presets import preset


@pytest.mark.parametrize(
    ("flags", "settings"),
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
def test_only_given_settings_are_changed(monkeypatch, flags, settings):
    given = {}

    def train(data, **arguments):
        given.update(arguments)
        return Run(folder=None, metrics={}, is_leader=False)

    monkeypatch.setattr(vitrail, "train", train, raising=False)
    main(["train", "digits", *flags])
    assert given["settings"] == settings


def test_help_names_exactly_the_settings_that_are_chosen_from_the_data():
    chosen = set()
    for images in (64, 100_000):
        summary = auto.DataSummary(images=images, classes=5, side=64, channels=3, imbalance=5.0)
        vit = preset("Ti/16")
        for choice in (
            auto.choose_from_scratch(summary),
            auto.choose_from_scratch(summary, epochs=5),
            auto.choose_from_scratch(summary, model="Nano/8", epochs=5),
            fine_tuning.choose_fine_tuning(summary, "Ti/16", vit, Preprocess(), None),
            fine_tuning.choose_fine_tuning(
                *(summary, "Ti/16", vit, Preprocess(), None, True),
                budget=fine_tuning.Budget(seconds=300, speed=300.0),
            ),
        ):
            chosen |= set(flatten_settings(choice.settings))
    sections = tuple(f"{section}." for section in CHOSEN_SECTIONS)
    assert {name for name in chosen if not name.startswith(sections)} - {
        "model",
        "tune",
    } == CHOSEN_SETTINGS


def test_choices_are_those_of_the_python_functions():
    from vitrail.cli import convert, evaluate, head
    from vitrail.data.source import EvaluationSplit
    from vitrail.heads.features import FeatureKind
    from vitrail.zoo.convert import Target

    for verb, name, choices in (
        (convert.convert, "to", Target | None),
        (evaluate.evaluate, "split", EvaluationSplit | None),
        (head.head, "features", FeatureKind),
    ):
        assert get_type_hints(verb)[name] == choices
