"""Search spaces: files with errors, defaults, and how parameters become settings."""

import pytest

from vitrail.data.config import AUGMENT_PRESETS, Augment, DataConfig
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.run.recipe import Recipe
from vitrail.training.config import TrainConfig
from vitrail.tuning.space import (
    Choice,
    Range,
    default_space,
    initial_params,
    iterate_grid,
    params_to_settings,
    read_space,
    scale_augmentation,
)
from vitrail.zoo.presets import preset

VIT = {"image": 32, "patch": 4, "classes": 10, "width": 64, "depth": 6, "heads": 2}


def recipe(**parts):
    settings = {
        "model": "Nano/4",
        "vit": ViTConfig(**VIT),
        "train": TrainConfig(optimizer="muon", lr=1e-2),
        "data": DataConfig(augment=AUGMENT_PRESETS["light"]),
    }
    return Recipe(**settings | parts)


def read(tmp_path, text):
    (tmp_path / "space.toml").write_text(text)
    return read_space(tmp_path / "space.toml")


def test_ranges_and_choices_are_read_with_and_without_sections(tmp_path):
    text = '"train.lr" = {low = 1e-4, high = 1e-2, log = true}\nsize = ["Pico", "Nano"]\n'
    found = read(tmp_path, text + "[vit]\ndrop_path = [0.0, 0.1]\n[data.augment]\nflip = [0.5]\n")
    assert found == {
        "train.lr": Range(low=1e-4, high=1e-2, log=True),
        "size": Choice(values=("Pico", "Nano")),
        "vit.drop_path": Choice(values=(0.0, 0.1)),
        "data.augment.flip": Choice(values=(0.5,)),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"train.lrr" = [1]', "the nearest is train.lr"),
        ('"train.weightdecay" = [0.1]', "the nearest is train.weight_decay"),
        ('"train.lr" = {low = 1e-4, hihg = 1e-2}', "unknown key hihg; the nearest is high"),
        ('"train.lr" = {low = 1e-4}', "has no high"),
        ('"train.lr" = {low = 1e-2, high = 1e-4}', "give low below high"),
        ('"train.lr" = {low = 0.0, high = 1e-2, log = true}', "needs a positive low"),
        ('"train.lr" = {low = -1.0, high = 1e-2}', "lr is -1.0"),
        ('"train.batch" = {low = 1, high = 1_000_000_000_000_000_000_000}', "within 1e18"),
        ('"train.lr" = {low = 0.1, high = 1, points = 1_000_000_000_000}', "from 2 to 10000"),
        ('"train.lr" = 3', "give a list of choices"),
        ('"train.lr" = []', "give at least one number"),
        ('"train.optimizer" = ["adam"]', "choose one of adamw, muon"),
        ('augment = ["lite"]', "the nearest is light"),
        ('size = ["Nono"]', "the nearest is Nano"),
        ("size = {low = 1, high = 2}", "size is a range; give a list of names: Ti, S"),
        ("", "the space is empty"),
        ("train.lr = [", "is not valid TOML"),
        pytest.param(f'"train.lr" = [{"1" * 5000}]', "is not valid TOML", id="5000 digits"),
        pytest.param(f'"train.lr" = {"[" * 5000}', "nested deeper than 64", id="5000 brackets"),
        ('strength = ["strong"]', "strength has 'strong'; give numbers from 0 to 10"),
        ("strength = [1, true]", "strength has True"),
        ("strength = {low = -0.5, high = 1.0}", "strength has -0.5"),
        ("strength = [nan]", "strength has nan"),
    ],
)
def test_an_error_in_the_file_is_one_line(tmp_path, text, message):
    with pytest.raises(UserError, match=r"space\.toml") as error:
        read(tmp_path, text)
    assert message in str(error.value)


