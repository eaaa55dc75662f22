"""Everybody's weights in: the same answers, and nothing that happened to them left unsaid."""

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
from vitrail.zoo.beside import share
from vitrail.zoo.file import save_model
from vitrail.zoo.load import load

CLS, HEADS = "timm-cls", {"heads": 3, "image": (24, 30)}


@pytest.mark.parametrize("name", samples.NAMES)
def test_a_published_model_says_here_what_it_says_there(tmp_path, name):
    loaded = load(samples.save(name, tmp_path / "weights"), vit=samples.flags(name))
    samples.equal(loaded.model, name)
    assert loaded.report.format == {"transformers": "huggingface"}.get(
        name.split("-")[0], name.split("-")[0]
    )
    assert not loaded.model.training


def saved(path: Path, state: Any) -> Path:
    torch.save(state, path)
    return path


@pytest.mark.parametrize("suffix", ["pth", "bin", "pt", "anything"])
def test_a_file_of_torch_is_known_by_its_content(tmp_path, suffix):
    path = saved(tmp_path / f"weights.{suffix}", samples.tensors(CLS))
    samples.equal(load(path, vit=HEADS).model, CLS)


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
def test_what_is_wrapped_around_the_weights_is_taken_off(tmp_path, kind):
    def fill(tree: Any) -> Any:
        if not isinstance(tree, dict) or "state" in tree:
            return tree
        for key, inside in tree.items():
            if inside == {} and key.endswith("."):
                return {f"{key}{name}": x for name, x in samples.tensors(CLS).items()}
            if inside == {}:
                return {**tree, key: samples.tensors(CLS)}
        return {key: fill(inside) for key, inside in tree.items()}

    loaded = load(saved(tmp_path / "weights.pth", fill(WRAPPED[kind])), vit=HEADS)
    samples.equal(loaded.model, CLS)
    assert loaded.report.loaded == len(samples.tensors(CLS))
    if kind == "model":
        assert loaded.report.left_out == ["args, epoch, optimizer: no weights"]


def test_of_dinos_two_models_the_teacher_is_taken(tmp_path):
    state = samples.tensors("timm-headless")
    student = {f"module.backbone.{name}": x + 1 for name, x in state.items()}
    teacher = {f"backbone.{name}": x for name, x in state.items()}
    teacher |= {"head.mlp.0.weight": torch.ones(4, 4), "head.last_layer.weight_g": torch.ones(4, 1)}
    tree = {"student": student, "teacher": teacher, "dino_loss": {"center": torch.zeros(1, 8)}}
    loaded = load(saved(tmp_path / "dino.pth", tree), vit=HEADS)
    samples.equal(loaded.model, "timm-headless")
    said = " ".join(loaded.report.left_out)
    assert "another model" in said and "self-supervision" in said and "a loss" in said
    assert any("teacher.backbone" in line for line in loaded.report.told)


def test_two_models_in_one_file_are_not_chosen_from(tmp_path):
    state = samples.tensors(CLS)
    with pytest.raises(UserError, match="several models"):
        load(saved(tmp_path / "two.pth", {"a": state, "b": {k: x + 0 for k, x in state.items()}}))


def test_deit_three_calls_its_layer_scale_gamma(tmp_path):
    state = samples.renamed(
        samples.tensors("timm-layer-scale"), ls1__gamma="gamma_1", ls2__gamma="gamma_2"
    )
    loaded = load(saved(tmp_path / "deit3.pth", {"model": state}), vit=HEADS)
    samples.equal(loaded.model, "timm-layer-scale")


def test_dinov2_has_registers_chunks_and_a_mask_token(tmp_path):
    state = samples.renamed(samples.tensors("timm-registers"), reg_token="register_tokens")
    state = samples.renamed(state, blocks__0="blocks.0.0", blocks__1="blocks.1.1")
    state["mask_token"] = torch.zeros(1, 36)
    path = tmp_path / "dinov2.pth"
    loaded = load(saved(path, state), vit=HEADS)
    samples.equal(loaded.model, "timm-registers")
    assert loaded.model.config.registers == 4
    assert loaded.report.left_out == ["mask_token: used in pretraining only"]


