"""Exported models: the same answers without torch; what needs weights says so."""

import json
import subprocess
import sys

import pytest

import vitrail
from tests.server.conftest import picture, write_model
from vitrail.errors import UserError
from vitrail.server.model import find_model

JPEG = picture()


@pytest.fixture(scope="module")
def onnx(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    weights = write_model(folder / "model.safetensors", depth=1)
    vitrail.load(weights).export(folder / "birds.onnx")
    return folder / "birds.onnx"


def test_an_exported_model_answers_like_its_weights(start, onnx):
    server = start(onnx)
    expected = vitrail.load(onnx.parent / "model.safetensors").predict(JPEG)
    answer = server.call("/predict?crop=1&mask=3", JPEG).json
    assert answer["crop"].startswith("data:image/png;base64,")
    answer = server.call("/predict", JPEG).json
    assert answer["label"] == expected.label
    assert answer["probability"] == pytest.approx(expected.probability, abs=1e-4)
    assert server.call("/model").json["explains"] is False
    for path in ("/explain", "/attention", "/features"):
        refused = server.call(path, JPEG)
        assert refused.status == 501 and "serve the run folder" in refused.json["error"]


def test_serving_an_exported_model_does_not_import_torch(onnx):
    code = f"""
import asyncio, sys, threading
sys.modules["torch"] = None
from functools import partial
from vitrail.server.config import ServeConfig
from vitrail.server.lifecycle import run_server
from vitrail.server.serve import bind, load_model_to_serve

load = partial(load_model_to_serve, {str(onnx)!r}, engine="auto", device="auto",
               max_bytes=10**7, max_pixels=10**7)
def stop(server):
    print(server.service.model.engine)
    server.force_exit = server.should_exit = True
config = ServeConfig(port=0)
with bind(config.host, 0) as listener:
    asyncio.run(run_server(config, load, listener, stop))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("onnxruntime"), done.stderr


def test_the_engine_chooses_the_file(onnx, tmp_path):
    run = str(onnx.parent)
    assert find_model(run, "auto") == find_model(run, "torch") == run
    assert find_model(run, "onnxruntime") == str(onnx) == find_model(str(onnx), "auto")
    with pytest.raises(UserError, match="runs in onnxruntime"):
        find_model(str(onnx), "torch")
    with pytest.raises(UserError, match="does not contain a model for openvino"):
        find_model(run, "openvino")


def test_the_command_serves_a_folder_in_its_engine(launch, onnx):
    server = launch("--engine", "onnxruntime", path=onnx.parent)
    assert json.loads(server.call("/model").body)["engine"].startswith("onnxruntime")
