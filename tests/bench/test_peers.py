"""The benchmarks that need the peers, where they are installed, on the smallest cases."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SMALL = """
import sys
from pathlib import Path
from bench import inference, input, load, memory, step
from bench.__main__ import Settings, main
inference.CASES = [("Pico/4", 2)]
step.CASES = [("Pico/4", 2)]
memory.CASES = {"inference": [("Pico/4", 1)]}
input.IMAGES, input.TINY_IMAGES, input.WORKERS = 64, 128, 1
names = ("inference", "step", "input", "memory")
main(Settings(names=names, rounds=1, seconds=0.1, out=Path(sys.argv[1])))
"""
TRAINED = """
import json
from bench import train_peer
for peer in ("timm", "transformers", "vit-pytorch"):
    train_peer.RECIPES[peer] = train_peer.replace(train_peer.RECIPES[peer], batch=16)
    job = train_peer.PeerJob(data="digits", peer=peer, minutes=0.02, lr=1e-3)
    print(json.dumps(train_peer.train_peer_model(job)))
"""


@pytest.fixture(scope="module")
def python() -> str:
    own = ROOT / ".venv-bench" / "bin" / "python"
    python = os.environ.get("VITRAIL_PEERS") or (str(own) if own.exists() else "")
    if not python:
        pytest.skip("needs the peers: make .venv-bench/.installed, or set VITRAIL_PEERS")
    return python


def run(python: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, "-W", "ignore", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_every_peer_is_measured(python, tmp_path):
    run(python, "-c", SMALL, str(tmp_path))
    columns = {
        name: list(json.loads((tmp_path / f"{name}.json").read_text())["cases"][0]["rows"])
        for name in ("inference", "step", "input", "memory")
    }
    peers = ["vitrail", "timm", "transformers", "vit-pytorch", "torchvision"]
    assert columns == {
        "inference": [*peers, "onnxruntime", "matmuls"],
        "step": [*peers, "vitrail masked", "matmuls"],
        "input": ["vitrail", "torch + Pillow", "timm", "torchvision v2"],
        "memory": peers,
    }
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".svg"}


@pytest.mark.slow
def test_every_peer_is_trained(python):
    lines = [json.loads(line) for line in run(python, "-c", TRAINED).splitlines()]
    assert [line["contender"] for line in lines] == ["timm", "transformers", "vit-pytorch"]
    assert all(line["test"] is not None for line in lines)