def test_dinov2_giant_calls_its_gate_w12(tmp_path):
    state = samples.renamed(samples.tensors("timm-swiglu"), mlp__fc1="mlp.w12", mlp__fc2="mlp.w3")
    samples.equal(load(saved(tmp_path / "giant.pth", state), vit=HEADS).model, "timm-swiglu")


def test_dinov3_masks_the_bias_of_its_keys(tmp_path):
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
    loaded = load(saved(tmp_path / "dinov3.pth", state), vit=HEADS)
    samples.equal(loaded.model, "timm-rotary-wide")
    assert loaded.model.config.positions == "rotary" and loaded.model.config.eps == 1e-5


def test_the_decoder_of_mae_is_left_out_with_its_reason(tmp_path):
    state = samples.tensors("timm-headless")
    state |= {"mask_token": torch.zeros(1, 1, 8), "decoder_embed.weight": torch.zeros(8, 36)}
    state |= {"decoder_blocks.0.norm1.weight": torch.ones(8), "decoder_pos_embed": torch.ones(1, 9)}
    loaded = load(saved(tmp_path / "mae.pth", {"model": state}), vit=HEADS)
    samples.equal(loaded.model, "timm-headless")
    assert any("decoder_embed.weight" in s and "decoder" in s for s in loaded.report.left_out)
    assert loaded.model.config.head == "none"


def test_old_torchvision_numbers_its_linear_layers(tmp_path):
    state = samples.renamed(
        samples.tensors("torchvision-cls"), mlp__0="mlp.linear_1", mlp__3="mlp.linear_2"
    )
    loaded = load(saved(tmp_path / "tv.pth", state), vit={"heads": 3})
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
    told = {
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
    (folder / "config.json").write_text(json.dumps(told))
    return folder


def test_the_names_of_transformers_five_are_known(tmp_path):
    folder = hugging_face(tmp_path / "five", "transformers-cls")
    save_file(
        samples.renamed(samples.tensors("transformers-cls"), **FIVE), folder / "a.safetensors"
    )
    loaded = load(folder)
    samples.equal(loaded.model, "transformers-cls")
    assert loaded.classes == tuple(f"kind {i}" for i in range(7))
    assert not [line for line in loaded.report.told if "heads" in line or "eps" in line]


def test_shards_are_joined_by_their_index(tmp_path):
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
    samples.equal(load(folder).model, "transformers-cls")
    samples.equal(load(index).model, "transformers-cls")
    listed.pop(names[0])
    index.write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(UserError, match="does not hold what"):
        load(folder)
    index.write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    with pytest.raises(UserError, match="not beside it"):
        load(folder)


def test_a_distillation_token_that_no_head_reads_is_a_register(tmp_path):
    state = samples.tensors("transformers-cls")
    state["vit.embeddings.distillation_token"] = torch.full((1, 1, 36), 0.1)
    places = state["vit.embeddings.position_embeddings"]
    state["vit.embeddings.position_embeddings"] = torch.cat([places[:, :1], places], dim=1)
    folder = hugging_face(tmp_path / "deit", "transformers-cls", model_type="deit")
    save_file(state, folder / "model.safetensors")
    loaded = load(folder)
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


def test_a_processor_says_how_images_are_seen(tmp_path):
    folder = hugging_face(tmp_path / "seen", "transformers-cls")
    save_file(samples.tensors("transformers-cls"), folder / "model.safetensors")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    view = load(folder).view
    assert (view.mean, view.std, view.interpolation) == (
        (0.1, 0.2, 0.3),
        (0.4, 0.5, 0.6),
        "bicubic",
    )
    assert view.crop == pytest.approx(0.875) and view.size == (24, 30)


def test_a_crop_gives_the_processors_size_again():
    sizes = [(inner, outer) for inner in range(16, 300) for outer in range(inner, 600)]
    assert all(math.floor(inner / share(inner, outer)) == outer for inner, outer in sizes)


def test_a_processor_that_squeezes_is_told_of(tmp_path):
    folder = hugging_face(tmp_path / "seen", "transformers-cls")
    save_file(samples.tensors("transformers-cls"), folder / "model.safetensors")
    squeeze = {"size": {"height": 224, "width": 224}, "resample": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(squeeze))
    loaded = load(folder)
    assert (loaded.view.crop, loaded.view.interpolation) == (1.0, "bilinear")
    assert any("squeezes" in line for line in loaded.report.told)


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
def test_google_arrays_in_each_layout_are_the_model_they_came_from(tmp_path, layout, kind):
    torch.manual_seed(0)
    settings = {"image": 32, "patch": 8, "classes": 5, "width": 32, "depth": 2, "heads": 4}
    model = ViT(ViTConfig(**{**settings, **GOOGLE[kind], "mlp": "gelu_tanh"}))
    for x in model.parameters():
        torch.nn.init.normal_(x)
    np.savez(tmp_path / "google.npz", **google_arrays(model, layout))
    loaded = load(tmp_path / "google.npz")
    assert loaded.model.config.heads == 4
    for name, x in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], x), name
    assert any("tanh" in line for line in loaded.report.told)


