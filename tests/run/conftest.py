"""Runs small enough to be made in a second."""

import os
import signal

import pytest
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
    state = sorted((folder / "state").glob("step-*"))[-1]
    return load_file(folder / "model.safetensors") | load_file(state / "tensors.safetensors")
