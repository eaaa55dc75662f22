"""The recipe a data set asks for."""

from dataclasses import replace

import pytest

from vitrail.run import auto, fine_tuning
from vitrail.run.recipe import Recipe, settings_from_dict
from vitrail.zoo.presets import preset

CIFAR = auto.DataSummary(images=45_000, classes=10, side=32, channels=3, imbalance=1.1)
DIGITS = auto.DataSummary(images=1_400, classes=10, side=8, channels=1, imbalance=1.1)
PHOTOS = auto.DataSummary(images=900, classes=3, side=375, channels=3, imbalance=1.5)
TINY = auto.DataSummary(images=12, classes=2, side=300, channels=3, imbalance=2)
SETS = {"cifar": CIFAR, "digits": DIGITS, "photos": PHOTOS, "tiny": TINY}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("minutes", [None, 0.5, 10, 300])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_choice_is_a_recipe(name, minutes, device):
    choice = auto.choose_from_scratch(SETS[name], minutes=minutes, device=device)
    recipe = settings_from_dict(Recipe, choice.settings)
    assert 9 <= recipe.vit.patches <= 256
    assert recipe.vit.width // recipe.vit.heads >= 32
    assert recipe.vit.classes == SETS[name].classes
    assert recipe.train.batch <= SETS[name].images
    assert len(choice.reasons) >= 4


def test_a_short_time_wants_a_small_model_and_a_long_one_a_larger():
    widths = [
        auto.choose_from_scratch(CIFAR, minutes=minutes).settings["vit"]["width"]
        for minutes in (10, 200, 6000)
    ]
    assert widths == sorted(widths) and widths[0] < widths[2]


def test_few_images_in_little_time_want_a_model_that_makes_enough_steps():
    few = replace(CIFAR, images=4_500)
    times = [1, 10, 500]
    chosen = [auto.choose_from_scratch(few, minutes=one).settings["model"] for one in times]
    assert chosen == ["R9+Nano/8", "R9+Micro/8", "R9+Mini/8"]


@pytest.mark.parametrize("minutes", [0.5, 5, 10, 20, 60])
def test_more_images_do_not_want_a_smaller_model_in_the_same_minutes(minutes):
    names = [
        auto.choose_from_scratch(replace(CIFAR, images=images), minutes=minutes).settings["model"]
        for images in (300, 45_000, 1_200_000)
    ]
    assert len(set(names)) == 1


def test_small_images_get_a_resnet_stem_and_tiny_ones_plain_patches():
    grey = replace(DIGITS, images=54_000, side=28)
    sets = (CIFAR, grey, PHOTOS, DIGITS)
    chosen = [auto.choose_from_scratch(one, minutes=5).settings for one in sets]
    assert [one["model"] for one in chosen[:2]] == ["R9+Micro/8", "R9+Nano/4"]
    assert [one["vit"]["stem"] for one in chosen] == ["r9", "r9", "r9", "patch"]
    assert not any("drop_patches" in one["train"] for one in chosen)
    plain = auto.choose_from_scratch(CIFAR, model="Nano/4", minutes=5).settings
    assert plain["train"]["drop_patches"] == 0.5


def test_grey_pictures_are_left_as_they_are_where_few_passes_are_made():
    grey = replace(DIGITS, images=54_000, side=28)
    kinds = [auto.choose_augmentation(grey, passes, False)[0] for passes in (3, 14, 100)]
    assert kinds == ["none", "gentle digits", "digits"]


def test_how_often_an_image_is_seen_decides_on_augmentation():
    epochs = (1, 5, 10, 100, 300)
    kinds = [auto.choose_augmentation(CIFAR, passes, False)[0] for passes in epochs]
    assert kinds == ["none", "flips", "light", "medium", "strong"]
    assert auto.choose_augmentation(CIFAR, 300, True)[0] == "medium"


def test_batch_norms_get_batches_of_64_in_short_runs_on_few_images():
    few = replace(CIFAR, images=457)
    batches = [auto.choose_from_scratch(few, minutes=3, model=m).settings["train"]["batch"]
               for m in ("R9+Micro/8", "Nano/4")]  # fmt: skip
    assert batches == [64, 16]
    assert line(auto.choose_from_scratch(few, minutes=3), "batch 64: batch norms")
    assert auto.choose_from_scratch(few).settings["train"]["batch"] == 16  # epochs, not time
    tiny = replace(CIFAR, images=50)
    assert auto.choose_from_scratch(tiny, minutes=3).settings["train"]["batch"] == 16
    assert auto.choose_from_scratch(CIFAR, minutes=3).settings["train"]["batch"] == 128


