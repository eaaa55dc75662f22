"""Weights out again: bit for bit the same when they come back, and honest where they cannot go."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.zoo import samples
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.zoo.convert import convert
from vitrail.zoo.file import load_model, save_model
from vitrail.zoo.load import load

TINY: dict[str, Any] = {
    "image": 24,
    "patch": 6,
    "classes": 7,
    "width": 36,
    "depth": 2,
    "heads": 3,
    "mlp_ratio": 4.0,
}
DINO3: dict[str, Any] = {"positions": "rotary", "registers": 4, "layer_scale": 1e-5, "eps": 1e-5}
# What each target can express; every one of them comes back as it went.
EXPRESSED: dict[str, dict[str, dict[str, Any]]] = {
    "timm": {
        "plain": {},
        "wide": {"image": (12, 30)},
        "grey": {"channels": 1},
        "tanh": {"mlp": "gelu_tanh"},
        "headless": {"head": "none"},
        "distilled": {"distilled": True},
        "registers": {"registers": 4, "layer_scale": 1e-5},
        "avg": {"pool": "avg"},
        "avg after": {"pool": "avg", "norm_after_pool": True, "registers": 1},
        "map": {"pool": "map"},
        "qk norm": {"qk_norm": True},
        "gated": {"mlp": "swiglu", "layer_scale": 1e-5, "mlp_ratio": 2.5},
        "no positions": {"positions": "none"},
        "clip": {"pre_norm": True, "eps": 1e-5},
        "hybrid": {"stem": "r50", "patch": 16, "image": 32},
        "rotary": DINO3,
        "rotary avg": {**DINO3, "pool": "avg", "registers": 5},
    },
    "huggingface": {
        "plain": {},
        "wide": {"image": (12, 30)},
        "grey": {"channels": 1},
        "tanh": {"mlp": "gelu_tanh"},
        "exact": {"eps": 1e-12},
        "headless": {"head": "none"},
        "distilled": {"distilled": True},
        "dinov2": {"layer_scale": 1e-5},
        "registers": {"registers": 4, "layer_scale": 1e-5},
        "gated": {"mlp": "swiglu", "layer_scale": 1e-5, "mlp_ratio": 96 / 36},
    },
    "torchvision": {"plain": {}, "hidden": {"head": "mlp"}},
    "vitrail": {"plain": {}, "sincos": {"positions": "sincos", "pool": "avg"}},
}
TRIPS = [(target, name) for target, kinds in EXPRESSED.items() for name in kinds]


def filled(config: ViTConfig) -> ViT:
    torch.manual_seed(0)
    model = ViT(config)
    for name, x in model.named_parameters():
        torch.nn.init.normal_(x)
        if config.positions == "rotary" and name.endswith("qkv.bias"):
            x.data[config.width : 2 * config.width] = 0  # timm has no bias of keys there
        if config.pre_norm and name == "patch_embed.proj.bias":
            x.data.zero_()  # nor of patches here
    return model.eval()


def place(tmp_path, target: str):
    return tmp_path / ("out.pth" if target == "torchvision" else "out")


@pytest.mark.parametrize(("target", "name"), TRIPS)
def test_what_goes_out_comes_back_bit_for_bit(tmp_path, target, name):
    model = filled(ViTConfig(**{**TINY, **EXPRESSED[target][name]}))
    save_model(tmp_path / "in.safetensors", model, {"classes": list("abcdefg")})
    convert(tmp_path / "in.safetensors", target, place(tmp_path, target))
    flags = {"heads": 3} if target == "torchvision" else {}
    back = load(place(tmp_path, target), vit=flags).model
    assert back.state_dict().keys() == model.state_dict().keys()
    for key, x in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], x), key
    x = torch.randn(1, model.config.channels, *model.config.size)
    with torch.no_grad():
        assert torch.equal(back(x), model(x))


BACK = {
    "timm-cls": "timm",
    "timm-distilled": "timm",
    "timm-registers": "timm",
    "timm-avg": "timm",
    "timm-map": "timm",
    "timm-swiglu": "timm",
    "timm-pre-norm": "timm",
    "timm-headless": "timm",
    "transformers-cls": "huggingface",
    "transformers-pooler": "huggingface",
    "torchvision-cls": "torchvision",
    "torchvision-mlp-head": "torchvision",
}


@pytest.mark.parametrize("name", BACK)
def test_a_peers_file_that_comes_in_and_goes_out_is_the_same_file(tmp_path, name):
    path = samples.save(name, tmp_path / "in")
    flags = samples.flags(name)
    if name == "timm-swiglu":  # timm has SwiGLU beside layer scale only
        with pytest.raises(UserError, match="layer scale"):
            convert(path, BACK[name], place(tmp_path, BACK[name]), vit=flags)
        return
    convert(path, BACK[name], place(tmp_path, BACK[name]), vit=flags)
    if BACK[name] == "torchvision":
        there = torch.load(tmp_path / "out.pth", weights_only=True)
    else:
        there = load_file(tmp_path / "out" / "model.safetensors")
    here = samples.tensors(name)
    assert there.keys() == here.keys()
    assert all(torch.equal(there[key], x) for key, x in here.items())


@pytest.mark.parametrize("route", [["timm", "huggingface", "torchvision", "vitrail"]])
def test_a_journey_through_all_of_them_changes_no_bit(tmp_path, route):
    model = filled(ViTConfig(**TINY))
    path = tmp_path / "start.safetensors"
    save_model(path, model, {"classes": list("abcdefg")})
    for number, target in enumerate(route):
        out = tmp_path / f"{number}{'.pth' if target == 'torchvision' else ''}"
        convert(path, target, out, vit={"heads": 3} if str(path).endswith(".pth") else {})
        path = out
    back = load(path).model
    assert all(torch.equal(back.state_dict()[key], x) for key, x in model.state_dict().items())


def test_labels_and_preprocessing_travel(tmp_path):
    view = {"size": 24, "crop": 0.9, "interpolation": "bilinear", "mean": [0.1, 0.2, 0.3]}
    view |= {"std": [0.4, 0.5, 0.6], "channels": 3}
    facts = {"classes": list("abcdefg"), "preprocess": view}
    save_model(tmp_path / "in.safetensors", filled(ViTConfig(**TINY)), facts)
    before = load(tmp_path / "in.safetensors")
    for target in ("timm", "huggingface", "vitrail"):
        convert(tmp_path / "in.safetensors", target, tmp_path / target)
        after = load(tmp_path / target)
        assert after.classes == tuple("abcdefg")
        assert (after.view.mean, after.view.std) == (before.view.mean, before.view.std)
        assert after.view.interpolation == "bilinear"
        assert int(24 / after.view.crop) == int(24 / 0.9)


def test_a_foreign_file_becomes_one_that_explains_itself(tmp_path):
    path = samples.save("timm-cls", tmp_path / "in")
    convert(
        path,
        "vitrail",
        tmp_path / "out",
        vit={"heads": 3, "image": (24, 30)},
        preprocess="imagenet",
    )
    model, facts = load_model(tmp_path / "out" / "model.safetensors")
    samples.equal(model, "timm-cls")
    assert facts["preprocess"]["mean"] == [0.485, 0.456, 0.406]
    assert facts["weights"] == {"source": str(path), "format": "timm"}
    assert load(tmp_path / "out").report.told == []


def test_what_was_measured_on_another_model_is_not_carried_on(tmp_path):
    facts = {"classes": list("abcdefg"), "temperature": 1.5, "metrics": {"val": 0.9}}
    save_model(tmp_path / "in.safetensors", filled(ViTConfig(**TINY)), facts)
    convert(tmp_path / "in.safetensors", "vitrail", tmp_path / "same.safetensors")
    assert load(tmp_path / "same.safetensors").facts["temperature"] == 1.5
    convert(
        tmp_path / "in.safetensors", "vitrail", tmp_path / "new.safetensors", vit={"classes": 3}
    )
    assert load(tmp_path / "new.safetensors").facts["temperature"] is None
    assert load(tmp_path / "new.safetensors").facts["classes"] is None


UNSAID: list[tuple[str, dict[str, Any], str]] = [
    ("torchvision", {"registers": 2}, "no registers"),
    ("torchvision", {"mlp": "gelu_tanh"}, "no mlp gelu_tanh"),
    ("torchvision", {"channels": 1}, "no 1 channels"),
    ("torchvision", {"image": (12, 30)}, "not square"),
    ("torchvision", {"head": "none"}, "without head"),
    ("huggingface", {"pool": "avg"}, "no pool avg"),
    ("huggingface", {"qk_norm": True}, "no qk_norm"),
    ("huggingface", {"head": "mlp"}, "behind a hidden layer"),
    ("huggingface", {"layer_scale": 1e-5, "image": (12, 30)}, "square images only"),
    ("huggingface", {"layer_scale": 1e-5, "mlp_ratio": 2.5}, "no MLP of 90"),
    ("timm", {"head": "mlp"}, "no hidden layer"),
    ("timm", {"mlp": "swiglu"}, "SwiGLU with layer scale"),
    ("timm", {"eps": 0.5}, "logits would differ"),
    ("torchvision", {"eps": 0.5}, "logits would differ"),
]


@pytest.mark.parametrize(("target", "changes", "words"), UNSAID)
def test_what_a_peer_cannot_say_is_refused_and_nothing_is_written(tmp_path, target, changes, words):
    model = filled(ViTConfig(**{**TINY, **changes}))
    save_model(tmp_path / "in.safetensors", model, {"classes": None})
    with pytest.raises(UserError, match=words):
        convert(tmp_path / "in.safetensors", target, place(tmp_path, target))
    assert not place(tmp_path, target).exists()


def test_an_eps_that_changes_nothing_is_told_with_its_number(tmp_path):
    save_model(tmp_path / "in.safetensors", filled(ViTConfig(**TINY, eps=1e-12)), {})
    done = convert(tmp_path / "in.safetensors", "timm", tmp_path / "out")
    assert any("eps 1e-12 -> 1e-06" in line and "differ by" in line for line in done.report.adapted)


def test_waves_are_written_out_as_positions(tmp_path):
    model = filled(ViTConfig(**TINY, positions="sincos"))
    save_model(tmp_path / "in.safetensors", model, {})
    done = convert(tmp_path / "in.safetensors", "timm", tmp_path / "out")
    assert "positions sincos -> learned: written out" in done.report.adapted
    x = torch.randn(1, 3, 24, 24)
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "out").model(x), model(x))


def test_a_place_that_is_taken_is_left_alone(tmp_path):
    save_model(tmp_path / "in.safetensors", filled(ViTConfig(**TINY)), {})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="there already"):
        convert(tmp_path / "in.safetensors", "timm", tmp_path / "out")
    with pytest.raises(UserError, match=r"end --out .* in \.pth"):
        convert(tmp_path / "in.safetensors", "torchvision", tmp_path / "elsewhere")
    with pytest.raises(UserError, match="safetensors"):
        convert(tmp_path / "in.safetensors", "vitrail", tmp_path / "model.pth")


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".bin"])
def test_a_lone_file_holds_the_tensors_only(tmp_path, suffix):
    model = filled(ViTConfig(**TINY))
    save_model(tmp_path / "in.safetensors", model, {})
    convert(tmp_path / "in.safetensors", "timm", tmp_path / f"out{suffix}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.safetensors",
        f"out{suffix}",
    ]
    back = load(tmp_path / f"out{suffix}", vit={"heads": 3}).model
    assert torch.equal(back.head.weight, model.head.weight)


def test_timms_config_names_what_timm_builds(tmp_path):
    small = ViTConfig(image=32, patch=16, classes=7, width=384, depth=1, heads=6)
    save_model(tmp_path / "in.safetensors", filled(small), {"classes": list("abcdefg")})
    convert(tmp_path / "in.safetensors", "timm", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architecture"] == "vit_small_patch16_224"
    assert config["model_args"]["num_heads"] == 6 and config["label_names"] == list("abcdefg")
    assert config["pretrained_cfg"]["input_size"] == [3, 32, 32]
