"""The family: names, parameters and multiplications."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vitrail.errors import UserError
from vitrail.model.cost import macs, parameters
from vitrail.model.vit import ViT
from vitrail.zoo.presets import PRESETS, preset

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
    assert parameters(preset(name)) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "published"), [("Ti/16", "1.3"), ("S/16", "4.6"), ("B/16", "17.6")]
)
def test_multiplications_are_the_papers_to_the_printed_digit(name, published):
    assert f"{macs(preset(name)) / 1e9:.1f}" == published


@pytest.mark.parametrize("name", PRESETS)
def test_closed_forms_equal_the_real_model(name):
    config = preset(name)
    with torch.device("meta"):
        model = ViT(config).eval()
        image = torch.zeros(1, config.channels, *config.size)
        with FlopCounterMode(display=False) as counter:
            model(image)
    assert sum(weight.numel() for weight in model.parameters()) == parameters(config)
    assert counter.get_total_flops() == 2 * macs(config)


def test_a_preset_takes_changes():
    config = preset("S/16", image=(160, 224), classes=10)
    assert (config.width, config.size, config.classes) == (384, (160, 224), 10)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("S16", "S/16"), ("vit-b/16", "B/16"), ("dinov2-s/14", "DINOv2-S/14"), ("", "Ti/16")],
)
def test_an_unknown_name_is_answered_with_the_nearest(wrong, near):
    with pytest.raises(UserError, match="the nearest are") as error:
        preset(wrong)
    assert near in str(error.value)


def test_an_unknown_setting_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="a model has no setting 'widht'; the nearest are width"):
        preset("S/16", widht=3)
