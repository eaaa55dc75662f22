"""Loading weights of every layout: equal logits, and every change and assumption reported."""

import json
import math
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.zoo import samples
from tests.zoo.arrays import google_arrays
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.zoo.file import save_model
from vitrail.zoo.layouts.config_json import crop_fraction
from vitrail.zoo.load import load_weights

CLS, HEADS = "timm-cls", {"heads": 3, "image": (24, 30)}


@pytest.mark.parametrize("name", samples.NAMES)
def test_published_models_give_the_same_logits(tmp_path, name):
    loaded = load_weights(samples.save(name, tmp_path / "weights"), vit=samples.flags(name))
    samples.equal(loaded.model, name)
    assert loaded.report.format == {"transformers": "huggingface"}.get(
        name.split("-")[0], name.split("-")[0]
    )
    assert not loaded.model.training


def saved(path: Path, state: Any) -> Path:
    torch.save(state, path)
    return path


@pytest.mark.parametrize("suffix", ["pth", "bin", "pt", "anything"])
def test_a_torch_file_is_recognised_by_its_content(tmp_path, suffix):
    path = saved(tmp_path / f"weights.{suffix}", samples.tensors(CLS))
    samples.equal(load_weights(path, vit=HEADS).model, CLS)


# What training code of DeiT, timm, Lightning, DINO and others puts around a state_dict.
WRAPPED = {
    "model": {"model": {}, "epoch": 3, "args": Namespace(lr=0.1), "optimizer": {"state": {}}},
    "state_dict": {"state_dict": {}, "arch": "vit", "version": 2},
    "module": {"module.": {}},
    "lightning": {"state_dict": {"model.net.": {}}},
    "teacher": {"teacher": {"module.backbone.": {}}},
    "encoder": {"model": {"encoder.": {}}},
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_wrapped_state_dicts_are_unwrapped(tmp_path, kind):
    def fill(tree: Any) -> Any:
        if not isinstance(tree, dict) or "state" in tree:
            return tree
        for key, inside in tree.items():
            if inside == {} and key.endswith("."):
                return {f"{key}{name}": x for name, x in samples.tensors(CLS).items()}
            if inside == {}:
                return {**tree, key: samples.tensors(CLS)}
        return {key: fill(inside) for key, inside in tree.items()}

    loaded = load_weights(saved(tmp_path / "weights.pth", fill(WRAPPED[kind])), vit=HEADS)
    samples.equal(loaded.model, CLS)
    assert loaded.report.loaded == len(samples.tensors(CLS))
    if kind == "model":
        assert loaded.report.left_out == ["args, epoch, optimizer: not a tensor"]


def test_dinos_teacher_is_preferred_to_its_student(tmp_path):
    state = samples.tensors("timm-headless")
    student = {f"module.backbone.{name}": x + 1 for name, x in state.items()}
    teacher = {f"backbone.{name}": x for name, x in state.items()}
    teacher |= {"head.mlp.0.weight": torch.ones(4, 4), "head.last_layer.weight_g": torch.ones(4, 1)}
    tree = {"student": student, "teacher": teacher, "dino_loss": {"center": torch.zeros(1, 8)}}
    loaded = load_weights(saved(tmp_path / "dino.pth", tree), vit=HEADS)
    samples.equal(loaded.model, "timm-headless")
    reasons = " ".join(loaded.report.left_out)
    assert all(x in reasons for x in ("another model", "self-supervision", "a loss"))
    assert any("teacher.backbone" in line for line in loaded.report.assumed)


def test_two_models_in_one_file_are_refused(tmp_path):
    state = samples.tensors(CLS)
    with pytest.raises(UserError, match="several models"):
        load_weights(
            saved(tmp_path / "two.pth", {"a": state, "b": {k: x + 0 for k, x in state.items()}})
        )


def test_deit_3_names_its_layer_scale_gamma(tmp_path):
    state = samples.renamed(
        samples.tensors("timm-layer-scale"), ls1__gamma="gamma_1", ls2__gamma="gamma_2"
    )
    loaded = load_weights(saved(tmp_path / "deit3.pth", {"model": state}), vit=HEADS)
    samples.equal(loaded.model, "timm-layer-scale")


def test_dinov2_names_with_registers_and_chunked_blocks_are_read(tmp_path):
    state = samples.renamed(samples.tensors("timm-registers"), reg_token="register_tokens")
    state = samples.renamed(state, blocks__0="blocks.0.0", blocks__1="blocks.1.1")
    state["mask_token"] = torch.zeros(1, 36)
    path = tmp_path / "dinov2.pth"
    loaded = load_weights(saved(path, state), vit=HEADS)
    samples.equal(loaded.model, "timm-registers")
    assert loaded.model.config.registers == 4
    assert loaded.report.left_out == ["mask_token: used in pretraining only"]


def test_dinov2_giants_swiglu_names_are_read(tmp_path):
    state = samples.renamed(samples.tensors("timm-swiglu"), mlp__fc1="mlp.w12", mlp__fc2="mlp.w3")
    samples.equal(
        load_weights(saved(tmp_path / "giant.pth", state), vit=HEADS).model, "timm-swiglu"
    )


def test_dinov3s_masked_key_bias_is_zero(tmp_path):
    state = {}
    for name, x in samples.tensors("timm-rotary-wide").items():
        name = re.sub(r"gamma_(\d)", r"ls\1.gamma", name).replace("reg_token", "storage_tokens")
        if name.endswith("v_bias"):
            continue
        if name.endswith("q_bias"):
            front = name.removesuffix("q_bias")
            v = samples.tensors("timm-rotary-wide")[f"{front}v_bias"]
            state[f"{front}qkv.bias"] = torch.cat([x, torch.full_like(x, torch.nan), v])
            state[f"{front}qkv.bias_mask"] = torch.ones(108)
            continue
        state[name] = x
    state |= {"rope_embed.periods": torch.ones(3), "mask_token": torch.zeros(1, 36)}
    loaded = load_weights(saved(tmp_path / "dinov3.pth", state), vit=HEADS)
    samples.equal(loaded.model, "timm-rotary-wide")
    assert loaded.model.config.positions == "rotary" and loaded.model.config.eps == 1e-5


def test_maes_decoder_is_left_out_with_a_reason(tmp_path):
    state = samples.tensors("timm-headless")
    state |= {"mask_token": torch.zeros(1, 1, 8), "decoder_embed.weight": torch.zeros(8, 36)}
    state |= {"decoder_blocks.0.norm1.weight": torch.ones(8), "decoder_pos_embed": torch.ones(1, 9)}
    loaded = load_weights(saved(tmp_path / "mae.pth", {"model": state}), vit=HEADS)
    samples.equal(loaded.model, "timm-headless")
    assert any("decoder_embed.weight" in s and "decoder" in s for s in loaded.report.left_out)
    assert loaded.model.config.head == "none"


def test_old_torchvision_names_are_read(tmp_path):
    state = samples.renamed(
        samples.tensors("torchvision-cls"), mlp__0="mlp.linear_1", mlp__3="mlp.linear_2"
    )
    loaded = load_weights(saved(tmp_path / "tv.pth", state), vit={"heads": 3})
    samples.equal(loaded.model, "torchvision-cls")


FIVE = {
    "encoder__layer": "layers",
    "attention__attention__query": "attention.q_proj",
    "attention__attention__key": "attention.k_proj",
    "attention__attention__value": "attention.v_proj",
    "attention__output__dense": "attention.o_proj",
    "intermediate__dense": "mlp.fc1",
    "output__dense": "mlp.fc2",
}


def hugging_face(folder: Path, name: str, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = samples.fixture(name)["config"]
    stated = {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": config["width"],
        "num_hidden_layers": config["depth"],
        "num_attention_heads": config["heads"],
        "image_size": config["image"],
        "layer_norm_eps": config["eps"],
        "hidden_act": "gelu",
        "id2label": {str(i): f"kind {i}" for i in range(7)},
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(stated))
    return folder


def test_names_of_transformers_5_are_read(tmp_path):
    folder = hugging_face(tmp_path / "five", "transformers-cls")
    save_file(
        samples.renamed(samples.tensors("transformers-cls"), **FIVE), folder / "a.safetensors"
    )
    loaded = load_weights(folder)
    samples.equal(loaded.model, "transformers-cls")
    assert loaded.classes == tuple(f"kind {i}" for i in range(7))
    assert not [line for line in loaded.report.assumed if "heads" in line or "eps" in line]


def test_sharded_weights_are_read_through_their_index(tmp_path):
    folder = hugging_face(tmp_path / "sharded", "transformers-cls")
    state = samples.tensors("transformers-cls")
    names = sorted(state)
    listed = {}
    for number, part in enumerate((names[:9], names[9:])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, folder / file)
        listed |= dict.fromkeys(part, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    samples.equal(load_weights(folder).model, "transformers-cls")
    samples.equal(load_weights(index).model, "transformers-cls")
    listed.pop(names[0])
    index.write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(UserError, match="does not contain the tensors"):
        load_weights(folder)
    index.write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    with pytest.raises(UserError, match="not in the same folder"):
        load_weights(folder)


def test_a_distillation_token_that_no_head_reads_is_a_register(tmp_path):
    state = samples.tensors("transformers-cls")
    state["vit.embeddings.distillation_token"] = torch.full((1, 1, 36), 0.1)
    places = state["vit.embeddings.position_embeddings"]
    state["vit.embeddings.position_embeddings"] = torch.cat([places[:, :1], places], dim=1)
    folder = hugging_face(tmp_path / "deit", "transformers-cls", model_type="deit")
    save_file(state, folder / "model.safetensors")
    loaded = load_weights(folder)
    assert (loaded.model.config.registers, loaded.model.config.distilled) == (1, False)
    expected = state["vit.embeddings.distillation_token"] + places[:, :1]
    torch.testing.assert_close(loaded.model.reg_token.data, expected, rtol=0, atol=0)


PROCESSOR = {
    "do_resize": True,
    "size": {"shortest_edge": 256},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "resample": 3,
    "image_mean": [0.1, 0.2, 0.3],
    "image_std": [0.4, 0.5, 0.6],
}


def test_preprocessing_is_read_from_the_image_processor(tmp_path):
    folder = hugging_face(tmp_path / "seen", "transformers-cls")
    save_file(samples.tensors("transformers-cls"), folder / "model.safetensors")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    preprocess = load_weights(folder).preprocess
    assert (preprocess.mean, preprocess.std, preprocess.interpolation) == (
        (0.1, 0.2, 0.3),
        (0.4, 0.5, 0.6),
        "bicubic",
    )
    assert preprocess.crop == pytest.approx(0.875) and preprocess.size == (24, 30)


def test_crop_fraction_reproduces_the_resized_size():
    sizes = [(inner, outer) for inner in range(16, 300) for outer in range(inner, 600)]
    assert all(math.floor(inner / crop_fraction(inner, outer)) == outer for inner, outer in sizes)


def test_a_processor_that_ignores_the_aspect_ratio_is_reported(tmp_path):
    folder = hugging_face(tmp_path / "seen", "transformers-cls")
    save_file(samples.tensors("transformers-cls"), folder / "model.safetensors")
    squeeze = {"size": {"height": 224, "width": 224}, "resample": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(squeeze))
    loaded = load_weights(folder)
    assert (loaded.preprocess.crop, loaded.preprocess.interpolation) == (1.0, "bilinear")
    assert any("squeezes" in line for line in loaded.report.assumed)


GOOGLE: dict[str, dict[str, Any]] = {
    "plain": {},
    "hidden": {"head": "mlp"},
    "headless": {"head": "none"},
    "map": {"pool": "map"},
    "hybrid": {"stem": "r26", "patch": 32, "image": 64},
}


LAYOUTS = ["original", "target", "big_vision", "img", "scan"]
STORED = [(a, b) for a in LAYOUTS for b in GOOGLE if b != "hybrid"] + [("original", "hybrid")]


@pytest.mark.parametrize(("layout", "kind"), STORED)
def test_google_arrays_of_every_variant_load_bit_for_bit(tmp_path, layout, kind):
    torch.manual_seed(0)
    settings = {"image": 32, "patch": 8, "classes": 5, "width": 32, "depth": 2, "heads": 4}
    model = ViT(ViTConfig(**{**settings, **GOOGLE[kind], "mlp": "gelu_tanh"}))
    for x in model.parameters():
        torch.nn.init.normal_(x)
    np.savez(tmp_path / "google.npz", **google_arrays(model, layout))
    loaded = load_weights(tmp_path / "google.npz")
    assert loaded.model.config.heads == 4
    for name, x in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], x), name
    assert any("tanh" in line for line in loaded.report.assumed)


def test_big_vision_has_no_position_for_cls(tmp_path):
    torch.manual_seed(0)
    model = ViT(ViTConfig(image=32, patch=8, classes=5, width=32, depth=2, heads=4))
    arrays = google_arrays(model, "big_vision")
    arrays["params/pos_embedding"] = arrays["params/pos_embedding"][:, 1:]
    arrays |= {"params/txt/head/kernel": np.ones((2, 2), np.float32), "params/t": np.ones(1)}
    np.savez(tmp_path / "big.npz", **arrays)
    loaded = load_weights(tmp_path / "big.npz")
    assert not loaded.model.pos_embed[:, 0].any()
    assert torch.equal(loaded.model.pos_embed[:, 1:], model.pos_embed[:, 1:])
    assert any("text encoder" in line for line in loaded.report.left_out)


def test_bfloat16_arrays_are_read_from_raw_bytes(tmp_path):
    model = ViT(ViTConfig(image=32, patch=8, classes=5, width=32, depth=1, heads=4))
    short = {}
    for name, array in google_arrays(model, "img").items():
        half = torch.from_numpy(array).to(torch.bfloat16)
        short[name] = half.view(torch.int16).numpy().view("V2")
    np.savez(tmp_path / "short.npz", **short)
    loaded = load_weights(tmp_path / "short.npz")
    expected = model.norm.weight.to(torch.bfloat16).float()
    assert torch.equal(loaded.model.norm.weight, expected)
    assert "dtype bfloat16 -> float32" in loaded.report.adapted


# --- what stops a load or is reported ------------------------------------------------------------


@pytest.mark.parametrize("name", ["blocks.0.attn.relative_bias", "blocks.0*attn.qkv.bias"])
def test_an_unexplained_tensor_stops_the_load(tmp_path, name):
    state = samples.tensors(CLS) | {name: torch.ones(3)}
    with pytest.raises(UserError, match=re.escape(f"does not have: {name}")):
        load_weights(saved(tmp_path / "more.pth", state), vit=HEADS)


@pytest.mark.parametrize(
    "name", ["blocks.1.norm2.bias", "norm.weight", "blocks.0.mlp.fc1.bias", "head.bias"]
)
def test_a_missing_tensor_stops_the_load(tmp_path, name):
    state = samples.tensors(CLS)
    del state[name]
    with pytest.raises(UserError, match="missing"):
        load_weights(saved(tmp_path / "less.pth", state), vit=HEADS)


def test_a_missing_block_stops_the_load(tmp_path):
    state = samples.renamed(samples.tensors(CLS), blocks__1="blocks.2")
    with pytest.raises(UserError, match="number 1 is missing"):
        load_weights(saved(tmp_path / "gap.pth", state), vit=HEADS)


def test_a_tensor_of_another_shape_stops_the_load(tmp_path):
    state = samples.tensors(CLS)
    state["blocks.1.norm1.weight"] = torch.ones(35)
    with pytest.raises(UserError, match=r"blocks\.1\.norm1\.weight of shape 35, expected 36"):
        load_weights(saved(tmp_path / "odd.pth", state), vit=HEADS)


def test_a_second_head_without_its_token_stops_the_load(tmp_path):
    state = samples.tensors(CLS) | {"head_dist.weight": torch.ones(7, 36)}
    with pytest.raises(UserError, match=r"head_dist\.weight, which this model does not have"):
        load_weights(saved(tmp_path / "heads.pth", state), vit=HEADS)


def test_two_norms_at_the_end_stop_the_load(tmp_path):
    state = samples.tensors(CLS)
    state |= {"fc_norm.weight": torch.ones(36), "fc_norm.bias": torch.ones(36)}
    with pytest.raises(UserError, match="two tensors"):
        load_weights(saved(tmp_path / "norms.pth", state), vit=HEADS)


def test_integer_weights_are_refused(tmp_path):
    state = samples.tensors(CLS)
    state["norm.weight"] = torch.ones(36, dtype=torch.int64)
    with pytest.raises(UserError, match="floating-point"):
        load_weights(saved(tmp_path / "whole.pth", state), vit=HEADS)


def test_an_unknown_number_of_heads_must_be_passed(tmp_path):
    path = saved(tmp_path / "bare.pth", samples.tensors("timm-grey"))
    with pytest.raises(UserError, match=r"for example `vit\.heads="):
        load_weights(path)
    assert any(
        "heads 3: as requested" in s for s in load_weights(path, vit={"heads": 3}).report.assumed
    )


def test_heads_of_published_sizes_are_assumed_and_reported(tmp_path):
    torch.manual_seed(0)
    model = ViT(ViTConfig(image=32, patch=16, width=192, depth=12, heads=3, classes=4))
    path = saved(tmp_path / "bare.pth", model.state_dict())
    loaded = load_weights(path)
    assert loaded.model.config.heads == 3
    assert any(line.startswith("heads 3: as in published") for line in loaded.report.assumed)
    assert loaded.preprocess is None and loaded.classes is None
    assert any("preprocessing: unknown" in line for line in loaded.report.assumed)


def test_an_unknown_grid_that_is_not_square_must_be_passed(tmp_path):
    path = saved(tmp_path / "oblong.pth", samples.tensors(CLS))
    with pytest.raises(UserError, match="pass the image size used in training"):
        load_weights(path, vit={"heads": 3})


def test_unknown_positions_must_be_passed(tmp_path):
    path = saved(tmp_path / "bare.pth", samples.tensors("timm-no-positions"))
    with pytest.raises(UserError, match=r"`vit\.positions="):
        load_weights(path, vit={"heads": 3})


@pytest.mark.parametrize("means", ["half", "imagenet", "clip"])
def test_normalisation_can_be_passed(tmp_path, means):
    from vitrail.data.config import NORMALISATIONS

    path = saved(tmp_path / "bare.pth", samples.tensors(CLS))
    loaded = load_weights(path, vit=HEADS, preprocess=means)
    assert (loaded.preprocess.mean, loaded.preprocess.std) == NORMALISATIONS[means]
    assert any(means in line for line in loaded.report.assumed)


def test_a_published_name_gives_heads_preprocessing_and_classes(tmp_path):
    torch.manual_seed(0)
    model = ViT(ViTConfig(width=192, depth=12, heads=3, classes=1000))
    path = saved(tmp_path / "deit_tiny_patch16_224-a1311bcf.pth", {"model": model.state_dict()})
    loaded = load_weights(path)
    assert loaded.preprocess.mean == (0.485, 0.456, 0.406)
    assert loaded.classes[:2] == ("tench", "goldfish") and len(set(loaded.classes)) == 1000
    assert sum("DeiT-Ti/16" in line for line in loaded.report.assumed) >= 3


def test_a_published_name_with_other_shapes_is_ignored(tmp_path):
    path = saved(tmp_path / "deit_tiny_patch16_224-a1311bcf.pth", samples.tensors("timm-grey"))
    loaded = load_weights(path, vit={"heads": 3})
    assert loaded.preprocess is None
    assert any("ignored" in line for line in loaded.report.assumed)


# --- timm's config -------------------------------------------------------------------------------


def timm_folder(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(samples.tensors(CLS), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


INNER = {
    "input_size": [3, 24, 30],
    "crop_pct": 0.95,
    "interpolation": "bilinear",
    "mean": [0.5, 0.4, 0.3],
    "std": [0.1, 0.2, 0.3],
}
ARGUMENTS = {"num_heads": 3, "embed_dim": 36}
LABELS = [f"sort {i}" for i in range(7)]


@pytest.mark.parametrize("nested", [True, False])
def test_both_forms_of_timms_config_are_read(tmp_path, nested):
    config: dict[str, Any] = {"architecture": "vit_tiny_patch16_224", "model_args": ARGUMENTS}
    config |= {"pretrained_cfg": INNER, "label_names": LABELS} if nested else INNER
    config |= {} if nested else {"labels": LABELS}
    loaded = load_weights(timm_folder(tmp_path / "timm", config))
    samples.equal(loaded.model, CLS)
    assert (loaded.preprocess.crop, loaded.preprocess.interpolation) == (0.95, "bilinear")
    assert loaded.preprocess.mean == (0.5, 0.4, 0.3) and loaded.classes == tuple(LABELS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "vit_base_patch16_rope_ape_224"}, "not a plain ViT"),
        ({"model_args": {**ARGUMENTS, "attn_layer": "diff"}}, "not supported"),
        ({"model_args": {**ARGUMENTS, "act_layer": "relu"}}, "not supported"),
        ({"label_names": LABELS[:5]}, "5 class names"),
        ({"label_names": {"0": "a", "2": "b"}}, "skips class indices"),
        ({"pretrained_cfg": 3}, "malformed"),
    ],
)
def test_an_unsupported_config_stops_the_load(tmp_path, changes, words):
    config = {"architecture": "vit_tiny_patch16_224", "model_args": ARGUMENTS}
    config |= {"pretrained_cfg": INNER, **changes}
    with pytest.raises(UserError, match=words):
        load_weights(timm_folder(tmp_path / "timm", config))


