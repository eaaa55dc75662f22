"""Real kills: a process that dies at any moment and is resumed ends as if it had lived."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.run.conftest import tensors

FLAGS = [
    *("train", "digits", "--vit.width", "16", "--vit.depth", "1", "--vit.heads", "1"),
    *("--train.batch", "32", "--train.ema", "0.9", "--data.augment.mixup", "0.5"),
    *("--train.save-every", "1", "--train.log-every", "1", "--train.steps", "600"),
]


def start(*arguments, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vitrail", *arguments]
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_line(process, journal, count):
    """Until the journal has so many lines, or the process is done."""
    while process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    process = start(*FLAGS, "--out", "run", cwd=folder)
    _, told = process.communicate()
    assert process.returncode == 0, told
    return folder / "run"


@pytest.mark.slow
def test_killed_at_many_moments_it_ends_with_the_same_tensors(tmp_path, whole):
    journal = tmp_path / "run" / "journal.jsonl"
    process = start(*FLAGS, "--out", "run", cwd=tmp_path)
    for lines in (3, 150, 400):  # before a state was saved, and between states
        wait_for_line(process, journal, lines)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        process = start("resume", "run", cwd=tmp_path)
    _, told = process.communicate()
    assert process.returncode == 0, told
    ours, theirs = tensors(tmp_path / "run"), tensors(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_with_its_code_after_saving(tmp_path, number, code):
    process = start(*FLAGS, "--train.save-every", "600", "--out", "run", cwd=tmp_path)
    wait_for_line(process, tmp_path / "run" / "journal.jsonl", 20)
    process.send_signal(number)
    _, told = process.communicate()
    assert process.returncode == code, told
    assert "Traceback" not in told
    assert len(list((tmp_path / "run" / "state").glob("step-*"))) == 1
