"""Uneven, tiny and grey sets train with the recipe that is chosen for them."""

import sys

import numpy as np
import pytest
from PIL import Image

import vitrail
from vitrail.errors import UserError
from vitrail.run.drive import Stopped
from vitrail.run.recipe import read_recipe


def folder_of(path, counts, mode="RGB", side=20):
    """Classes that differ in brightness: even a tiny model learns them."""
    luck = np.random.default_rng(0)
    for number, (name, count) in enumerate(counts.items()):
        (path / name).mkdir(parents=True)
        for picture in range(count):
            shape = (side, side) if mode == "L" else (side, side, 3)
            pixels = luck.integers(0, 60, shape) + 190 * number
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8), mode).save(
                path / name / f"{picture}.png"
            )
    return path


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)

    def go(data, **wishes):
        done = vitrail.train(data, out=tmp_path / "run", quiet=True, report=False, **wishes)
        return done.metrics, read_recipe(done.folder / "recipe.toml")

    return go


@pytest.mark.slow
def test_twelve_images_are_enough_to_begin(train, tmp_path):
    data = folder_of(tmp_path / "data", {"dark": 6, "light": 6})
    metrics, recipe = train(data, epochs=10)
    assert recipe["train"]["batch"] <= 8 and metrics["val"]["accuracy"] == 1


@pytest.mark.slow
def test_grey_pictures_train_with_one_channel(train, tmp_path):
    data = folder_of(tmp_path / "data", {"dark": 20, "light": 20}, mode="L")
    metrics, recipe = train(data, epochs=8)
    assert recipe["vit"]["channels"] == 1 and recipe["data"]["augment"]["flip"] == 0
    assert metrics["test"]["accuracy"] == 1


@pytest.mark.slow
def test_a_rare_class_is_found(train, tmp_path):
    data = folder_of(tmp_path / "data", {"dark": 90, "light": 6})
    metrics, recipe = train(data, epochs=6)
    assert recipe["data"]["balanced"] and metrics["val"]["accuracy"] == 1


def test_tensorboard_goes_on_with_a_run(digits, stop_at, monkeypatch, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with monkeypatch.context():
        stop_at(7)
        with pytest.raises(Stopped):
            digits(tensorboard=True)
    monkeypatch.undo()
    vitrail.resume(tmp_path / "run", report=False, quiet=True)
    board = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert [one.step for one in board.Scalars("step/loss")] == [1, 5, 10, 15, 20, 25, 30]


def test_without_tensorboard_nothing_is_begun_and_a_run_goes_on(
    digits, stop_at, monkeypatch, tmp_path, capsys
):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(UserError, match="TensorBoard is not installed; run pip install"):
        digits(tensorboard=True)
    assert not (tmp_path / "run").exists()
    stop_at(7)
    with pytest.raises(Stopped):
        digits()
    (tmp_path / "run" / "tensorboard").mkdir()
    assert vitrail.resume(tmp_path / "run", report=False).metrics["steps"] == 30
    assert "resuming without its events" in capsys.readouterr().err


def test_tensorboard_shows_what_the_journal_has(train, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train("digits", epochs=1, tensorboard=True, settings={"vit": {"width": 16, "depth": 1}})
    board = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert {"step/loss", "epoch/val_accuracy"} <= set(board.Tags()["scalars"])
    assert board.Scalars("epoch/val_accuracy")[-1].step > 0
