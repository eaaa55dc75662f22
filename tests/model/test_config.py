"""What a ViTConfig accepts, and the error for each mistake."""

import dataclasses

import pytest

from vitrail.errors import UserError
from vitrail.model.config import ViTConfig

MISTAKES = [
    ({"image": 30}, "image 30 x 30 is not a multiple of patch 16; resize it to 48 x 48"),
    (
        {"image": (224, 230)},
        "image 224 x 230 is not a multiple of patch 16; resize it to 224",
    ),
    ({"image": 5}, "resize it to 48 x 48"),
    ({"image": (1, 2, 3)}, "give a whole number or a list of 2 whole numbers"),
    ({"image": 0}, "image is 0; give a whole number of at least 1"),
    ({"image": (224, -16)}, "image is -16; give a whole number of at least 1"),
    ({"image": "224"}, "image is '224' (str); give a whole number or a list of 2 whole"),
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
    ({"mlp_ratio": 1e-9}, "makes the MLP's hidden width 0"),
    ({"eps": 0.0}, "eps is 0.0"),
    ({"dropout": 1.0}, "dropout is 1.0; give a probability from 0 to below 1"),
    ({"drop_path": -0.1}, "drop_path is -0.1"),
    ({"mlp": "relu"}, "mlp 'relu' is unknown; choose one of gelu, gelu_tanh, quick_gelu, swiglu"),
    ({"positions": "sine"}, "positions 'sine' is unknown"),
    ({"pool": "max"}, "pool 'max' is unknown; choose one of cls, avg, cls_avg, map"),
    ({"head": None}, "head is None (NoneType); give one of linear, mlp, none"),
    ({"stem": "r101"}, "stem 'r101' is unknown; choose one of patch, conv, r9, r26, r50"),
    ({"stem": "conv", "patch": 14}, "so patch is 2, 4, 8, ..., not 14; use patch 4 or 8"),
    ({"stem": "r9", "patch": 1}, "so patch is 2, 4, 8, ..., not 1; use patch 4 or 8"),
    (
        {"stem": "r9", "patch": 8, "width": 60},
        "width 60 is not a multiple of patch 8; use width 64",
    ),
    ({"stem": "r26"}, "stem r26 has no variant with patch 16; use patch 32"),
    ({"width": 6, "heads": 1, "positions": "sincos"}, "sincos positions need a width"),
    (
        {"width": 6, "heads": 1, "positions": "rotary"},
        "a multiple of 4, not 6",
    ),
    ({"pool": "cls_avg", "head": "mlp"}, 'pool "cls_avg" needs head "linear" or "none"'),
    ({"distilled": True, "pool": "avg"}, 'a distilled model needs pool "cls", not "avg"'),
    ({"distilled": True, "head": "mlp"}, 'a distilled model needs head "linear", not "mlp"'),
    ({"norm_after_pool": True}, 'norm_after_pool needs pool "avg", not "cls"'),
]


@pytest.mark.parametrize(("settings", "message"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_raises_a_one_line_error(settings, message):
    with pytest.raises(UserError) as error:
        ViTConfig(**settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_image_size_may_be_a_list_as_in_json():
    assert ViTConfig(image=[224, 320]) == ViTConfig(image=(224, 320))


def test_tokens_are_class_tokens_registers_and_patches():
    config = ViTConfig(image=(64, 96), patch=16, distilled=True, registers=4)
    assert (config.grid, config.patches, config.class_tokens, config.prefix) == ((4, 6), 24, 2, 6)
    assert config.tokens == 30


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ViTConfig().width = 5