def test_big_vision_adds_positions_before_its_cls(tmp_path):
    torch.manual_seed(0)
    model = ViT(ViTConfig(image=32, patch=8, classes=5, width=32, depth=2, heads=4))
    arrays = google_arrays(model, "big_vision")
    arrays["params/pos_embedding"] = arrays["params/pos_embedding"][:, 1:]
    arrays |= {"params/txt/head/kernel": np.ones((2, 2), np.float32), "params/t": np.ones(1)}
    np.savez(tmp_path / "big.npz", **arrays)
    loaded = load(tmp_path / "big.npz")
    assert not loaded.model.pos_embed[:, 0].any()
    assert torch.equal(loaded.model.pos_embed[:, 1:], model.pos_embed[:, 1:])
    assert any("reads text" in line for line in loaded.report.left_out)


def test_bfloat16_arrays_come_as_bare_bytes(tmp_path):
    model = ViT(ViTConfig(image=32, patch=8, classes=5, width=32, depth=1, heads=4))
    short = {}
    for name, array in google_arrays(model, "img").items():
        half = torch.from_numpy(array).to(torch.bfloat16)
        short[name] = half.view(torch.int16).numpy().view("V2")
    np.savez(tmp_path / "short.npz", **short)
    loaded = load(tmp_path / "short.npz")
    expected = model.norm.weight.to(torch.bfloat16).float()
    assert torch.equal(loaded.model.norm.weight, expected)
    assert "numbers bfloat16 -> float32" in loaded.report.adapted


# --- nothing silent ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["blocks.0.attn.relative_bias", "blocks.0*attn.qkv.bias"])
def test_an_unexplained_tensor_stops_the_load(tmp_path, name):
    state = samples.tensors(CLS) | {name: torch.ones(3)}
    with pytest.raises(UserError, match=re.escape(f"no place here for {name}")):
        load(saved(tmp_path / "more.pth", state), vit=HEADS)


@pytest.mark.parametrize(
    "name", ["blocks.1.norm2.bias", "norm.weight", "blocks.0.mlp.fc1.bias", "head.bias"]
)
def test_a_missing_tensor_stops_the_load(tmp_path, name):
    state = samples.tensors(CLS)
    del state[name]
    with pytest.raises(UserError, match="missing"):
        load(saved(tmp_path / "less.pth", state), vit=HEADS)


def test_a_missing_block_stops_the_load(tmp_path):
    state = samples.renamed(samples.tensors(CLS), blocks__1="blocks.2")
    with pytest.raises(UserError, match="number 1 is missing"):
        load(saved(tmp_path / "gap.pth", state), vit=HEADS)


def test_a_tensor_of_another_shape_stops_the_load(tmp_path):
    state = samples.tensors(CLS)
    state["blocks.1.norm1.weight"] = torch.ones(35)
    with pytest.raises(UserError, match=r"blocks\.1\.norm1\.weight as 35, which should be 36"):
        load(saved(tmp_path / "odd.pth", state), vit=HEADS)


def test_a_second_head_without_its_token_stops_the_load(tmp_path):
    state = samples.tensors(CLS) | {"head_dist.weight": torch.ones(7, 36)}
    with pytest.raises(UserError, match=r"head_dist\.weight, for which this model has no place"):
        load(saved(tmp_path / "heads.pth", state), vit=HEADS)


def test_two_norms_at_the_end_stop_the_load(tmp_path):
    state = samples.tensors(CLS)
    state |= {"fc_norm.weight": torch.ones(36), "fc_norm.bias": torch.ones(36)}
    with pytest.raises(UserError, match="two tensors"):
        load(saved(tmp_path / "norms.pth", state), vit=HEADS)