def test_grey_pictures_are_not_flipped():
    assert auto.choose_from_scratch(DIGITS, minutes=1).settings["data"]["augment"]["flip"] == 0


@pytest.mark.parametrize(
    ("uneven", "weights", "balanced"), [(2, False, False), (5, True, False), (30, False, True)]
)
def test_uneven_classes_are_evened(uneven, weights, balanced):
    facts = auto.DataSummary(images=900, classes=3, side=32, channels=3, imbalance=uneven)
    settings = auto.choose_from_scratch(facts, minutes=5).settings
    assert settings["train"]["class_weights"] is weights
    assert settings["data"]["balanced"] is balanced


def test_a_named_model_looks_at_the_size_of_the_pictures():
    assert auto.choose_from_scratch(CIFAR, model="S/16").settings["vit"]["image"] == 32
    assert auto.choose_from_scratch(PHOTOS, model="S/16").settings["vit"]["image"] == 224


@pytest.mark.parametrize("model", ["DINOv2-S/14", "SigLIP-B/16", "CLIP-B/16", "DINOv3-S/16"])
def test_a_model_published_without_a_head_gets_one(model):
    assert auto.choose_from_scratch(PHOTOS, model=model).settings["vit"]["head"] == "linear"


@pytest.mark.parametrize("images", [1, 2, 3, 5, 9, 64, 500, 10**6])
def test_a_batch_is_a_power_of_two_within_the_images(images):
    batch = auto.batch_size(replace(TINY, images=images))
    assert batch <= min(128, images) and batch.bit_count() == 1
    assert 2 * batch > min(4, images)


@pytest.mark.parametrize("side", [1, 3, 5, 6, 7, 9, 17, 29])
def test_tiny_pictures_have_patches_enough(side):
    assert (
        settings_from_dict(
            Recipe, auto.choose_from_scratch(replace(DIGITS, side=side)).settings
        ).vit.patches
        >= 9
    )


def line(choice, start):
    return next((reason for reason in choice.reasons if reason.startswith(start)), "")


def test_steps_say_how_often_an_image_is_seen():
    choice = auto.choose_from_scratch(CIFAR, epochs=300, steps=704, batch=64)
    assert "about 1.0 epochs expected" in line(choice, "model")
    assert line(choice, "augmentation none") and not line(choice, "epochs")
    assert choice.settings["train"]["epochs"] == 2  # a little over one pass


def test_from_scratch_optimizer_batch_and_epochs_have_their_reasons():
    choice = auto.choose_from_scratch(replace(CIFAR, imbalance=5))
    for start in (
        "optimizer muon, learning rate 0.01: ",
        "batch 128: at least 16 steps",
        "epochs 44: ",
    ):
        assert line(choice, start)
    assert line(choice, "class weights: the largest class is 5.0 times the smallest")
    assert line(auto.choose_from_scratch(TINY), "batch 4: there are only 12 images")


def test_a_fine_tuning_has_the_same_reasons():
    vit = preset("S/16")
    choice = fine_tuning.choose_fine_tuning(replace(PHOTOS, imbalance=12), "S/16", vit, None, None)
    told = ("augmentation: flips", "batch 32: ", "optimizer adamw, learning rate 0.0002: ")
    for start in (*told, "balanced sampling: ", "epochs 11: fine-tuning needs few"):
        assert line(choice, start)
    assert line(fine_tuning.choose_fine_tuning(PHOTOS, "S/16", vit, None, 5), "epochs 5: requested")


def test_a_fine_tuning_by_the_clock_has_no_epochs():
    choice = fine_tuning.choose_fine_tuning(PHOTOS, "S/16", preset("S/16"), None, 5, timed=True)
    assert not line(choice, "epochs") and "epochs" not in choice.settings["train"]


def test_the_recipe_suits_the_requested_stem():
    stem = auto.choose_from_scratch(CIFAR, model="Pico/2", requested={"stem": "conv"})
    assert stem.settings["train"]["weight_decay"] == auto.STEM_WEIGHT_DECAY
    assert stem.settings["vit"]["stem"] == "patch"  # the request itself is merged later
    assert any(line.startswith("stem: starts from whitening") for line in stem.reasons)
    plain = auto.choose_from_scratch(CIFAR, model="R9+Nano/4", requested={"stem": "patch"})
    assert "weight_decay" not in plain.settings["train"]
    assert not any(line.startswith(("stem", "precision")) for line in plain.reasons)
