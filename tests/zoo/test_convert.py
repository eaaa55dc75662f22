"""Conversion to every layout: bit for bit on the way back, refused where it is impossible."""

import json
from dataclasses import asdict
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.zoo import samples
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.zoo.convert import Target, convert
from vitrail.zoo.file import load_model, save_model
from vitrail.zoo.layouts.mapping import LAYOUTS
from vitrail.zoo.load import load_weights

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
        "cls and avg": {"pool": "cls_avg", "layer_scale": 1e-5},
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
def test_conversion_round_trips_bit_for_bit(tmp_path, target, name):
    model = filled(ViTConfig(**{**TINY, **EXPRESSED[target][name]}))
    save_model(tmp_path / "in.safetensors", model, {"classes": list("abcdefg")})
    convert(tmp_path / "in.safetensors", target, place(tmp_path, target))
    flags = {"heads": 3} if target == "torchvision" else {}
    back = load_weights(place(tmp_path, target), vit=flags).model
    assert back.state_dict().keys() == model.state_dict().keys()
    for key, x in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], x), key
    x = torch.randn(1, model.config.channels, *model.config.size)
    with torch.no_grad():
        assert torch.equal(back(x), model(x))


def test_a_dinov2_classifier_is_read_with_what_its_head_reads(tmp_path):
    path = samples.save("transformers-dinov2-head", tmp_path / "in")
    flags = samples.flags("transformers-dinov2-head")
    loaded = load_weights(path, vit=flags)
    samples.equal(loaded.model, "transformers-dinov2-head")
    assert loaded.model.config.pool == "cls_avg" and loaded.report.left_out == [
        "dinov2.embeddings.mask_token: used in pretraining only"
    ]
    fine_tuned = load_weights(path, vit={**flags, "classes": 3}).model  # as `train --from`
    assert fine_tuned.head.weight.shape == (3, 72)
    own = samples.renamed(
        filled(ViTConfig(**TINY, pool="cls_avg")).state_dict(), head="linear_head"
    )
    own = {name if "head" in name else f"backbone.{name}": x for name, x in own.items()}
    save_file(own, tmp_path / "dinov2_lc.safetensors")  # of DINOv2's own code
    meta = load_weights(tmp_path / "dinov2_lc.safetensors", vit={"heads": 3}).model
    assert torch.equal(meta.head.weight, own["linear_head.weight"])


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
def test_a_foreign_file_round_trips_to_the_same_tensors(tmp_path, name):
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
def test_a_chain_of_conversions_changes_no_bit(tmp_path, route):
    model = filled(ViTConfig(**TINY))
    path = tmp_path / "start.safetensors"
    save_model(path, model, {"classes": list("abcdefg")})
    for number, target in enumerate(route):
        out = tmp_path / f"{number}{'.pth' if target == 'torchvision' else ''}"
        convert(path, target, out, vit={"heads": 3} if str(path).endswith(".pth") else {})
        path = out
    back = load_weights(path).model
    assert all(torch.equal(back.state_dict()[key], x) for key, x in model.state_dict().items())


def test_class_names_and_preprocessing_are_converted(tmp_path):
    preprocess = {"size": 24, "crop": 0.9, "interpolation": "bilinear", "mean": [0.1, 0.2, 0.3]}
    preprocess |= {"std": [0.4, 0.5, 0.6], "channels": 3}
    metadata = {"classes": list("abcdefg"), "preprocess": preprocess}
    save_model(tmp_path / "in.safetensors", filled(ViTConfig(**TINY)), metadata)
    before = load_weights(tmp_path / "in.safetensors")
    for target in ("timm", "huggingface", "vitrail"):
        convert(tmp_path / "in.safetensors", target, tmp_path / target)
        after = load_weights(tmp_path / target)
        assert after.classes == tuple("abcdefg")
        assert (after.preprocess.mean, after.preprocess.std) == (
            before.preprocess.mean,
            before.preprocess.std,
        )
        assert after.preprocess.interpolation == "bilinear"
        assert int(24 / after.preprocess.crop) == int(24 / 0.9)


def test_a_converted_file_has_complete_metadata(tmp_path):
    path = samples.save("timm-cls", tmp_path / "in")
    convert(
        path,
        "vitrail",
        tmp_path / "out",
        vit={"heads": 3, "image": (24, 30)},
        preprocess="imagenet",
    )
    model, metadata = load_model(tmp_path / "out" / "model.safetensors")
    samples.equal(model, "timm-cls")
    assert metadata.preprocess.mean == (0.485, 0.456, 0.406)
    assert metadata.document["weights"] == {"source": str(path), "format": "timm"}
    assert load_weights(tmp_path / "out").report.assumed == []


def test_adapted_weights_lose_temperature_and_metrics(tmp_path):
    metadata = {"classes": list("abcdefg"), "temperature": 1.5, "metrics": {"val": 0.9}}
    save_model(tmp_path / "in.safetensors", filled(ViTConfig(**TINY)), metadata)
    convert(tmp_path / "in.safetensors", "vitrail", tmp_path / "same.safetensors")
    assert load_weights(tmp_path / "same.safetensors").metadata.temperature == 1.5
    convert(
        tmp_path / "in.safetensors", "vitrail", tmp_path / "new.safetensors", vit={"classes": 3}
    )
    assert load_weights(tmp_path / "new.safetensors").metadata.temperature is None
    assert load_weights(tmp_path / "new.safetensors").metadata.classes is None


