"""A run and its folder: what it writes, how it stops, how it resumes."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import vitrail
from tests.data.sources.test_builtin import write_photos
from tests.run.conftest import FEW, SMALL, tensors
from vitrail.data.loader import Loader
from vitrail.data.sources.catalogue import IMAGENETTE
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.run.build import make_learner
from vitrail.run.drive import Driver, Stopped
from vitrail.run.recipe import Recipe, merge_settings, read_recipe
from vitrail.run.request import read_settings
from vitrail.run.storage.journal import read_journal
from vitrail.run.storage.lock import lock_folder
from vitrail.training import checkpoint
from vitrail.training.loop import Diverged


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_leaves_what_was_promised(digits):
    done = digits()
    names = {path.name for path in done.folder.iterdir()} - {".lock", ".owner", ".data"}
    written = {"recipe.toml", "log.jsonl", "checkpoints", "model.safetensors", "metrics.json"}
    assert names == written | {"predictions.safetensors"}
    assert json.loads((done.folder / "metrics.json").read_text()) == done.metrics
    keys = ["run", "model", "epochs", "steps", "seconds", "val", "test", "trust"]
    assert list(done.metrics) == keys
    assert done.metrics["steps"] == 30
    low, high = done.metrics["test"]["interval"]
    assert low < done.metrics["test"]["accuracy"] < high


def test_the_journal_has_a_line_for_logged_steps_and_epochs(digits):
    lines = read_journal(digits().folder / "log.jsonl")
    steps = [line for line in lines if line["kind"] == "step"]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert [line["step"] for line in steps] == [1, 5, 10, 15, 20, 25, 30]
    assert list(steps[0]) == ["kind", "step", "epoch", "loss", "lr", "images_per_s"]
    expected = ["kind", "epoch", "step", "seconds", "train_loss", "train_accuracy", "val_loss"]
    assert list(epochs[0]) == [*expected, "val_accuracy"]
    assert [line["step"] for line in epochs] == [22, 30]


def test_the_same_seed_gives_the_same_tensors_and_another_seed_others(digits):
    assert equal(tensors(digits("a").folder), tensors(digits("b").folder))
    assert not equal(tensors(digits("a2", seed=1).folder), tensors(digits("b2", seed=2).folder))


def test_a_stopped_run_says_how_to_resume_it(photos, stop_at, tmp_path, capsys):
    stop_at(3)
    with pytest.raises(Stopped):
        vitrail.train(photos, out=tmp_path / "my run", settings=FEW, report=False)
    told = capsys.readouterr().err
    assert "stopped after step 3; resume from the last checkpoint" in told
    assert f"`vitrail resume '{tmp_path}/my run'`" in told


@pytest.mark.parametrize("step", [1, 7, 22, 23])
def test_stopped_and_resumed_equals_never_stopped(digits, stop_at, monkeypatch, step):
    whole = digits("whole")
    with monkeypatch.context():
        stop_at(step)
        with pytest.raises(Stopped) as stopped:
            digits("part")
    assert stopped.value.code == 128 + signal.SIGTERM
    monkeypatch.undo()
    part = vitrail.resume(whole.folder.parent / "part", report=False, quiet=True)
    assert equal(tensors(whole.folder), tensors(part.folder))
    assert part.metrics["val"] == whole.metrics["val"]
    journals = [journal_without_time(folder) for folder in (whole.folder, part.folder)]
    assert journals[0] == journals[1]


def journal_without_time(folder):
    lines = read_journal(folder / "log.jsonl")
    return [
        {k: v for k, v in line.items() if k not in ("seconds", "images_per_s")} for line in lines
    ]


def test_a_run_whose_data_position_is_not_restored_would_be_noticed(digits, stop_at, monkeypatch):
    whole = digits("whole")
    with monkeypatch.context():
        stop_at(7)
        with pytest.raises(Stopped):
            digits("part")
    monkeypatch.undo()
    training = Loader.training
    monkeypatch.setattr(Loader, "training", lambda self, *of, **named: training(self))
    part = vitrail.resume(whole.folder.parent / "part", report=False, quiet=True)
    assert not equal(tensors(whole.folder), tensors(part.folder))


def test_a_run_whose_averaged_weights_are_not_restored_would_be_noticed(
    digits, stop_at, monkeypatch
):
    whole = digits("whole")
    with monkeypatch.context():
        stop_at(7)
        with pytest.raises(Stopped):
            digits("part")
    monkeypatch.undo()
    from vitrail.training.learner import Learner

    restore = Learner.restore

    def forgetful(self, given):
        mine = {
            name: t.clone() for name, t in self.tensors().items() if name.startswith("average/")
        }
        restore(self, {**given, **mine})

    monkeypatch.setattr(Learner, "restore", forgetful)
    part = vitrail.resume(whole.folder.parent / "part", report=False, quiet=True)
    assert not equal(tensors(whole.folder), tensors(part.folder))


def test_a_run_whose_training_accuracy_is_not_restored_would_be_noticed(
    digits, stop_at, monkeypatch
):
    whole = digits("whole")
    with monkeypatch.context():
        stop_at(7)
        with pytest.raises(Stopped):
            digits("part")
    monkeypatch.undo()
    load = checkpoint.load_checkpoint

    def forgetful(folder, **named):
        saved = load(folder, **named)
        return replace(saved, progress={**saved.progress, "epoch_correct": 0})

    monkeypatch.setattr(checkpoint, "load_checkpoint", forgetful)
    part = vitrail.resume(whole.folder.parent / "part", report=False, quiet=True)
    rates = [
        [line.get("train_accuracy") for line in journal_without_time(folder)]
        for folder in (whole.folder, part.folder)
    ]
    assert rates[0] != rates[1] and rates[0][-1] == rates[1][-1]


def test_a_checkpoint_without_training_accuracy_resumes(digits, stop_at, monkeypatch, tmp_path):
    with monkeypatch.context():
        stop_at(7)
        with pytest.raises(Stopped):
            digits("old")
    monkeypatch.undo()
    load, new = checkpoint.load_checkpoint, ("epoch_correct", "epoch_images")

    def older(folder, **named):
        saved = load(folder, **named)
        return replace(saved, progress={k: v for k, v in saved.progress.items() if k not in new})

    monkeypatch.setattr(checkpoint, "load_checkpoint", older)
    assert vitrail.resume(tmp_path / "old", report=False, quiet=True).metrics["steps"] == 30


def test_resuming_a_finished_run_changes_nothing(digits):
    done = digits()
    before = (done.folder / "model.safetensors").read_bytes()
    assert vitrail.resume(done.folder, report=False, quiet=True).metrics == done.metrics
    assert (done.folder / "model.safetensors").read_bytes() == before


def test_a_run_is_not_overwritten(digits):
    done = digits()
    with pytest.raises(UserError, match="already contains a run; resume it with `vitrail resume"):
        digits()
    assert (done.folder / "metrics.json").exists()


def test_a_folder_with_other_files_is_not_used(digits, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="already exists and is not empty"):
        digits()


def test_a_run_that_never_started_leaves_nothing(digits, tmp_path):
    with pytest.raises(UserError):
        digits(settings=merge_settings(SMALL, {"train": {"steps": 0}}), minutes=1e-4)
    assert not (tmp_path / "run").exists()


def test_runs_are_numbered(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)
    changes = merge_settings(SMALL, {"train": {"steps": 2}})
    folders = [
        vitrail.train("digits", settings=changes, report=False, quiet=True).folder.name
        for _ in range(2)
    ]
    assert folders == ["digits-1", "digits-2"]


def test_a_recipe_repeats_a_run(digits, tmp_path):
    done = digits("first")
    again = vitrail.train(
        recipe=done.folder / "recipe.toml", out=tmp_path / "again", report=False, quiet=True
    )
    assert equal(tensors(done.folder), tensors(again.folder))


def test_fewer_images_than_a_batch_is_an_error(digits):
    with pytest.raises(UserError, match=r"fewer than one batch of 5000; lower train.batch to 1024"):
        digits(settings=merge_settings(SMALL, {"train": {"batch": 5000}}))


def test_large_patches_on_small_images_are_refused(digits):
    with pytest.raises(UserError, match=r"has only 4 patches .* try `vit.patch=1`"):
        digits(settings={"vit": {"patch": 4}})


def test_a_stem_of_convolutions_on_small_images_gets_a_patch_that_it_fits(digits):
    with pytest.raises(UserError, match=r"has only 4 patches .* try `vit.patch=2`"):
        digits(settings={"vit": {"patch": 4, "stem": "r9"}})


@pytest.mark.parametrize("train", [{"epochs": 5}, {"steps": 100}])
@pytest.mark.parametrize("wish", [{"minutes": 2}, {"epochs": 3}])
def test_two_lengths_are_refused(digits, train, wish):
    told = rf"`{next(iter(wish))}` and `train\.{next(iter(train))}` both set the length"
    with pytest.raises(UserError, match=told):
        digits(settings={"train": train}, **wish)


def test_a_flag_wins_over_the_length_of_a_recipe_file(tmp_path):
    (tmp_path / "r.toml").write_text("[train]\nepochs = 7\nsteps = 100\nlr = 0.1")
    assert read_settings(tmp_path / "r.toml", {}, 2, None) == {"train": {"lr": 0.1}}
    for length in ({"steps": 5}, {"epochs": 5}):
        told = {"train": {"lr": 0.1, **length}}
        assert read_settings(tmp_path / "r.toml", {"train": length}, None, None) == told
    whole = {"train": {"epochs": 7, "steps": 100, "lr": 0.1}}
    assert read_settings(tmp_path / "r.toml", {}, None, None) == whole


@pytest.mark.parametrize(("every", "looks"), [(0, 1), (1, 2)])
def test_the_number_of_evaluations_is_a_setting(digits, every, looks):
    done = digits(settings=merge_settings(SMALL, {"train": {"evaluate_every": every}}))
    lines = read_journal(done.folder / "log.jsonl")
    assert sum(line.get("val_accuracy") is not None for line in lines) == looks


@pytest.mark.parametrize("weights", [False, True])
def test_a_weighted_first_loss_is_not_compared_with_guessing(photos, monkeypatch, capsys, weights):
    monkeypatch.setattr("vitrail.training.loop.first_loss_hint", lambda loss, classes: "far off")
    changes = merge_settings(FEW, {"train": {"steps": 1, "class_weights": weights}})
    vitrail.train(photos, out=photos.parent / "run", settings=changes, report=False)
    assert ("far off" in capsys.readouterr().err) is not weights


def test_patches_are_dropped_of_the_images_that_are_shown(digits):
    changes = {"preprocess": {"size": 6}, "train": {"steps": 2, "drop_patches": 0.5}}
    assert digits(settings=merge_settings(SMALL, changes)).metrics["steps"] == 2


def test_the_device_has_its_reason(digits):
    changes = {"train": {"steps": 1, "precision": "float32"}}
    done = digits(settings=merge_settings(SMALL, changes), device="cpu")
    assert "# device cpu: requested\n" in (done.folder / "recipe.toml").read_text()


@pytest.mark.parametrize("units", [True, False])
def test_bfloat16_on_a_processor_has_its_reason(digits, monkeypatch, units):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": units})
    done = digits(settings=merge_settings(SMALL, {"train": {"steps": 1}}), device="cpu")
    assert ("it trains in bfloat16" in (done.folder / "recipe.toml").read_text()) == units


@pytest.mark.parametrize("minutes", [0, -1, float("nan"), float("inf")])
def test_minutes_must_be_positive_and_finite(digits, minutes):
    with pytest.raises(UserError, match="give a number above 0"):
        digits(minutes=minutes)


def test_changed_data_stop_a_resume(tmp_path, stop_at, monkeypatch):
    from PIL import Image

    random = np.random.default_rng(0)
    for label in ("a", "b"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for number in range(12):
            pixels = random.integers(0, 255, (16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / label / f"{number}.png")
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    changes = merge_settings(SMALL, {"train": {"batch": 4, "steps": 6}})
    with monkeypatch.context():
        stop_at(2)
        with pytest.raises(Stopped):
            vitrail.train(
                tmp_path / "data", out=tmp_path / "run", settings=changes, report=False, quiet=True
            )
    monkeypatch.undo()
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data" / "a" / "0.png").unlink()
    with pytest.raises(UserError, match="is not the data this run was started with"):
        vitrail.resume(tmp_path / "run", report=False, quiet=True)
    assert (tmp_path / "run" / "checkpoints").exists()


def killed(driver):
    raise KeyboardInterrupt


@pytest.fixture
def begun(on_photos, monkeypatch, tmp_path):
    """A run that was killed before its first checkpoint."""
    with monkeypatch.context() as patch:
        patch.setattr(Driver, "drive", killed)
        with pytest.raises(KeyboardInterrupt):
            on_photos()
    assert not (tmp_path / "run" / "checkpoints").exists()
    return tmp_path / "run"


def test_a_run_without_a_state_goes_on_from_its_first_step(begun, on_photos):
    part = vitrail.resume(begun, report=False, quiet=True)
    assert equal(tensors(part.folder), tensors(on_photos("whole").folder))


def test_changed_data_stop_a_run_that_has_no_state(begun, photos):
    (photos / "train" / "dark" / "0.png").unlink()
    with pytest.raises(UserError, match="is not the data this run was started with"):
        vitrail.resume(begun, report=False, quiet=True)


def test_files_of_another_date_are_told_of_when_a_run_goes_on(begun, photos, monkeypatch, capsys):
    monkeypatch.setattr(Driver, "drive", killed)
    told = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            vitrail.resume(begun, report=False)
        told.append("were modified or copied since this run was started" in capsys.readouterr().err)
        os.utime(photos / "train" / "dark" / "0.png", (1, 1))
    assert told == [False, True]


def test_a_path_is_a_folder_whatever_its_name(photos, tmp_path, monkeypatch):
    photos.rename(tmp_path / "digits")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Driver, "drive", killed)
    with pytest.raises(KeyboardInterrupt):
        vitrail.train(Path("digits"), out="run", settings=FEW, report=False, quiet=True)
    assert read_recipe(tmp_path / "run" / "recipe.toml")["source"] == str(tmp_path / "digits")


def test_a_tilde_is_the_home_folder(photos, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(Driver, "drive", killed)
    with pytest.raises(KeyboardInterrupt):
        vitrail.train(photos, out="~/mine", settings=FEW, report=False, quiet=True)
    assert (tmp_path / "mine" / "recipe.toml").is_file()
    with pytest.raises(KeyboardInterrupt):  # and not: is not a run folder
        vitrail.resume("~/mine", report=False, quiet=True)
    with pytest.raises(UserError, match="is part of the data"):
        vitrail.train(photos, out="~/photos/mine", settings=FEW, report=False, quiet=True)


@pytest.mark.parametrize("noted", [True, False])
def test_a_class_more_stops_a_run_that_has_no_state(begun, photos, noted):
    for split in ("train", "val", "test"):
        shutil.copytree(photos / split / "dark", photos / split / "darker")
    if not noted:  # by an older version
        (begun / ".data").unlink()
    with pytest.raises(UserError, match="is not the data this run was started with"):
        vitrail.resume(begun, report=False, quiet=True)


@pytest.mark.parametrize("marks", [[".lock"], [".lock", ".launch", ".data"]])
def test_what_a_run_left_that_never_began_is_no_obstacle(digits, tmp_path, marks):
    torn = tmp_path / "run" / ".recipe.toml.x1y2.tmp"
    torn.mkdir(parents=True)
    (torn / "recipe.toml").write_text("for")
    for name in marks:
        (tmp_path / "run" / name).write_text("of another")
    folder = digits(settings=merge_settings(SMALL, {"train": {"steps": 2}})).folder
    assert not torn.exists() and not (folder / ".launch").exists()


def test_a_run_that_has_not_begun_yet_is_not_disturbed(digits, tmp_path):
    (tmp_path / "run").mkdir()
    with lock_folder(tmp_path / "run"), pytest.raises(UserError, match="is in use by process"):
        digits()
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {".lock", ".owner"}


@pytest.mark.parametrize("out", [None, "mine", "train/new"])
def test_a_run_is_not_written_into_the_data(photos, monkeypatch, out):
    monkeypatch.chdir(photos)
    before = sorted(photos.rglob("*"))
    with pytest.raises(UserError, match=r"is part of the data, .* choose another `out`"):
        vitrail.train(".", out=out, settings=FEW, report=False, quiet=True)
    assert sorted(photos.rglob("*")) == before


def test_a_built_in_set_of_files_keeps_its_name(tmp_path, monkeypatch):
    write_photos(tmp_path / "data" / "imagenette", IMAGENETTE)
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)
    monkeypatch.chdir(tmp_path)
    larger = merge_settings(FEW, {"vit": {"image": 16}})
    with monkeypatch.context() as patch:
        patch.setattr(Driver, "drive", killed)
        with pytest.raises(KeyboardInterrupt):
            vitrail.train("imagenette", out="run", settings=larger, report=False, quiet=True)
    assert read_recipe(tmp_path / "run" / "recipe.toml")["source"] == "imagenette"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = vitrail.resume(tmp_path / "run", report=False, quiet=True)
    recipe = done.folder / "recipe.toml"
    again = vitrail.train(recipe=recipe, out="again", report=False, quiet=True)
    assert equal(tensors(done.folder), tensors(again.folder))


def test_a_loss_that_is_not_finite_stops_and_saves(digits, monkeypatch, tmp_path):
    training = Loader.training

    def poisoned(self, *of, **named):
        for batch in training(self, *of, **named):
            if batch.step == 5:
                batch.images[0, 0, 0, 0] = float("nan")
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(Loader, "training", poisoned)
        with pytest.raises(Diverged, match=r"step 6 .*contain NaN"):
            digits()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000005"]


def test_patience_stops_early(digits, monkeypatch):
    monkeypatch.setattr("vitrail.run.drive.is_better", lambda new, best, images: best is None)
    done = digits(settings=merge_settings(SMALL, {"train": {"steps": 200, "patience": 2}}))
    assert (
        done.metrics["epochs"] == 6
    )  # at the second evaluation, as there is one every third epoch


def test_a_second_process_is_refused(digits, tmp_path, monkeypatch):
    refused = []
    drive = Driver.drive

    def meanwhile(self):
        with pytest.raises(UserError, match="is in use by process") as error:
            vitrail.resume(tmp_path / "run", report=False, quiet=True)
        refused.append(error)
        drive(self)

    monkeypatch.setattr(Driver, "drive", meanwhile)
    digits()
    assert refused


@pytest.mark.parametrize(
    ("vit", "still"), [({}, True), ({"qk_norm": True}, False), ({"positions": "rotary"}, False)]
)
def test_a_key_bias_moves_only_where_it_changes_attention(vit, still):
    size = {"image": 8, "patch": 4, "width": 16, "depth": 1, "heads": 2}
    config = ViTConfig(classes=3, pool="avg", **size, **vit)
    learner = make_learner(Recipe(vit=config), torch.device("cpu"))
    torch.nn.init.normal_(learner.model.head.weight)  # it starts at zero
    learner.model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    _, key, value = learner.model.blocks[0].attn.qkv.bias.grad.chunk(3)
    assert bool((key == 0).all()) == still and (value != 0).all()
