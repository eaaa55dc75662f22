"""What a model's settings accept, and what they answer to a mistake."""

import dataclasses

import pytest

from vitrail.errors import UserError
from vitrail.model.config import ViTConfig

MISTAKES = [
    ({"image": 30}, "image 30 x 30 is no multiple of patch 16; resize it to 48 x 48"),
    ({"image": (224, 230)}, "image 224 x 230 is no multiple of patch 16; resize it to 224 x 224"),
    ({"image": 5}, "resize it to 48 x 48"),
    ({"image": (1, 2, 3)}, "give one number or (height, width)"),
    ({"image": 0}, "image is 0; give a whole number of at least 1"),
    ({"image": (224, -16)}, "image is -16; give a whole number of at least 1"),
    ({"image": "224"}, "image 224 is no size; give one number or (height, width)"),
    ({"patch": 0}, "patch is 0"),
    ({"patch": -4}, "patch is -4"),
    ({"patch": 2.0}, "patch is 2.0"),
    ({"channels": 0}, "channels is 0"),
    ({"classes": 0}, "classes is 0"),
    ({"classes": True}, "classes is True"),
    ({"width": -192}, "width is -192"),
    ({"depth": 0}, "depth is 0"),
    ({"heads": 0}, "heads is 0"),
    ({"heads": 7}, "7 heads do not divide width 768; try 6 heads"),
    ({"registers": -1}, "registers is -1"),
    ({"mlp_ratio": 0}, "mlp_ratio is 0"),
    ({"mlp_ratio": float("nan")}, "mlp_ratio is nan"),
    ({"mlp_ratio": 1e-9}, "leaves nothing inside the MLP"),
    ({"eps": 0.0}, "eps is 0.0"),
    ({"dropout": 1.0}, "dropout is 1.0; give a chance from 0 to below 1"),
    ({"drop_path": -0.1}, "drop_path is -0.1"),
    ({"mlp": "relu"}, "mlp 'relu' is unknown; choose one of gelu, gelu_tanh, swiglu"),
    ({"positions": "sine"}, "positions 'sine' is unknown"),
    ({"pool": "max"}, "pool 'max' is unknown; choose one of cls, avg, map"),
    ({"head": None}, "head None is unknown"),
    ({"stem": "r101"}, "stem 'r101' is unknown; choose one of patch, r26, r50"),
    ({"stem": "r26"}, "stem r26 with patch 16 was never published; use 32"),
    ({"width": 6, "heads": 1, "positions": "sincos"}, "width 6 has no sincos positions"),
    ({"width": 6, "heads": 1, "positions": "rotary"}, "head width 6 cannot be rotated"),
    ({"distilled": True, "pool": "avg"}, 'a distilled model reads [CLS], not pool "avg"'),
    ({"distilled": True, "head": "mlp"}, 'a distilled model has linear heads, not "mlp"'),
    ({"norm_after_pool": True}, 'norm_after_pool needs pool "avg", not "cls"'),
]


@pytest.mark.parametrize(("settings", "answer"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_answered_in_one_line(settings, answer):
    with pytest.raises(UserError) as error:
        ViTConfig(**settings)
    assert answer in str(error.value)
    assert "\n" not in str(error.value)


def test_an_image_can_be_a_list_as_in_json():
    assert ViTConfig(image=[224, 320]) == ViTConfig(image=(224, 320))


def test_tokens_are_counted_in_front_and_in_the_grid():
    config = ViTConfig(image=(64, 96), patch=16, distilled=True, registers=4)
    assert (config.grid, config.patches, config.readers, config.prefix) == ((4, 6), 24, 2, 6)
    assert config.tokens == 30


def test_settings_do_not_change_after_they_were_checked():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ViTConfig().width = 5
