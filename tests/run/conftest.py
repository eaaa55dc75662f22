"""Runs small enough to be made in a second."""

import os
import signal

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from vitrail.run import run
from vitrail.run.drive import Driver

SMALL = {
    "vit": {"width": 16, "depth": 1, "heads": 1},
    "train": {"steps": 30, "batch": 64, "ema": 0.9, "log_every": 5, "save_every": 3600},
    "data": {"workers": 0, "augment": {"mixup": 0.5, "shift": 0.1}},
}


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """Trains a tiny model on digits: `digits(out, **wishes)`."""
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)

    def train(out="run", changes=SMALL, report=False, **wishes):
        return run.train(
            "digits", out=tmp_path / out, changes=changes, report=report, quiet=True, **wishes
        )

    return train


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A folder of tiny pictures in given splits: 16 steps of 4, looked at after steps 12 and 16."""
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    luck = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 1), ("test", 1)):
        for number, label in enumerate(("dark", "light")):
            (tmp_path / "photos" / split / label).mkdir(parents=True)
            for picture in range(count):
                pixels = luck.integers(0, 60, (16, 16, 3)) + 190 * number
                path = tmp_path / "photos" / split / label / f"{picture}.png"
                Image.fromarray(pixels.astype(np.uint8)).save(path)
    return tmp_path / "photos"


FEW = {
    **SMALL,
    "train": {"steps": 16, "batch": 4, "ema": 0.9, "log_every": 1, "save_every": 3600},
}
UNKEPT = {**FEW, "data": {"workers": 0, "cache_gb": 0, "disk_gb": 0}}  # decoded in every epoch


@pytest.fixture
def on_photos(photos, tmp_path):
    """Trains a tiny model on them: `on_photos(out, changes)`."""

    def train(out="run", changes=FEW, **wishes):
        return run.train(
            photos, out=tmp_path / out, changes=changes, report=False, quiet=True, **wishes
        )

    return train


@pytest.fixture
def stop_at(monkeypatch):
    """Sends a signal to the run itself when it has done so many steps."""
    note = Driver.note

    def at(number, signal_number=signal.SIGTERM):
        def noting(self, step):
            note(self, step)
            if step.number == number:
                os.kill(os.getpid(), signal_number)

        monkeypatch.setattr(Driver, "note", noting)

    yield at


def tensors(folder):
    """Every tensor a run ends with: the kept model, and all of the last state."""
    state = sorted((folder / "checkpoints").glob("step-*"))[-1]
    return load_file(folder / "model.safetensors") | load_file(state / "tensors.safetensors")
