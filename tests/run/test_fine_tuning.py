"""Training from weights: they arrive whole, learn slowly at the bottom, and may be gone later."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import vitrail
from tests.run.conftest import SMALL, tensors
from tests.run.test_run import equal
from vitrail.data.augment import mixup_or_cutmix
from vitrail.errors import UserError
from vitrail.run import transfer
from vitrail.run.drive import Driver, Stopped
from vitrail.run.recipe import merge_settings, read_recipe
from vitrail.zoo.adapters import MATRICES

AGAIN = {
    "train": {"steps": 24, "batch": 64, "log_every": 5, "save_every": 3600},
    "data": {"workers": 0},
}

FASTER = merge_settings(AGAIN, {"train": {"lr": 5e-3, "probe": 0}})  # no linear probe to keep


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "source"
    return vitrail.train("digits", out=out, settings=SMALL, report=False, quiet=True).folder


@pytest.fixture
def weights(source, tmp_path):
    """A tiny run to start from, and to change."""
    return Path(shutil.copytree(source, tmp_path / "source"))


@pytest.fixture
def bare(weights, tmp_path):
    """Its tensors alone: no file beside them says what model they are."""
    save_file(load_file(weights / "model.safetensors"), tmp_path / "bare.safetensors")
    return tmp_path / "bare.safetensors"


def test_a_fine_tuning_begins_with_the_weights_and_low_rates_for_early_layers(
    digits, weights, monkeypatch
):
    begun = {}
    drive = Driver.drive

    def noting(self):
        begun.update(
            {name: p.detach().clone() for name, p in self.learner.model.named_parameters()}
        )
        of = {
            p: group["scale"]
            for group in self.learner.optimizer.param_groups
            for p in group["params"]
        }
        begun["scales"] = {name: of[p] for name, p in self.learner.model.named_parameters()}
        drive(self)

    monkeypatch.setattr(Driver, "drive", noting)
    done = digits("tuned", FASTER, weights=str(weights))
    scales = begun.pop("scales")
    theirs, ours = (load_file(path / "model.safetensors") for path in (weights, done.folder))
    heads = ("head.weight", "head.bias")
    assert begun.keys() == theirs.keys()
    assert all(torch.equal(begun[name], theirs[name]) for name in begun if name not in heads)
    assert not begun["head.weight"].any() and not begun["head.bias"].any()
    assert not torch.equal(ours["patch_embed.proj.weight"], theirs["patch_embed.proj.weight"])
    wanted = {"patch_embed.proj.weight": 0.75**2, "blocks.0.attn.qkv.weight": 0.75}
    wanted |= {"norm.weight": 1.0, "head.weight": 1.0}
    assert {name: scales[name] for name in wanted} == pytest.approx(wanted)


def test_fine_tuning_resumes_without_its_original_weights(
    digits, weights, stop_at, monkeypatch, tmp_path
):
    whole = digits("whole", AGAIN, weights=str(weights))
    with monkeypatch.context():
        stop_at(7)
        with pytest.raises(Stopped):
            digits("part", AGAIN, weights=str(weights))
    monkeypatch.undo()
    weights.rename(tmp_path / "elsewhere")
    part = vitrail.resume(tmp_path / "part", report=False, quiet=True)
    assert equal(tensors(whole.folder), tensors(part.folder))


def test_a_recipe_repeats_a_fine_tuning(digits, weights, tmp_path):
    done = digits("tuned", AGAIN, weights=str(weights))
    recipe = done.folder / "recipe.toml"
    again = vitrail.train(recipe=recipe, out=tmp_path / "again", report=False, quiet=True)
    assert equal(tensors(done.folder), tensors(again.folder))


def test_the_argument_weights_wins_over_the_recipe(digits, weights, tmp_path):
    (tmp_path / "r.toml").write_text('weights = "nowhere"')
    done = digits("tuned", AGAIN, weights=str(weights), recipe=tmp_path / "r.toml")
    assert read_recipe(done.folder / "recipe.toml")["weights"] == str(weights)


def test_weights_are_fitted_to_other_patches_and_sizes(digits, weights):
    changes = merge_settings(AGAIN, {"vit": {"image": 16, "patch": 4}})
    recipe = read_recipe(digits("tuned", changes, weights=str(weights)).folder / "recipe.toml")
    assert (recipe["vit"]["patch"], recipe["preprocess"]["size"]) == (4, 16)


@pytest.mark.parametrize(
    ("vit", "answer"),
    [
        ({"width": 32}, "has width 16, not 32; weights cannot be adapted"),
        ({"pool": "cls"}, "has pool avg, not cls; weights cannot be adapted"),
        ({"depth": 3}, "has 1 blocks, too few for depth 3"),
        ({"patch": 3}, "is not a multiple of patch 3"),
        ({"qk_norm": True}, "has qk_norm False, not True"),
    ],
)
def test_a_model_that_the_weights_cannot_be_is_one_line(digits, weights, vit, answer):
    with pytest.raises(UserError, match=answer):
        digits("tuned", merge_settings(AGAIN, {"vit": vit}), weights=str(weights))


def test_a_model_beside_weights_is_refused(digits, weights):
    with pytest.raises(UserError, match=r"`model` Nano/4 and `weights` .* both name a model"):
        digits("tuned", AGAIN, weights=str(weights), model="Nano/4")


def test_what_bare_weights_do_not_say_must_be_said(digits, bare):
    said = merge_settings(AGAIN, {"vit": {"image": 8, "positions": "sincos"}})
    with pytest.raises(UserError, match=r"how many attention heads .* `vit\.heads=1`"):
        digits("tuned", said, weights=str(bare))
    said = merge_settings(said, {"vit": {"heads": 2}})
    for view in ({}, {"mean": [0.5]}):
        with pytest.raises(UserError, match=r"how its images were normalised; set preprocess.mean"):
            digits("tuned", merge_settings(said, {"preprocess": view}), weights=str(bare))
    said = merge_settings(said, {"preprocess": {"mean": [0.4], "std": [0.3]}})
    said = merge_settings(said, FASTER)
    folder = digits("tuned", said, weights=str(bare)).folder
    recipe, reasons = read_recipe(folder / "recipe.toml"), (folder / "recipe.toml").read_text()
    assert recipe["vit"]["heads"] == 2 and recipe["preprocess"]["mean"] == [0.4]
    assert "# preprocessing: as requested; the weight file does not store its own" in reasons
    first = load_file(bare)["patch_embed.proj.weight"]
    assert not torch.equal(
        load_file(folder / "model.safetensors")["patch_embed.proj.weight"], first
    )


TUNES = ("head", "proj", "lora")


@pytest.mark.parametrize("tune", TUNES)
def test_a_part_learns_and_the_adapter_restores_the_model_on_its_base(digits, weights, tune):
    done = digits("tuned", FASTER, weights=str(weights), tune=tune)
    theirs, ours = (load_file(path / "model.safetensors") for path in (weights, done.folder))
    changed = {name for name in ours if not torch.equal(ours[name], theirs[name])}
    expected = {
        "head": set(),
        "proj": {"blocks.0.attn.proj.weight", "blocks.0.attn.proj.bias"},
        "lora": {f"blocks.0.{name}.weight" for name in MATRICES},
    }
    assert changed - {"head.weight", "head.bias"} == expected[tune]
    again = vitrail.load(done.folder / "adapter.safetensors")
    images = torch.rand(4, 1, 8, 8)
    with torch.inference_mode():
        mine, merged = again.model(images), done.classifier.model(images)
    assert torch.allclose(mine, merged, atol=1e-6)
    assert again.classes == done.classifier.classes
    assert again.preprocess == done.classifier.preprocess


def test_an_adapter_on_another_base_is_refused(digits, weights, tmp_path):
    done = digits("tuned", AGAIN, weights=str(weights), tune="proj")
    weights.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="does not exist"):
        vitrail.load(done.folder / "adapter.safetensors")
    tensors = load_file(tmp_path / "elsewhere" / "model.safetensors")
    with safe_open(tmp_path / "elsewhere" / "model.safetensors", "pt") as file:
        metadata = json.loads(file.metadata()["vitrail"])
    tensors["norm.bias"] += 1
    weights.mkdir()
    metadata.pop("checksums")
    save_file(tensors, weights / "model.safetensors", {"vitrail": json.dumps(metadata)})
    with pytest.raises(UserError, match="belongs to other base weights"):
        vitrail.load(done.folder / "adapter.safetensors")


@pytest.mark.parametrize("tune", ("head", "lora"))
def test_cached_features_and_adapters_resume_bit_for_bit(
    digits, weights, stop_at, monkeypatch, tmp_path, tune
):
    settings = merge_settings(AGAIN, {"train": {"ema": 0.9, "lr": 5e-3}})
    whole = digits("whole", settings, weights=str(weights), tune=tune)
    with monkeypatch.context():
        stop_at(7)
        with pytest.raises(Stopped):
            digits("part", settings, weights=str(weights), tune=tune)
    monkeypatch.undo()
    part = vitrail.resume(tmp_path / "part", report=False, quiet=True)
    assert equal(tensors(whole.folder), tensors(part.folder))
    assert part.metrics["expected"] == whole.metrics["expected"]


def test_frozen_blocks_are_cached_and_resume_bit_for_bit(
    tmp_path, weights, digits, stop_at, monkeypatch
):
    deep = digits("deep", merge_settings(SMALL, {"vit": {"depth": 2}})).folder
    settings = merge_settings(FASTER, {"train": {"frozen": 1, "patience": 9, "ema": 0.9}})
    mixed = {"train": {"class_weights": True}, "data": {"augment": {"mixup": 0.4, "flip": 0.5}}}
    settings = merge_settings(settings, mixed)
    whole = digits("whole", settings, weights=str(deep))
    theirs, ours = (load_file(path / "model.safetensors") for path in (deep, whole.folder))
    changed = {name for name in ours if not torch.equal(ours[name], theirs[name])}
    assert changed and not any(name.startswith(("blocks.0", "patch_embed")) for name in changed)
    with monkeypatch.context():
        stop_at(7)
        with pytest.raises(Stopped):
            digits("part", settings, weights=str(deep))
    monkeypatch.undo()
    part = vitrail.resume(tmp_path / "part", report=False, quiet=True)
    assert equal(tensors(whole.folder), tensors(part.folder))


@pytest.mark.parametrize("flip", (0.0, 1.0))
def test_cached_blocks_are_mirrored_only_as_requested_and_mixed(digits, weights, monkeypatch, flip):
    settings = merge_settings(AGAIN, {"data": {"augment": {"mixup": 0.4, "flip": flip}}})
    mixed, seen = mixup_or_cutmix, []

    def noting(x, labels, *rest):
        seen.append((x, labels))
        return mixed(x, labels, *rest)

    monkeypatch.setattr("vitrail.data.augment.mixup_or_cutmix", noting)
    caches = []
    make = transfer.cache_tokens
    monkeypatch.setattr(
        transfer, "cache_tokens", lambda *args: caches.append(make(*args)) or caches[-1]
    )
    digits("tuned", settings, weights=str(weights), tune="head")
    (cache,) = caches
    assert len(cache) == (2 if flip else 1) and len(seen) == AGAIN["train"]["steps"]
    rows = {tuple(row) for row in cache[-1].tolist()}
    assert all(tuple(row) in rows for row in seen[0][0].tolist())


@pytest.mark.parametrize("change", [{"scale": 0.5}, {"cutmix": 1.0}])
def test_augmentation_of_pixels_is_refused_for_cached_blocks(digits, weights, change):
    settings = merge_settings(AGAIN, {"data": {"augment": change}})
    (name,) = change
    with pytest.raises(UserError, match=rf"data\.augment\.{name} changes pixels, and frozen"):
        digits("tuned", settings, weights=str(weights), tune="head")


def test_what_to_expect_is_stored_and_the_run_does_not_end_below_the_probe(digits, weights):
    settings = merge_settings(AGAIN, {"train": {"lr": 0.9, "clip": 0.0, "steps": 3}})
    done = digits("ruined", settings, weights=str(weights))
    expected = done.metrics["expected"]
    low, high = expected["interval"]
    assert low < expected["accuracy"] < high
    assert done.metrics["val"]["accuracy"] > expected["accuracy"] - 0.1


@pytest.mark.parametrize("tune", TUNES)
def test_a_part_of_nothing_is_refused(digits, tune):
    with pytest.raises(UserError, match=rf"`tune` {tune} changes a part of pretrained weights"):
        digits("tuned", tune=tune, weights="none")


def test_an_unknown_tune_is_one_line(digits, weights):
    with pytest.raises(UserError, match="`tune` 'some' is unknown; choose auto or one of all"):
        digits("tuned", AGAIN, weights=str(weights), tune="some")
