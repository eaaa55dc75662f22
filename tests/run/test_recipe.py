"""Recipes: what is written can be read, and a typo is answered."""

import pytest

from vitrail.data.config import AUGMENT_PRESETS, DataConfig, Preprocess
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.run.recipe import (
    Recipe,
    merge_settings,
    read_recipe,
    recipe_digest,
    recipe_to_toml,
    settings_from_dict,
    settings_to_dict,
)
from vitrail.run.train import train
from vitrail.training.config import TrainConfig

ODD = Recipe(
    source='a "strange"\npath\\with\ttabs/é',
    model="Nano/4",
    vit=ViTConfig(image=(32, 48), patch=4, width=64, heads=2, layer_scale=1e-6),
    train=TrainConfig(lr=3e-4, steps=17, optimizer="muon", class_weights=True),
    data=DataConfig(augment=AUGMENT_PRESETS["strong"], workers=2),
    preprocess=Preprocess(size=(32, 48), mean=(0.1, 0.2, 0.3), std=(1.0, 0.5, 0.25)),
)


def test_a_recipe_that_is_written_and_read_is_the_same(tmp_path):
    (tmp_path / "recipe.toml").write_text(recipe_to_toml(ODD))
    assert settings_from_dict(Recipe, read_recipe(tmp_path / "recipe.toml")) == ODD


def test_every_setting_is_written_down():
    text = recipe_to_toml(Recipe())
    for section, settings in (("vit", ViTConfig()), ("train", TrainConfig())):
        assert f"[{section}]" in text
        for name in settings_to_dict(settings):
            assert f"\n{name} = " in text


def test_changes_win_over_what_they_change():
    merged = merge_settings({"a": 1, "train": {"lr": 1, "batch": 2}}, {"train": {"lr": 3}})
    assert merged == {"a": 1, "train": {"lr": 3, "batch": 2}}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (
            "[train]\nlearning_rate = 1",
            "unknown setting train.learning_rate; the nearest",
        ),
        ("[train]\nwarm_up = 1", "the nearest known one is train.warmup"),
        ("[trian]\nlr = 1", "unknown setting trian; the nearest known one is train"),
        ("[data.augment]\nfilp = 1", "the nearest known one is data.augment.flip"),
        ("format = 99", "has format 99, this version reads 1"),
        ("lr = = 3", "is not valid TOML"),
    ],
)
def test_a_mistake_in_a_recipe_is_answered_in_one_line(tmp_path, text, answer):
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(UserError) as error:
        read_recipe(tmp_path / "r.toml")
    assert answer in str(error.value)


@pytest.mark.parametrize(
    "table",
    [
        {"train": {"lr": "high"}},
        {"data": {"augment": {"flip": "often"}}},
        {"train": 3},
        {"preprocess": {"crop": "x"}},
    ],
)
def test_a_value_of_a_wrong_type_is_a_users_mistake(table):
    with pytest.raises(UserError):
        settings_from_dict(Recipe, table)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("train = 3", "train is 3; give a section [train]"),
        ("vit = 3", "vit is 3; give a section [vit]"),
        ("preprocess = 3", "preprocess is 3; give a section [preprocess]"),
        ("[data]\naugment = true", "data.augment is True; give a section [data.augment]"),
        ("weights = 3", "weights is 3; give a string"),
        ("source = ['a']", "source is ['a']; give a string"),
        ('[train]\nepochs = "many"', "train.epochs is 'many'; give a whole number"),
        ("[train]\nlr = true", "train.lr is True; give a number"),
        ("[train]\ncompile = 1", "train.compile is 1; give true or false"),
        ("[train]\noptimizer = 1", "train.optimizer is 1; give a string"),
        ("[data]\nworkers = 1.5", "data.workers is 1.5; give a whole number"),
        ("[vit]\nimage = [8, 'x']", "vit.image is [8, 'x']; give a whole number or a list of"),
        ("[preprocess]\nmean = 0.5", "preprocess.mean is 0.5; give a list of numbers"),
    ],
)
def test_a_value_of_a_wrong_kind_names_its_setting(tmp_path, text, answer):
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(UserError) as error:
        train("digits", recipe=tmp_path / "r.toml", out=tmp_path / "run", quiet=True)
    assert answer in str(error.value) and "r.toml" in str(error.value)


def test_half_a_worker_is_none():
    with pytest.raises(UserError, match=r"workers is 1\.5; give a whole number"):
        DataConfig(workers=1.5)


def test_a_recipe_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read the recipe .*missing.toml"):
        read_recipe(tmp_path / "missing.toml")


def test_another_setting_is_another_digest():
    assert recipe_digest(Recipe()) != recipe_digest(Recipe(model="S/16"))
