"""Every file in recipes/ says where its numbers come from, and is a whole recipe."""

from dataclasses import fields
from pathlib import Path

import pytest

from vitrail.data.config import Augment, Preprocess
from vitrail.run import auto, fine_tuning
from vitrail.run.build import check_recipe
from vitrail.run.recipe import Recipe, merge_settings, read_recipe, settings_from_dict
from vitrail.zoo.presets import preset

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.toml"))
HEADER = ("command:", "machine:", "minutes:", "accuracy:", "measured:")
FACTS = {  # images, classes, pixels, channels
    "digits": (1412, 10, 8, 1),
    "mnist": (53964, 10, 28, 1),
    "fashion-mnist": (54000, 10, 28, 1),
    "cifar10": (45050, 10, 32, 3),
    "cifar100": (45000, 100, 32, 3),
}


def header(path):
    lines = path.read_text().split("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in lines)
    return [line.lstrip("# ") for line in lines if line != "#"]


def test_there_are_recipes_for_two_cores_and_for_gpus():
    names = {path.stem for path in RECIPES}
    assert {"digits", "mnist", "fashion-mnist", "cifar10"} <= names
    gpu = {"cifar10", "cifar100", "imagenette", "imagenet10", "imagenet-s16", "finetune"}
    assert {f"gpu-{name}" for name in gpu} <= names


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_header_says_how_and_what_was_reached(path):
    lines = header(path)
    for name in HEADER:
        (line,) = (line for line in lines if line.startswith(name))
        assert line.removeprefix(name).strip()
    (command,) = (line for line in lines if line.startswith("command:"))
    assert f"recipes/{path.name}" in command
    (measured,) = (line for line in lines if line.startswith("measured:"))
    assert measured.split()[1].startswith("no" if path.stem.startswith("gpu-") else "yes")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_is_a_recipe_that_can_work(path):
    table = read_recipe(path)
    images, classes, side, channels = FACTS.get(table.get("source", ""), (10_000, 1000, 375, 3))
    facts = auto.DataSummary(
        images=images, classes=classes, side=side, channels=channels, imbalance=1.0
    )
    if path.stem == "gpu-finetune":
        choice = fine_tuning.choose_fine_tuning(facts, "B/16", preset("B/16"), Preprocess(), None)
    else:
        choice = auto.choose_from_scratch(facts, model=table["model"], device="cuda")
    recipe = settings_from_dict(Recipe, merge_settings(choice.settings, table))
    check_recipe(recipe, facts)
    for section in ("vit", "train"):
        for name, value in table.get(section, {}).items():
            assert getattr(getattr(recipe, section), name) == value


@pytest.mark.parametrize("path", [p for p in RECIPES if "gpu-" in p.name], ids=lambda p: p.stem)
def test_what_the_literature_says_is_not_mixed_with_what_we_would_choose(path):
    table = read_recipe(path)
    assert set(table["data"]["augment"]) == {entry.name for entry in fields(Augment)}
    facts = auto.DataSummary(images=10_000, classes=10, side=375, channels=3, imbalance=1.0)
    ours = fine_tuning.choose_fine_tuning(facts, "B/16", preset("B/16"), None, None).settings[
        "train"
    ]
    for epochs in (5, 30, 100, 300):
        ours |= auto.choose_from_scratch(
            facts, model="S/16", epochs=epochs, device="cuda"
        ).settings["train"]
    of_the_data = {"class_weights", "drop_until"}
    of_weights = set() if path.stem == "gpu-finetune" else {"layer_decay", "probe"}
    assert set(ours) | {"clip"} <= set(table["train"]) | of_the_data | of_weights
