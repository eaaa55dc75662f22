"""Exported models: the same answers without torch; what needs weights says so."""

import io
import json
import subprocess
import sys

import numpy as np
import onnx as onnx_package
import pytest

import vitrail
from tests.inference.test_trust import calibrated, weights
from tests.server.conftest import picture, write_model
from vitrail.errors import UserError
from vitrail.server.model import load_served
from vitrail.zoo.file import load_model, save_model

__all__ = ["calibrated", "weights"]

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
    assert refused.json["error"].endswith("or export it with --features")


@pytest.mark.parametrize("name", ["birds.onnx", "model.safetensors"])
def test_serving_in_an_engine_does_not_import_torch(onnx, tmp_path, monkeypatch, name):
    """Nor does it for weights whose export is cached, as from the second start on."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))
    path = onnx.with_name(name)
    vitrail.load(path, engine="onnxruntime")
    code = f"""
import asyncio, sys, threading
sys.modules["torch"] = None
from functools import partial
from vitrail.server.config import ServeConfig
from vitrail.server.lifecycle import run_server
from vitrail.server.serve import bind, load_model_to_serve

load = partial(load_model_to_serve, {str(path)!r}, engine="onnxruntime", device="cpu",
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


def test_weights_predict_in_an_engine_and_explain_in_torch(
    start, calibrated, tmp_path, monkeypatch
):
    """The same choice of engines as `predict`; odd images are flagged in all of them."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))
    server = start(calibrated, engine="onnxruntime")
    card = server.call("/model").json
    assert card["engine"].startswith("onnxruntime") and card["explains"] is True
    stream = io.BytesIO()
    np.save(stream, np.tile(np.array([0, 255], np.uint8), (8, 4)))
    expected = vitrail.load(calibrated).predict(stream.getvalue()).to_dict()
    answer = server.call("/predict", stream.getvalue()).json
    assert answer["odd"] is expected["odd"] and answer["label"] == expected["label"]
    assert answer["p_value"] == pytest.approx(expected["p_value"], abs=0.01)
    assert server.call("/explain", stream.getvalue()).json["label"] == expected["label"]
    assert len(server.call("/features", stream.getvalue()).json["features"]) == 16


def test_explanations_belong_to_the_model_that_predicts(start, tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))
    path = write_model(tmp_path / "birds.safetensors", depth=1)
    server = start(path, engine="onnxruntime")
    write_model(path, seed=1, depth=1)
    refused = server.call("/explain", JPEG)
    assert refused.status == 503 and "send SIGHUP" in refused.json["error"]


def test_an_export_with_features_serves_them(start, onnx, tmp_path):
    classifier = vitrail.load(onnx.parent / "model.safetensors")
    classifier.export(tmp_path / "birds.onnx", features=True)
    found = start(tmp_path / "birds.onnx").call("/features", JPEG).json["features"]
    np.testing.assert_allclose(found, classifier.features(JPEG)[0], atol=1e-4)


@pytest.mark.parametrize("name", ["model.safetensors", "birds.onnx"])
def test_a_model_that_computes_other_answers_is_not_served(onnx, tmp_path, name):
    path, wrong = tmp_path / name, {"reference": {"logits": [[0.0] * 4] * 4}}
    if name.endswith("onnx"):
        graph = onnx_package.load(onnx)
        (entry,) = graph.metadata_props
        entry.value = json.dumps(json.loads(entry.value) | wrong)
        onnx_package.save(graph, path)
    else:
        model, metadata = load_model(onnx.parent / name)
        save_model(path, model, metadata.document | wrong)
    with pytest.raises(UserError, match="computes other answers here than after training"):
        load_served(str(path), engine=None, device="cpu", max_bytes=10**7, max_pixels=10**7)


def test_an_exported_file_has_one_engine(onnx):
    with pytest.raises(UserError, match="runs in onnxruntime, not in torch"):
        load_served(str(onnx), engine="torch", device="cpu", max_bytes=1, max_pixels=1)
