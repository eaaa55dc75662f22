"""A recipe that cannot work is refused, with advice that does."""

import re
from dataclasses import replace

import pytest
import torch

from vitrail.data.config import Preprocess
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.run.auto import DataSummary
from vitrail.run.build import check_recipe, make_learner
from vitrail.run.recipe import Recipe
from vitrail.training.config import TrainConfig

SUMMARY = DataSummary(images=900, classes=10, side=32, channels=3, imbalance=1.0)
TINY = {"classes": 10, "width": 16, "depth": 1, "heads": 1, "positions": "sincos"}


def recipe(image, view=None, **vit):
    return Recipe(
        vit=ViTConfig(image=image, **{**TINY, **vit}),
        preprocess=Preprocess(size=view or image),
        train=TrainConfig(batch=64),
    )


def advice(made):
    with pytest.raises(UserError, match="has only") as error:
        check_recipe(made, SUMMARY)
    setting, number = re.search(r"try `([\w.]+)=(\d+)`$", str(error.value)).groups()
    return setting, int(number)


@pytest.mark.parametrize("image", [4, 6, 7, 8, 28, 29, 32, 44, 52, 60, 100, (40, 60)])
def test_another_patch_works(image):
    patch = image if isinstance(image, int) else 20
    setting, number = advice(recipe(image, patch=patch))
    assert setting == "vit.patch"
    made = recipe(image, patch=number)
    check_recipe(made, SUMMARY)
    assert made.patches <= 169 or image == 29  # about eight a side; 29 is a prime


@pytest.mark.parametrize(("stem", "patch"), [("r50", 16), ("r26", 32)])
def test_with_a_resnet_a_larger_image_works(stem, patch):
    setting, number = advice(recipe(2 * patch, patch=patch, stem=stem))
    assert setting == "vit.image"
    check_recipe(recipe(number, patch=patch, stem=stem), SUMMARY)


def test_a_tiny_image_should_be_enlarged():
    assert advice(recipe(2, patch=1)) == ("vit.image", 8)


def test_the_preprocessed_size_counts():
    made = recipe(32, patch=4, view=8)
    assert advice(made) == ("vit.patch", 1)
    check_recipe(replace(made, vit=replace(made.vit, patch=1)), SUMMARY)
    assert recipe(32, patch=4, view=64).patches == 256
    assert advice(recipe(224, view=32, patch=16, stem="r50")) == ("preprocess.size", 128)
    with pytest.raises(UserError, match="image 30 x 30 is not a multiple of patch 4"):
        check_recipe(recipe(32, patch=4, view=30), SUMMARY)


def test_a_model_without_a_head_is_refused():
    with pytest.raises(UserError, match=r"vit\.head none .* set `vit\.head='linear'`"):
        check_recipe(recipe(32, patch=4, head="none"), SUMMARY)


@pytest.mark.parametrize(
    ("units", "precision", "expected"),
    [
        (True, "auto", torch.bfloat16),
        (True, "float32", torch.float32),
        (False, "auto", torch.float32),
    ],
)
def test_a_processor_with_bfloat16_units_trains_in_bfloat16_and_evaluates_in_float32(
    monkeypatch, units, precision, expected
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": units})
    made = recipe(32, patch=8, stem="r9", width=32)
    made = replace(made, train=replace(made.train, precision=precision))
    learner = make_learner(made, torch.device("cpu"))
    with learner.autocast():
        logits = learner.model(torch.randn(2, 3, 32, 32))
    assert logits.dtype == expected
    assert learner.dtype == torch.float32
