"""The recipe a data set asks for."""

from dataclasses import replace

import pytest

from vitrail.run import auto
from vitrail.run.recipe import Recipe, build

CIFAR = auto.Facts(images=45_000, classes=10, side=32, channels=3, uneven=1.1)
DIGITS = auto.Facts(images=1_400, classes=10, side=8, channels=1, uneven=1.1)
PHOTOS = auto.Facts(images=900, classes=3, side=375, channels=3, uneven=1.5)
TINY = auto.Facts(images=12, classes=2, side=300, channels=3, uneven=2)
SETS = {"cifar": CIFAR, "digits": DIGITS, "photos": PHOTOS, "tiny": TINY}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("minutes", [None, 0.5, 10, 300])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_choice_is_a_recipe(name, minutes, device):
    choice = auto.choose(SETS[name], minutes=minutes, device=device)
    recipe = build(Recipe, choice.settings)
    assert 9 <= recipe.vit.patches <= 256
    assert recipe.vit.width // recipe.vit.heads >= 32
    assert recipe.vit.classes == SETS[name].classes
    assert recipe.train.batch <= SETS[name].images
    assert len(choice.reasons) >= 4


def test_a_short_time_wants_a_small_model_and_a_long_one_a_larger():
    widths = [
        auto.choose(CIFAR, minutes=minutes).settings["vit"]["width"] for minutes in (10, 200, 6000)
    ]
    assert widths == sorted(widths) and widths[0] < widths[2]


def test_grey_pictures_are_left_as_they_are_where_few_passes_are_made():
    grey = replace(DIGITS, images=54_000, side=28)
    kinds = [auto.augmentation(grey, passes)[0] for passes in (3, 14, 100)]
    assert kinds == ["none", "gentle digits", "digits"]


def test_how_often_an_image_is_seen_decides_on_augmentation():
    kinds = [auto.augmentation(CIFAR, passes)[0] for passes in (1, 5, 10, 100, 300)]
    assert kinds == ["none", "flips", "light", "medium", "strong"]


def test_grey_pictures_are_not_flipped():
    assert auto.choose(DIGITS, minutes=1).settings["data"]["augment"]["flip"] == 0


@pytest.mark.parametrize(
    ("uneven", "weights", "balanced"), [(2, False, False), (5, True, False), (30, False, True)]
)
def test_uneven_classes_are_evened(uneven, weights, balanced):
    facts = auto.Facts(images=900, classes=3, side=32, channels=3, uneven=uneven)
    settings = auto.choose(facts, minutes=5).settings
    assert settings["train"]["class_weights"] is weights
    assert settings["data"]["balanced"] is balanced


def test_a_named_model_looks_at_the_size_of_the_pictures():
    assert auto.choose(CIFAR, model="S/16").settings["vit"]["image"] == 32
    assert auto.choose(PHOTOS, model="S/16").settings["vit"]["image"] == 224
