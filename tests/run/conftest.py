"""Runs small enough to be made in a second."""

import os
import signal

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

import vitrail
from vitrail.heads import logistic
from vitrail.run.drive import Driver

SMALL = {
    "vit": {"width": 16, "depth": 1, "heads": 1},
    "train": {"steps": 30, "batch": 64, "ema": 0.9, "log_every": 5, "save_every": 3600},
    "data": {"workers": 0, "augment": {"mixup": 0.5, "shift": 0.1}},
}


@pytest.fixture(scope="module", autouse=True)
def small_probes():
    """Probes of few iterations: fitting them takes longer than a tiny pretraining."""

    def fit(*arguments):
        with pytest.MonkeyPatch.context() as fewer:
            fewer.setattr(logistic, "ITERATIONS", 5)
            return logistic.fit_logistic(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.run.quality.fit_logistic", fit)
        yield


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """Trains a tiny model on digits: `digits(out, **arguments)`."""
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)

    def train(out="run", settings=SMALL, report=False, **arguments):
        return vitrail.train(
            "digits", out=tmp_path / out, settings=settings, report=report, quiet=True, **arguments
        )

    return train


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A folder of tiny images in given splits: 16 steps of 4, evaluated after steps 12 and 16."""
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 1), ("test", 1)):
        for number, label in enumerate(("dark", "light")):
            (tmp_path / "photos" / split / label).mkdir(parents=True)
            for picture in range(count):
                pixels = rng.integers(0, 60, (16, 16, 3)) + 190 * number
                path = tmp_path / "photos" / split / label / f"{picture}.png"
                Image.fromarray(pixels.astype(np.uint8)).save(path)
    return tmp_path / "photos"


FEW = {
    **SMALL,
    "train": {"steps": 16, "batch": 4, "ema": 0.9, "log_every": 1, "save_every": 3600},
}
UNCACHED = {**FEW, "data": {"workers": 0, "cache_gb": 0, "disk_gb": 0}}  # decoded in every epoch


@pytest.fixture
def on_photos(photos, tmp_path):
    """Trains a tiny model on them: `on_photos(out, settings)`."""

    def train(out="run", settings=FEW, **arguments):
        return vitrail.train(
            photos, out=tmp_path / out, settings=settings, report=False, quiet=True, **arguments
        )

    return train


@pytest.fixture
def stop_at(monkeypatch):
    """Sends a signal to this process after the given step."""
    record = Driver.record_step

    def at(number, signal_number=signal.SIGTERM):
        def recording(self, step):
            record(self, step)
            if step.number == number:
                os.kill(os.getpid(), signal_number)

        monkeypatch.setattr(Driver, "record_step", recording)

    yield at


def tensors(folder):
    """Every tensor a run ends with: the best model, and all of the last checkpoint."""
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    return load_file(folder / "model.safetensors") | load_file(newest / "tensors.safetensors")