def test_a_config_of_another_model_stops_the_load(tmp_path):
    folder = hugging_face(tmp_path / "other", "transformers-cls", num_hidden_layers=5)
    save_file(samples.tensors("transformers-cls"), folder / "model.safetensors")
    with pytest.raises(UserError, match="do not belong together"):
        load_weights(folder)


def test_repeated_class_names_get_their_index(tmp_path):
    names = ["crane", "b", "c", "crane", "e", "f", "g"]
    config = {"architecture": "vit_tiny_patch16_224", "model_args": ARGUMENTS}
    folder = timm_folder(tmp_path / "t", config | {"pretrained_cfg": INNER, "label_names": names})
    loaded = load_weights(folder)
    assert loaded.classes == ("crane", "b", "c", "crane (3)", "e", "f", "g")


# --- Vitrail's own files, and paths --------------------------------------------------------------


def own(path: Path, **vit: Any) -> ViT:
    torch.manual_seed(0)
    model = ViT(ViTConfig(image=32, patch=8, width=32, depth=2, heads=4, classes=3, **vit))
    preprocess = {"size": 32, "crop": 0.9, "mean": [0.1], "std": [0.2], "channels": 3}
    metadata = {"classes": ["a", "b", "c"], "preprocess": preprocess, "temperature": 1.5}
    save_model(path, model, metadata)
    return model


