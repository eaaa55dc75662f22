"""onnxruntime-web, the runtime of browsers, gives PyTorch's answers on the same image in Node."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import vitrail
from tests.inference.test_classifier import make

WEB = Path(__file__).parent / "web"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with onnxruntime-web, installed from the npm registry."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        if os.environ.get("VITRAIL_CI") == "1":
            pytest.fail("this test needs node and npm, and CI must have them")
        pytest.skip("needs node and npm")
    folder = tmp_path_factory.mktemp("web")
    for name in ("package.json", "run.mjs"):
        shutil.copy(WEB / name, folder)
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"npm cannot install onnxruntime-web: {done.stderr.strip()[-200:]}")
    return folder


@pytest.mark.slow
def test_onnxruntime_web_gives_the_logits_of_pytorch(place):
    classifier = make()
    classifier.export(place / "digits.onnx")
    digits = vitrail.open_data("digits")
    x = np.stack([classifier.predictor.load(digits[index].content) for index in range(3)])
    x.tofile(place / "pixels.bin")
    command = ["node", "run.mjs", "digits.onnx", "pixels.bin", json.dumps(x.shape), "logits.bin"]
    subprocess.run(command, cwd=place, check=True, timeout=300)
    found = np.fromfile(place / "logits.bin", np.float32).reshape(3, -1)
    np.testing.assert_allclose(found, classifier.predictor.logits(x), atol=1e-4)
