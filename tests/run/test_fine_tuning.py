"""Training from weights: they arrive whole, learn slowly at the bottom, and may be gone later."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitrail
from tests.run.conftest import tensors
from tests.run.test_run import equal
from vitrail.errors import UserError
from vitrail.run.drive import Driver, Stopped
from vitrail.run.recipe import merge_settings, read_recipe

AGAIN = {
    "train": {"steps": 24, "batch": 64, "log_every": 5, "save_every": 3600},
    "data": {"workers": 0},
}


@pytest.fixture
def weights(digits):
    """A tiny run to start from."""
    return digits("source").folder


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
    done = digits("tuned", AGAIN, weights=str(weights))
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
    folder = digits("tuned", said, weights=str(bare)).folder
    recipe, reasons = read_recipe(folder / "recipe.toml"), (folder / "recipe.toml").read_text()
    assert recipe["vit"]["heads"] == 2 and recipe["preprocess"]["mean"] == [0.4]
    assert "# preprocessing: as requested; the weight file does not store its own" in reasons
    first = load_file(bare)["patch_embed.proj.weight"]
    assert not torch.equal(
        load_file(folder / "model.safetensors")["patch_embed.proj.weight"], first
    )
