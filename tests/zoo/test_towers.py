"""Backbones of other libraries give their features: CLIP, SigLIP, DINOv3, I-JEPA, open_clip."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import vitrail
from tests.parity.weights import random_image, random_weight
from vitrail.errors import UserError
from vitrail.zoo.load import load_weights

FOLDER = Path(__file__).resolve().parents[1] / "parity" / "fixtures" / "towers"
FIXTURES = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
ACTIVATIONS = {"open-clip-gelu": "gelu", "open-clip-quick-gelu": "quick_gelu"}


def write(name, folder, prefix="", stated=True):
    """The files that the library writes."""
    fixture = FIXTURES[name]
    folder.mkdir(exist_ok=True)
    tensors = {
        prefix + key: torch.from_numpy(random_weight(key, shape))
        for key, shape in fixture["shapes"].items()
    }
    save_file(tensors, folder / "model.safetensors")
    if fixture["config_json"] and stated:
        (folder / "config.json").write_text(json.dumps(fixture["config_json"]))
    return folder


def flags(name):
    return {"mlp": ACTIVATIONS[name], "heads": 3} if name in ACTIVATIONS else {}


def features(model, name):
    x = torch.from_numpy(random_image(**FIXTURES[name]["image"]))
    with torch.no_grad():
        return model(x)


@pytest.mark.parametrize("name", FIXTURES)
def test_features_are_those_of_the_other_library(name, tmp_path):
    loaded = load_weights(write(name, tmp_path / "in"), vit=flags(name))
    expected = torch.tensor(FIXTURES[name]["output"])
    torch.testing.assert_close(features(loaded.model, name), expected, rtol=0, atol=1e-5)


def test_the_text_tower_is_left_out_and_said(tmp_path):
    report = load_weights(write("transformers-clip", tmp_path / "in")).report
    assert any(line.endswith("the text tower") for line in report.left_out)


def test_a_whole_file_of_openai_is_read(tmp_path):
    folder = write("open-clip-quick-gelu", tmp_path / "in", prefix="visual.")
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    tensors["visual.proj"] = torch.ones(36, 16)
    tensors["positional_embedding"] = torch.ones(8, 16)
    tensors["transformer.resblocks.0.ln_1.weight"] = torch.ones(16)
    save_file(tensors, folder / "model.safetensors")
    loaded = load_weights(folder, vit=flags("open-clip-quick-gelu"))
    expected = torch.tensor(FIXTURES["open-clip-quick-gelu"]["output"])
    output = features(loaded.model, "open-clip-quick-gelu")
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


def test_a_guess_is_an_error(tmp_path):
    folder = write("open-clip-gelu", tmp_path / "clip")
    with pytest.raises(UserError, match=r"does not state its activation.*vit.mlp='quick_gelu'"):
        load_weights(folder, vit={"heads": 3})
    bare = write("transformers-clip-vision", tmp_path / "bare", stated=False)
    with pytest.raises(UserError, match=r"does not state its activation and eps.*vit.eps=1e-5"):
        load_weights(bare, vit={"heads": 3})
    with pytest.raises(UserError, match="does not say how its images were normalised"):
        vitrail.load_backbone(folder, vit=flags("open-clip-gelu"))
    given = {"preprocess": "clip", "vit": flags("open-clip-gelu")}
    assert vitrail.load_backbone(folder, **given).preprocess.mean[0] == pytest.approx(
        0.481, abs=1e-3
    )


def test_beit_is_refused_by_name(tmp_path):
    tensors = {"patch_embed.proj.weight": torch.ones(4, 3, 2, 2)}
    tensors["blocks.0.attn.relative_position_bias_table"] = torch.ones(9, 2)
    save_file(tensors, tmp_path / "beit.safetensors")
    with pytest.raises(UserError, match="is a BEiT: its attention has relative positions"):
        load_weights(tmp_path / "beit.safetensors")
