"""Named architectures: names, parameters and multiply-adds."""

import inspect
from dataclasses import fields

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.cost import count_macs, count_parameters
from vitrail.model.vit import ViT
from vitrail.zoo.presets import (
    PATCHES,
    PRESETS,
    SMALL_IMAGES,
    SMALL_SIZES,
    find_preset,
    preset,
)

PUBLISHED = {
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "B/32": 88_224_232,
    "B/16": 86_567_656,
    "L/16": 304_326_632,
    "H/14": 632_045_800,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    assert count_parameters(preset(name)) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "published"), [("Ti/16", "1.3"), ("S/16", "4.6"), ("B/16", "17.6")]
)
def test_macs_are_the_papers_to_the_printed_digit(name, published):
    assert f"{count_macs(preset(name)) / 1e9:.1f}" == published


@pytest.mark.parametrize(
    ("name", "changes"), [*((name, {"depth": 2}) for name in PRESETS), ("Ti/16", {}), ("H/14", {})]
)
def test_closed_forms_equal_the_real_model(name, changes):
    config = preset(name, **changes)
    with torch.device("meta"):
        model = ViT(config).eval()
        image = torch.zeros(1, config.channels, *config.size)
        with FlopCounterMode(display=False) as counter:
            model(image)
    assert sum(weight.numel() for weight in model.parameters()) == count_parameters(config)
    assert counter.get_total_flops() == 2 * count_macs(config)


def test_a_preset_takes_changes():
    config = preset("S/16", image=(160, 224), classes=10)
    assert (config.width, config.size, config.classes) == (384, (160, 224), 10)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("S16", "S/16"), ("vit-b/16", "B/16"), ("dinov2-s14", "DINOv2-S/14"), ("", "Ti/16")],
)
def test_an_unknown_name_lists_the_nearest(wrong, near):
    with pytest.raises(UserError, match="the nearest are") as error:
        preset(wrong)
    assert near in str(error.value)


def test_every_setting_of_a_model_is_a_keyword():
    keywords = list(inspect.signature(preset).parameters)[1:]
    assert keywords == [field.name for field in fields(ViTConfig)]
    with pytest.raises(TypeError, match="unexpected keyword argument 'widht'"):
        preset("S/16", widht=3)


def test_g_and_G_are_two_models():
    giant, gigantic = preset("g/14"), preset("G/14")
    assert (giant.width, giant.depth, giant.hidden) == (1408, 40, 6144)  # Zhai et al., 2022
    assert (gigantic.width, gigantic.depth, gigantic.hidden) == (1664, 48, 8192)
    assert find_preset("G/14") == "G/14" and find_preset("g/14") == "g/14"


@pytest.mark.parametrize(
    ("written", "name"), [("s/16", "S/16"), ("DINOV2-G/14", "DINOv2-g/14"), ("micro/4", "Micro/4")]
)
def test_a_name_in_another_case_is_found_if_it_is_unique(written, name):
    assert preset(written) == preset(name) and find_preset(written) == name


def test_a_name_that_matches_two_models_in_another_case_names_both(monkeypatch):
    monkeypatch.setitem(PRESETS, "Small/16", PRESETS["S/16"])
    monkeypatch.setitem(PRESETS, "SMALL/16", PRESETS["B/16"])
    with pytest.raises(UserError, match="Small/16 and SMALL/16"):
        preset("small/16")


def test_the_nearest_names_include_both_cases():
    with pytest.raises(UserError, match="g/14, G/14"):
        preset("g-14")


def test_small_models_take_images_of_8_to_128_pixels():
    assert {preset(f"{size}/{patch}").image for size in SMALL_SIZES for patch in PATCHES[size]} == {
        *SMALL_IMAGES.values()
    }
    assert (min(SMALL_IMAGES.values()), max(SMALL_IMAGES.values())) == (8, 128)