UNSAID: list[tuple[str, dict[str, Any], str]] = [
    ("torchvision", {"registers": 2}, "does not support registers"),
    ("torchvision", {"mlp": "gelu_tanh"}, "not support mlp gelu_tanh"),
    ("torchvision", {"channels": 1}, "not support 1 channels"),
    ("torchvision", {"image": (12, 30)}, "not square"),
    ("torchvision", {"head": "none"}, "without head"),
    ("huggingface", {"pool": "avg"}, "not support pool avg"),
    (
        "huggingface",
        {"stem": "conv", "patch": 4, "pool": "avg"},
        "only Vitrail has stem conv; convert with `to='vitrail'`",
    ),
    ("huggingface", {"qk_norm": True}, "not support qk_norm"),
    ("huggingface", {"head": "mlp"}, "no hidden layer before the head"),
    ("huggingface", {"layer_scale": 1e-5, "image": (12, 30)}, "not square"),
    ("huggingface", {"layer_scale": 1e-5, "mlp_ratio": 2.5}, "no MLP of hidden width 90"),
    ("huggingface", {"pool": "cls_avg", "head": "none"}, "pool cls_avg without a head"),
    ("timm", {"pool": "cls_avg"}, "not both; try `to='huggingface'`"),
    ("timm", {"head": "mlp"}, "no hidden layer"),
    ("timm", {"mlp": "swiglu"}, "SwiGLU with layer scale"),
    ("timm", {"eps": 0.5}, "logits would differ"),
    ("torchvision", {"eps": 0.5}, "logits would differ"),
]


@pytest.mark.parametrize(("target", "changes", "words"), UNSAID)
def test_unsupported_features_are_refused_and_nothing_is_written(tmp_path, target, changes, words):
    model = filled(ViTConfig(**{**TINY, **changes}))
    save_model(tmp_path / "in.safetensors", model, {"classes": None})
    with pytest.raises(UserError, match=words):
        convert(tmp_path / "in.safetensors", target, place(tmp_path, target))
    assert not place(tmp_path, target).exists()


def test_a_harmless_change_of_eps_is_reported_with_its_effect(tmp_path):
    save_model(tmp_path / "in.safetensors", filled(ViTConfig(**TINY, eps=1e-12)), {})
    done = convert(tmp_path / "in.safetensors", "timm", tmp_path / "out")
    assert any("eps 1e-12 -> 1e-06" in line and "differ by" in line for line in done.adapted)


def test_sincos_positions_are_exported_as_learned_ones(tmp_path):
    model = filled(ViTConfig(**TINY, positions="sincos"))
    save_model(tmp_path / "in.safetensors", model, {})
    done = convert(tmp_path / "in.safetensors", "timm", tmp_path / "out")
    assert "positions sincos -> learned: their values are written out" in done.adapted
    x = torch.randn(1, 3, 24, 24)
    with torch.no_grad():
        torch.testing.assert_close(load_weights(tmp_path / "out").model(x), model(x))


def test_an_existing_folder_and_a_wrong_suffix_are_refused(tmp_path):
    save_model(tmp_path / "in.safetensors", filled(ViTConfig(**TINY)), {})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        convert(tmp_path / "in.safetensors", "timm", tmp_path / "out")
    with pytest.raises(UserError, match=r"end `out` .* in \.pth"):
        convert(tmp_path / "in.safetensors", "torchvision", tmp_path / "elsewhere")
    with pytest.raises(UserError, match="safetensors"):
        convert(tmp_path / "in.safetensors", "vitrail", tmp_path / "model.pth")


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".bin"])
def test_a_single_file_holds_the_state_dict_only(tmp_path, suffix):
    model = filled(ViTConfig(**TINY))
    save_model(tmp_path / "in.safetensors", model, {})
    convert(tmp_path / "in.safetensors", "timm", tmp_path / f"out{suffix}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.safetensors",
        f"out{suffix}",
    ]
    back = load_weights(tmp_path / f"out{suffix}", vit={"heads": 3}).model
    assert torch.equal(back.head.weight, model.head.weight)


def test_timms_config_describes_the_model(tmp_path):
    small = ViTConfig(image=32, patch=16, classes=7, width=384, depth=1, heads=6)
    save_model(tmp_path / "in.safetensors", filled(small), {"classes": list("abcdefg")})
    convert(tmp_path / "in.safetensors", "timm", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architecture"] == "vit_small_patch16_224"
    assert config["model_args"]["num_heads"] == 6 and config["label_names"] == list("abcdefg")
    assert config["pretrained_cfg"]["input_size"] == [3, 32, 32]


def test_a_conversion_reports_what_the_command_prints(tmp_path):
    save_model(tmp_path / "in.safetensors", filled(ViTConfig(**TINY)), {})
    done = convert(tmp_path / "in.safetensors", to="timm", out=tmp_path / "<out>", vit={"depth": 1})
    keys = ["source", "target", "format", "loaded", "resized", "adapted", "left_out", "assumed"]
    assert list(asdict(done)) == keys
    assert (done.source, done.target) == (str(tmp_path / "in.safetensors"), str(tmp_path / "<out>"))
    assert "adapted: depth 2 -> 1" in repr(done)
    assert "depth 2 -&gt; 1" in done._repr_html_() and "<out>" not in done._repr_html_()


@pytest.mark.parametrize(("to", "words"), [("google", "can only be read"), ("timmm", "is unknown")])
def test_a_layout_that_cannot_be_written_is_refused(tmp_path, to, words):
    save_model(tmp_path / "in.safetensors", filled(ViTConfig(**TINY)), {})
    with pytest.raises(UserError, match=rf"{words}; choose one of timm, huggingface, torchvision"):
        convert(tmp_path / "in.safetensors", to=to, out=tmp_path / "out")


def test_every_written_layout_has_an_exporter():
    written = {name for name, layout in LAYOUTS.items() if layout.export is not None}
    assert written | {"vitrail"} == set(get_args(Target))