def test_the_default_space_covers_rates_regularisation_and_size():
    space = default_space(recipe())
    wanted = {"train.lr", "train.weight_decay", "vit.drop_path", "augment", "strength", "size"}
    assert set(space) == wanted | {"vit.patch"}
    assert space["vit.patch"].values == (2, 4, 8)
    assert initial_params(space, recipe())["train.lr"] == 1e-2


def test_the_default_space_includes_the_learning_rate_of_the_recipe():
    space = default_space(recipe(train=TrainConfig(optimizer="muon", lr=1.0)))
    assert space["train.lr"] == Range(low=1e-3, high=1.0, log=True)


def test_the_size_of_given_weights_is_not_searched():
    space = default_space(recipe(weights="some", train=TrainConfig(lr=5e-4)))
    assert "size" not in space and "vit.patch" not in space


@pytest.mark.parametrize(("image", "patches"), [(32, (4, 8)), (28, None)])
def test_hybrids_that_train_chooses_are_searched_among_themselves(image, patches):
    model = "R9+Micro/4"
    base = recipe(model=model, vit=preset(model, image=image, classes=10))
    space = default_space(base)
    assert space["size"].values == ("R9+Nano", "R9+Micro", "R9+Mini")
    assert ("vit.patch" in space and space["vit.patch"].values) == (patches or False)
    assert initial_params(space, base)["size"] == "R9+Micro"
    table, name = params_to_settings({"size": "R9+Mini"}, base)
    assert (name, table["vit"]["width"], table["vit"]["depth"]) == ("R9+Mini/4", 192, 2)
    assert table["vit"]["image"] == image


def test_a_changed_size_is_not_searched():
    assert "size" not in default_space(recipe(vit=ViTConfig(**VIT | {"width": 80})))


def test_parameters_become_settings_and_a_preset():
    params = {"train.lr": 0.02, "size": "Micro", "vit.patch": 8, "augment": "none"}
    table, model = params_to_settings(params, recipe())
    assert model == "Micro/8"
    assert table["train"] == {"lr": 0.02}
    assert (table["vit"]["width"], table["vit"]["depth"], table["vit"]["patch"]) == (128, 6, 8)
    assert table["vit"]["image"] == 32  # other settings of the model are unchanged
    assert table["data"]["augment"]["flip"] == 0.0


def test_strength_scales_every_amount():
    strong = AUGMENT_PRESETS["strong"]
    assert scale_augmentation(strong, 1.0) == strong
    half = scale_augmentation(strong, 0.5)
    assert (half.scale, half.mixup, half.erase) == pytest.approx((0.6, 0.4, 0.125))
    for name in AUGMENT_PRESETS:
        scale_augmentation(AUGMENT_PRESETS[name], 1.5)  # is still valid
    assert scale_augmentation(AUGMENT_PRESETS["digits"], 0.0) == Augment()  # none at all


def test_a_grid_has_every_combination():
    space = {
        "train.lr": Range(low=1e-3, high=1e-1, log=True),
        "train.batch": Range(low=16, high=64, points=2),
        "size": Choice(values=("Pico", "Nano")),
    }
    points = list(iterate_grid(space))
    assert len(points) == 3 * 2 * 2
    assert sorted({point["train.lr"] for point in points}) == pytest.approx([1e-3, 1e-2, 1e-1])
    assert {point["train.batch"] for point in points} == {16, 64}


def test_a_grid_that_is_too_large_is_an_error():
    space = {f"x{n}": Range(low=0.0, high=1.0, points=10) for n in range(6)}
    with pytest.raises(UserError, match="the grid has 1,000,000 points"):
        list(iterate_grid(space))


def test_a_mapping_is_read_like_a_file(tmp_path):
    text = '"train.lr" = {low = 1e-4, high = 1e-2, log = true}\nsize = ["Pico", "Nano"]\n'
    mapping = {"train": {"lr": {"low": 1e-4, "high": 1e-2, "log": True}}, "size": ("Pico", "Nano")}
    assert read_space(mapping) == read(tmp_path, text)