def test_whole_numbers_are_no_weights(tmp_path):
    state = samples.tensors(CLS)
    state["norm.weight"] = torch.ones(36, dtype=torch.int64)
    with pytest.raises(UserError, match="floating point"):
        load(saved(tmp_path / "whole.pth", state), vit=HEADS)


def test_heads_are_asked_for_where_nobody_can_tell(tmp_path):
    path = saved(tmp_path / "bare.pth", samples.tensors("timm-grey"))
    with pytest.raises(UserError, match=r"say it, such as --vit\.heads"):
        load(path)
    assert any("heads 3: said by a flag" in s for s in load(path, vit={"heads": 3}).report.told)


def test_heads_of_published_sizes_are_known_and_told(tmp_path):
    torch.manual_seed(0)
    model = ViT(ViTConfig(image=32, patch=16, width=192, depth=12, heads=3, classes=4))
    path = saved(tmp_path / "bare.pth", model.state_dict())
    loaded = load(path)
    assert loaded.model.config.heads == 3
    assert any(line.startswith("heads 3: as published") for line in loaded.report.told)
    assert loaded.view is None and loaded.classes is None
    assert any("nobody says" in line for line in loaded.report.told)


def test_an_oblong_grid_is_asked_for_where_nobody_can_tell(tmp_path):
    path = saved(tmp_path / "oblong.pth", samples.tensors(CLS))
    with pytest.raises(UserError, match="say the size it was trained at"):
        load(path, vit={"heads": 3})


def test_a_file_without_positions_asks_which_kind_it_had(tmp_path):
    path = saved(tmp_path / "bare.pth", samples.tensors("timm-no-positions"))
    with pytest.raises(UserError, match=r"--vit\.positions"):
        load(path, vit={"heads": 3})


@pytest.mark.parametrize("means", ["half", "imagenet", "clip"])
def test_a_flag_says_how_images_were_normalised(tmp_path, means):
    from vitrail.data.config import MEANS

    path = saved(tmp_path / "bare.pth", samples.tensors(CLS))
    loaded = load(path, vit=HEADS, preprocess=means)
    assert (loaded.view.mean, loaded.view.std) == MEANS[means]
    assert any(means in line for line in loaded.report.told)


def test_a_known_name_brings_heads_preprocessing_and_classes(tmp_path):
    torch.manual_seed(0)
    model = ViT(ViTConfig(width=192, depth=12, heads=3, classes=1000))
    path = saved(tmp_path / "deit_tiny_patch16_224-a1311bcf.pth", {"model": model.state_dict()})
    loaded = load(path)
    assert loaded.view.mean == (0.485, 0.456, 0.406)
    assert loaded.classes[:2] == ("tench", "goldfish") and len(set(loaded.classes)) == 1000
    assert sum("DeiT-Ti/16" in line for line in loaded.report.told) >= 3


def test_a_known_name_over_other_shapes_is_not_believed(tmp_path):
    path = saved(tmp_path / "deit_tiny_patch16_224-a1311bcf.pth", samples.tensors("timm-grey"))
    loaded = load(path, vit={"heads": 3})
    assert loaded.view is None
    assert any("not believed" in line for line in loaded.report.told)


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
    loaded = load(timm_folder(tmp_path / "timm", config))
    samples.equal(loaded.model, CLS)
    assert (loaded.view.crop, loaded.view.interpolation) == (0.95, "bilinear")
    assert loaded.view.mean == (0.5, 0.4, 0.3) and loaded.classes == tuple(LABELS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "vit_base_patch16_rope_ape_224"}, "no plain ViT"),
        ({"architecture": "vit_base_patch16_clip_quickgelu_224"}, "no plain ViT"),
        ({"model_args": {**ARGUMENTS, "attn_layer": "diff"}}, "not known here"),
        ({"model_args": {**ARGUMENTS, "act_layer": "relu"}}, "not known here"),
        ({"label_names": LABELS[:5]}, "5 names"),
        ({"label_names": {"0": "a", "2": "b"}}, "leaves numbers out"),
        ({"pretrained_cfg": 3}, "odd"),
    ],
)
def test_a_config_that_cannot_be_followed_stops_the_load(tmp_path, changes, words):
    config = {"architecture": "vit_tiny_patch16_224", "model_args": ARGUMENTS}
    config |= {"pretrained_cfg": INNER, **changes}
    with pytest.raises(UserError, match=words):
        load(timm_folder(tmp_path / "timm", config))


