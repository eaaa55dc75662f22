"""What can happen to processes that torchrun started, and that it is survived."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.run.conftest import tensors
from tests.training.ranks import free_port
from vitrail.training import checkpoint

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    *("--vit.width", "16", "--vit.depth", "1", "--vit.heads", "1", "--train.log-every", "1"),
    *("--train.save-every", "3600", "--timeout", "60"),
]
DIGITS = [
    *("digits", *TINY, "--train.batch", "64", "--train.steps", "60", "--train.ema", "0.9"),
    *("--vit.dropout", "0.1", "--data.augment.mixup", "0.5", "--out", "run"),
]
PATIENCE = 600  # seconds after which a torchrun counts as hung; ten restarts take some
KILLS = [
    3,
    22,
    37,
    44,
    45,
    51,
    53,
    55,
    57,
    59,
]  # before any checkpoint, at an epoch's end, near the last

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]


class Launch:
    """A torchrun, what its processes say, and which they are."""

    def __init__(self, folder, *arguments, world=2, options=("--standalone",), happenings=()):
        self.pids, self.told = folder / "pids", folder / f"told{len(list(folder.glob('told*')))}"
        self.pids.mkdir(exist_ok=True)
        what = [ROOT / "tests" / "faults" / "rank.py", json.dumps(list(happenings)), *arguments]
        usual = [f"--nproc-per-node={world}", "--monitor-interval=0.1"]
        places = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PIDS": str(self.pids)}
        with self.told.open("w") as told:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *usual, *options, *what],
                cwd=folder,
                env=os.environ | places,
                stdout=subprocess.DEVNULL,
                stderr=told,
            )

    def end(self):
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()
            pytest.fail(f"torchrun hung after saying {self.told.read_text()[-3000:]}")

    def succeed(self):
        assert self.end() == 0, self.told.read_text()[-3000:]

    def wait_for(self, happened):
        end = time.monotonic() + PATIENCE
        while not happened():
            assert time.monotonic() < end and self.process.poll() is None, self.told.read_text()
            time.sleep(0.05)

    def left(self):
        """Processes of the ranks, and those they started, that still live."""
        groups, found = {int(path.read_text()) for path in self.pids.iterdir()}, []
        for facts in Path("/proc").glob("[0-9]*/stat"):
            try:
                group = int(facts.read_text().rpartition(")")[2].split()[2])
            except OSError:  # it ended meanwhile
                continue
            found += [facts.parent.name] if group in groups else []
        return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two processes to which nothing happens."""
    folder = tmp_path_factory.mktemp("whole")
    Launch(folder, "train", *DIGITS).succeed()
    return folder / "run"


def equal(one, other):
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.full
def test_killed_processes_start_again_and_end_with_the_same_tensors(tmp_path, whole, tries, tell):
    count = tries(2, 10)
    happenings = [[attempt, attempt % 2, KILLS[attempt], "SIGKILL"] for attempt in range(count)]
    options = ["--standalone", f"--max-restarts={count}"]
    launch = Launch(tmp_path, "train", *DIGITS, options=options, happenings=happenings)
    launch.succeed()
    told = launch.told.read_text()
    assert told.count("resuming from step") == count and "Traceback" not in told
    assert equal(tmp_path / "run", whole)
    tell("rank killed, started again by torchrun", count, count)


@pytest.mark.full
def test_a_rank_killed_on_one_of_two_machines_starts_again(tmp_path, whole, tell):
    place = [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "--nnodes=2"]
    options = [*place, "--rdzv-id=two", "--max-restarts=3"]
    happenings = [[0, 1, 25, "SIGKILL"], [1, 0, 45, "SIGKILL"]]
    both = [
        Launch(tmp_path, "train", *DIGITS, world=1, options=options, happenings=happenings)
        for _ in range(2)
    ]
    for launch in both:
        launch.succeed()
    assert equal(tmp_path / "run", whole)
    tell("rank killed on one of two machines", 2, 2)


@pytest.mark.full
def test_a_hanging_rank_is_named_and_no_step_is_lost(tmp_path, tell):
    words = "error: rank 1 of 2 did not respond for 3 seconds; find out why it hangs"
    flags = ["train", *DIGITS, "--timeout", "3"]
    launch = Launch(tmp_path, *flags, happenings=[[0, 1, 33, "SIGSTOP"]])
    launch.wait_for(lambda: words in launch.told.read_text())
    os.kill(int((launch.pids / "1-0").read_text()), signal.SIGKILL)  # torchrun waits half a minute
    assert launch.end() == 1
    assert launch.left() == []
    assert checkpoint.load_checkpoint(tmp_path / "run" / "checkpoints").step == 33
    tell("rank hangs, is named", 1, 1)


def photos(root):
    """Larger than what is augmented at once: read by processes of their own."""
    rng = np.random.default_rng(0)
    for label in ("dark", "light"):
        (root / label).mkdir(parents=True)
        for number in range(30):
            pixels = rng.integers(0, 60, (80, 80, 3)) + 190 * (label == "light")
            Image.fromarray(pixels.astype(np.uint8)).save(root / label / f"{number}.png")
    return root


@pytest.mark.full
def test_sigterm_to_torchrun_saves_once_and_leaves_nobody(tmp_path, tell):
    flags = ["train", str(photos(tmp_path / "photos")), *TINY, "--out", "run"]
    flags += ["--vit.image", "80", "--vit.patch", "16", "--train.batch", "8"]
    flags += ["--train.steps", "100000", "--train.evaluate-every", "100000"]
    flags += ["--data.workers", "2", "--data.cache-gb", "0", "--data.disk-gb", "0"]
    launch = Launch(tmp_path, *flags)
    journal, states = tmp_path / "run" / "log.jsonl", tmp_path / "run" / "checkpoints"
    launch.wait_for(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 4)
    assert len(launch.left()) == 6  # two ranks, and two that read for each
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end() == 1  # torchrun's own, with its own words
    assert launch.left() == []
    assert "error: " not in launch.told.read_text()
    newest = max(states.iterdir())
    last = json.loads(journal.read_text().splitlines()[-1])["step"]
    assert newest.name == f"step-{last:08d}" and checkpoint.read_checkpoint(newest).step == last
    tell("SIGTERM to torchrun", 1, 1)
