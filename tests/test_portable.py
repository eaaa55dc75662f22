"""Windows and macOS, imitated on Linux: training, prediction and resuming work there too.

`systems/sitecustomize.py` hides what these systems lack and refuses what they refuse.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

import vitrail
from vitrail.data.config import Augment, DataConfig, Preprocess
from vitrail.data.loader import Loader
from vitrail.data.open import open_data
from vitrail.model import embed
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.training.device import pick_device
from vitrail.training.learner import compute_dtype

SYSTEMS = Path(__file__).parent / "systems"
POSIX_MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "posix"}
CLASSES = ("żółw", "éclair")  # the code page of Western Europe has only the second
PHOTOS = 24  # of each class

# The workers decode these images once. tests/data/test_loader.py covers spawned workers that
# augment every batch, which takes several seconds for each of their starts.
FOLDER = ["without-report", "train", "photos", "--out", "photos-run", "--data.workers", "2"]
FOLDER += ["--model", "Pico/4", "--vit.image", "32", "--vit.patch", "8", "--preprocess.size", "32"]
FOLDER += ["--epochs", "1", "--train.batch", "8"]

WINDOWS = [
    ["train", "digits", "--minutes", "0.00001", "--out", "digits-run"],  # fails
    ["demo", "--minutes", "0.1", "--out", "digits-run"],
    ["remove", "digits-run/metrics.json"],  # as if killed before the end
    ["without-report", "resume", "digits-run"],
    ["evaluate", "digits-run", "digits"],
    FOLDER,
    ["predict", "photos-run", "photos"],
    ["predict", "photos-run", "photos", "--csv"],
    ["evaluate", "photos-run", "photos"],
]
MACOS = [
    ["train", "digits", "--epochs", "1", "--out", "digits-run"],
    ["resume", "digits-run"],
    ["evaluate", "digits-run", "digits"],
    FOLDER,
    ["predict", "photos-run", "photos"],
]


@pytest.fixture
def place():
    """A folder with a data set of JPEG files, outside of /dev/shm, which other systems lack."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as root:
        for darkest, label in enumerate(CLASSES):
            folder = Path(root, "photos", label)
            folder.mkdir(parents=True)
            for number in range(PHOTOS):
                pixels = rng.integers(150 * darkest, 150 * darkest + 90, (80, 96, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.jpg")
        yield Path(root)


def run_as(system: str, commands: list[list[str]], folder: Path) -> tuple[dict[str, list], str]:
    """What `run_commands.py` reports, and everything it printed."""
    encoding = "cp1252" if system == "windows" else "utf-8"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SYSTEMS), str(SYSTEMS.parents[1])]),
        "PYTHONIOENCODING": encoding,
        "VITRAIL_CACHE": str(folder / "cache"),
        "VITRAIL_TEST_SYSTEM": system,
        "VITRAIL_TEST_PROCESSES": str(folder / "processes"),
    }
    done = subprocess.run(
        [sys.executable, SYSTEMS / "run_commands.py", "result.json"],
        cwd=folder,
        env=environment,
        input=json.dumps(commands).encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    printed = done.stdout.decode(encoding)
    assert done.returncode == 0, printed
    return json.loads((folder / "result.json").read_bytes()), printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "commands", "available"),
    [
        ("windows", WINDOWS, ""),
        pytest.param(
            "macos",
            MACOS,
            "fork getuid pread poll fcntl resource pwd",
            marks=pytest.mark.full,  # the harder case is Windows
        ),
    ],
    ids=["windows", "macos"],
)
def test_training_and_prediction_work_where_linux_is_hidden(place, system, commands, available):
    result, printed = run_as(system, commands, place)
    assert result["available"] == [*available.split(), "default spawn"]
    if system == "windows":
        assert "too short for one step" in result["codes"].pop(0)
    assert {*result["codes"]} == {0}, printed
    assert "Traceback" not in printed
    for run in ("digits-run", "photos-run"):
        metrics = json.loads((place / run / "metrics.json").read_bytes())
        assert metrics["test"]["accuracy"] > 0.1
    assert (place / "digits-run" / "report.html").is_file()
    started = (place / "processes").read_text().split()
    assert len(started) >= 3  # this process and two workers, which import vitrail by themselves
    assert len({*started}) == len(started)
    assert CLASSES[1] in printed
    assert ("\\u017c" if system == "windows" else CLASSES[0]) in printed


def test_auto_picks_a_gpu_of_apple_where_there_is_no_other(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    device = pick_device("auto")
    assert device == torch.device("mps")
    assert compute_dtype("auto", device) == torch.float32
    assert compute_dtype("bfloat16", device) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto", local_rank=1) == torch.device("cuda", 1)


def test_no_module_imports_what_only_posix_has():
    package = Path(vitrail.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not POSIX_MODULES & {*names}, f"{path}, line {node.lineno}"


class WithoutFloat64(TorchDispatchMode):
    """Refuses float64 on "meta", which stands for a GPU of Apple."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "meta":
            assert result.dtype != torch.float64, f"{function} gives float64"
        return result


@pytest.mark.parametrize("positions", ["learned", "sincos", "rotary"])
def test_batches_and_model_need_no_float64_on_the_device(monkeypatch, positions):
    monkeypatch.setattr(embed, "WITHOUT_FLOAT64", ("meta",))
    model = ViT(
        ViTConfig(
            image=8,
            patch=2,
            channels=1,
            width=32,
            depth=1,
            heads=2,
            classes=10,
            positions=positions,
        )
    )
    config = DataConfig(augment=Augment(erase=0.5, mixup=0.4, cutmix=1.0), workers=0)
    preprocess = Preprocess(size=8, channels=1)
    batches = Loader(open_data("digits"), preprocess, config, batch=16, device="meta").training()
    with WithoutFloat64():
        batch = next(batches)
        model.to("meta")(batch.images).backward(batch.targets)


def test_position_embeddings_of_a_device_without_float64_are_the_same(monkeypatch):
    like = torch.zeros(1)
    tables = embed.sincos_positions((3, 4), 16, like), embed.rotary_positions((3, 4), 8, 1, like)
    monkeypatch.setattr(embed, "WITHOUT_FLOAT64", ("cpu",))
    again = embed.sincos_positions((3, 4), 16, like), embed.rotary_positions((3, 4), 8, 1, like)
    assert all(map(torch.equal, tables, again))