def test_a_config_of_another_model_stops_the_load(tmp_path):
    folder = hugging_face(tmp_path / "other", "transformers-cls", num_hidden_layers=5)
    save_file(samples.tensors("transformers-cls"), folder / "model.safetensors")
    with pytest.raises(UserError, match="do not belong together"):
        load(folder)


def test_class_names_that_occur_twice_get_their_number(tmp_path):
    names = ["crane", "b", "c", "crane", "e", "f", "g"]
    config = {"architecture": "vit_tiny_patch16_224", "model_args": ARGUMENTS}
    folder = timm_folder(tmp_path / "t", config | {"pretrained_cfg": INNER, "label_names": names})
    loaded = load(folder)
    assert loaded.classes == ("crane", "b", "c", "crane (3)", "e", "f", "g")


# --- our own files, and where they lie -----------------------------------------------------------


def own(path: Path) -> ViT:
    torch.manual_seed(0)
    model = ViT(ViTConfig(image=32, patch=8, width=32, depth=2, heads=4, classes=3))
    view = {"size": 32, "crop": 0.9, "mean": [0.1], "std": [0.2], "channels": 3}
    save_model(path, model, {"classes": ["a", "b", "c"], "preprocess": view, "temperature": 1.5})
    return model


@pytest.mark.parametrize("folder", [True, False])
def test_a_file_of_ours_explains_itself(tmp_path, folder):
    model = own(tmp_path / "model.safetensors")
    loaded = load(tmp_path if folder else tmp_path / "model.safetensors")
    for name, x in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], x)
    assert loaded.classes == ("a", "b", "c") and loaded.view.mean == (0.1, 0.1, 0.1)
    assert loaded.facts["temperature"] == 1.5 and loaded.report.told == []


def test_a_file_of_ours_is_fitted_like_any_other(tmp_path):
    own(tmp_path / "model.safetensors")
    loaded = load(tmp_path, vit={"image": (16, 48), "classes": 5, "channels": 1})
    assert loaded.model.config.size == (16, 48)
    assert loaded.view.size == (16, 48) and loaded.view.mean == (0.1,)
    assert loaded.classes is None
    assert loaded.model(torch.zeros(1, 1, 16, 48)).shape == (1, 5)


def test_a_name_of_the_table_leads_to_the_hub(tmp_path, monkeypatch):
    asked = []

    def fetch(name: str) -> Path:
        asked.append(name)
        return samples.save("timm-grey", tmp_path / "fetched")

    monkeypatch.setattr("vitrail.zoo.hub.fetch", fetch)
    load("Ti/16 augreg-in21k-in1k", vit={"heads": 3})
    assert asked == ["timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"]


def test_nothing_and_several_things_are_no_weights(tmp_path):
    with pytest.raises(UserError, match="no file or folder"):
        load(tmp_path / "absent")
    with pytest.raises(UserError, match="no weights"):
        load(tmp_path)
    for name in "ab":
        saved(tmp_path / f"{name}.pth", samples.tensors(CLS))
    with pytest.raises(UserError, match="several weight files"):
        load(tmp_path)


def test_a_file_of_something_else_names_what_it_holds(tmp_path):
    with pytest.raises(UserError, match=r"no Vision Transformer.*conv1\.weight"):
        load(saved(tmp_path / "resnet.pth", {"conv1.weight": torch.ones(2, 2)}))


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
def test_what_is_no_weight_file_is_called_by_its_name(tmp_path, start, words):
    (tmp_path / "weights.pth").write_bytes(start)
    with pytest.raises(UserError, match=words):
        load(tmp_path / "weights.pth")


def test_a_tilde_before_no_user_is_a_letter_like_others():
    with pytest.raises(UserError, match="there is no file or folder ~nobody-of-this-name/weights"):
        load("~nobody-of-this-name/weights")


# --- the real thing ------------------------------------------------------------------------------


def test_the_real_weights_load_whole(shared):
    loaded = load(shared / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    assert loaded.report.loaded == 152 and loaded.report.left_out == []
    assert sum(x.numel() for x in loaded.model.parameters()) == 5_717_416
    assert loaded.classes[0] == "tench" and loaded.view.crop == 0.9