@pytest.mark.parametrize("folder", [True, False])
def test_a_vitrail_file_states_everything(tmp_path, folder):
    model = own(tmp_path / "model.safetensors")
    loaded = load_weights(tmp_path if folder else tmp_path / "model.safetensors")
    for name, x in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], x)
    assert loaded.classes == ("a", "b", "c") and loaded.preprocess.mean == (0.1, 0.1, 0.1)
    assert loaded.metadata.temperature == 1.5 and loaded.report.assumed == []


def test_a_stem_is_loaded_with_the_statistics_of_its_batch_norms(tmp_path):
    model = own(tmp_path / "model.safetensors", stem="r9")
    x = torch.randn(4, 3, 32, 32)
    model.train()(x)
    save_model(tmp_path / "model.safetensors", model, {})
    torch.testing.assert_close(
        load_weights(tmp_path).model.encode(x), model.eval().encode(x), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("stem", ["patch", "conv"])
def test_a_vitrail_file_is_adapted_like_any_other(tmp_path, stem):
    own(tmp_path / "model.safetensors", stem=stem)
    loaded = load_weights(tmp_path, vit={"image": (16, 48), "classes": 5, "channels": 1})
    assert loaded.model.config.size == (16, 48)
    assert loaded.preprocess.size == (16, 48) and loaded.preprocess.mean == (0.1,)
    assert loaded.classes is None
    assert loaded.model(torch.zeros(1, 1, 16, 48)).shape == (1, 5)


def test_a_published_name_is_downloaded_from_the_hub(tmp_path, monkeypatch):
    downloaded = []

    def fetch(name: str) -> Path:
        downloaded.append(name)
        return samples.save("timm-grey", tmp_path / "fetched")

    monkeypatch.setattr("vitrail.zoo.hub.fetch_from_hub", fetch)
    load_weights("Ti/16 augreg-in21k-in1k", vit={"heads": 3})
    assert downloaded == ["timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"]


def test_missing_and_ambiguous_paths_are_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_weights(tmp_path / "absent")
    with pytest.raises(UserError, match="no weight file"):
        load_weights(tmp_path)
    for name in "ab":
        saved(tmp_path / f"{name}.pth", samples.tensors(CLS))
    with pytest.raises(UserError, match="several weight files"):
        load_weights(tmp_path)


def test_a_file_of_another_model_is_refused_with_its_tensors(tmp_path):
    with pytest.raises(UserError, match=r"not contain a Vision Transformer.*conv1\.weight"):
        load_weights(saved(tmp_path / "resnet.pth", {"conv1.weight": torch.ones(2, 2)}))


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"<!DOCTYPE html>", "web page"),
        (b"\x80\x02}q\x00.", "bare pickle"),
        (b"GIF89a" * 10, "neither"),
    ],
)
def test_other_kinds_of_files_are_recognised(tmp_path, start, words):
    (tmp_path / "weights.pth").write_bytes(start)
    with pytest.raises(UserError, match=words):
        load_weights(tmp_path / "weights.pth")


def test_a_tilde_of_an_unknown_user_stays_in_the_path():
    with pytest.raises(UserError, match="~nobody-of-this-name/weights does not exist"):
        load_weights("~nobody-of-this-name/weights")


# --- published weights ---------------------------------------------------------------------------


def test_published_weights_load_completely(shared):
    loaded = load_weights(shared / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    assert loaded.report.loaded == 152 and loaded.report.left_out == []
    assert sum(x.numel() for x in loaded.model.parameters()) == 5_717_416
    assert loaded.classes[0] == "tench" and loaded.preprocess.crop == 0.9
