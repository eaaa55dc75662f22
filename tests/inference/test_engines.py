"""Engines at run time: exported once, proved, cached by content; `auto` takes the fastest."""

import json
import logging
import subprocess
import sys

import numpy as np
import pytest

import vitrail
from tests.cli.conftest import call
from tests.inference.test_classifier import CLASSES, HOT, PREPROCESS, make
from vitrail.exporting import export as export_module
from vitrail.inference import engines
from vitrail.inference.engine_classifier import EngineClassifier
from vitrail.zoo.file import save_model


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    described = {"classes": CLASSES, "preprocess": PREPROCESS.to_dict(), "temperature": HOT}
    save_model(path, make().model, described)
    return path


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, cache):
    monkeypatch.setenv("VITRAIL_CACHE", str(cache))
    monkeypatch.setattr(engines, "SECONDS", 0.0)


@pytest.fixture
def exports(monkeypatch):
    """The formats that are exported while a test runs."""
    formats = []

    def count(model, target, **settings):
        formats.append(settings["to"])
        return original(model, target, **settings)

    original = export_module.export_model
    monkeypatch.setattr("vitrail.inference.export.export_model", count)
    return formats


@pytest.fixture(scope="module")
def digit(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "digit.npy"
    np.save(path, vitrail.open_data("digits")[3].content)
    return path


def test_an_export_is_cached_by_the_content_of_the_weights(model, exports, digit, tmp_path):
    expected = make().predict(digit)
    first = vitrail.load(model, engine="onnxruntime")
    assert isinstance(first, EngineClassifier) and first.temperature == HOT
    assert first.predict(digit).label == expected.label
    assert first.predict(digit).probability == pytest.approx(expected.probability, abs=1e-5)
    before = list(exports)
    copy = tmp_path / "model.safetensors"
    copy.write_bytes(model.read_bytes())
    assert vitrail.load(copy, engine="onnxruntime").path == first.path
    assert exports == before  # the same content: nothing was exported again
    save_model(copy, make().model, {"classes": CLASSES[::-1], "preprocess": PREPROCESS.to_dict()})
    assert vitrail.load(copy, engine="onnxruntime").classes == tuple(CLASSES[::-1])
    assert len(exports) == len(before) + 1


def test_a_damaged_cache_is_made_again(model, exports):
    path = vitrail.load(model, engine="onnxruntime").path
    path.write_bytes(b"damaged")
    del exports[:]
    assert vitrail.load(model, engine="onnxruntime").path == path
    assert exports == ["onnx"]


def test_auto_measures_once_and_remembers(model, exports, monkeypatch, digit, caplog):
    caplog.set_level(logging.INFO, logger="vitrail")
    monkeypatch.setattr(
        engines,
        "measure_engines",
        lambda predictors: {name: [1.0 + (name != "openvino")] * 2 for name in predictors},
    )
    found = vitrail.load(model, engine="auto", device="cpu")
    assert found.engine.name == "openvino"
    assert "engine openvino: one image 2.00 x, 16 images 2.00 x the speed of Py" in caplog.text
    del exports[:]
    monkeypatch.setattr(engines, "measure_engines", None)  # not called again
    again = vitrail.load(model, engine="auto", device="cpu")
    assert again.engine.name == "openvino" and not exports
    assert again.predict(digit).label == make().predict(digit).label


def test_auto_is_torch_where_nothing_is_faster(model, monkeypatch):
    times = {"torch": [1.0, 1.0], "onnxruntime": [0.9, 1.2], "openvino": [2.0, 2.0]}
    monkeypatch.setattr(engines, "read_times", lambda path: times)
    found = vitrail.load(model, engine="auto", device="cpu")
    assert not isinstance(found, EngineClassifier)


def test_an_engine_whose_proof_fails_is_not_a_candidate(model, monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="vitrail")

    def fail(self, path, *, to, odd, overwrite):
        raise vitrail.UserError(f"the logits of {to} differ")

    monkeypatch.setattr(vitrail.Classifier, "export", fail)
    assert list(engines.collect_candidates(tmp_path, make())) == ["torch"]
    assert "onnxruntime is not used: the logits of onnx differ" in caplog.text


def test_auto_is_torch_where_the_cache_cannot_be_written(model, monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="vitrail")
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file" / "cache"))
    assert not isinstance(vitrail.load(model, engine="auto", device="cpu"), EngineClassifier)
    assert "engine torch: the engines cannot be compared: cannot write to" in caplog.text
    with pytest.raises(vitrail.UserError, match="cannot write to"):
        vitrail.load(model, engine="onnxruntime")


def test_a_second_process_finds_what_the_first_has_measured(model, exports, monkeypatch):
    """Workers of a server start at the same time, and only one of them exports."""
    answers = iter([None, {"torch": [1.0, 1.0], "onnxruntime": [2.0, 2.0]}])
    monkeypatch.setattr(engines, "read_times", lambda path: next(answers))
    monkeypatch.setattr(engines, "measure_engines", None)  # not called
    assert not isinstance(vitrail.load(model, engine="auto", device="cpu"), EngineClassifier)
    assert not exports


def test_auto_does_not_measure_torch_alone(model, monkeypatch):
    monkeypatch.setattr(engines, "is_installed", lambda name: False)
    monkeypatch.setattr(engines, "measure_engines", None)  # not called
    assert not isinstance(vitrail.load(model, engine="auto", device="cpu"), EngineClassifier)


def test_the_fastest_counts_over_both_batch_sizes():
    assert engines.fastest_engine({"torch": [2.0, 2.0], "openvino": [1.0, 5.0]}) == "torch"
    assert engines.fastest_engine({"torch": [2.0, 2.0], "openvino": [1.0, 3.0]}) == "openvino"


def test_engines_are_timed_in_turn():
    class Fake:
        preprocess = PREPROCESS

        def load(self, image):
            return np.zeros((1, 8, 8), np.float32)

        def logits(self, x):
            calls.append(len(x))
            return x

    calls = []
    times = engines.measure_engines({"torch": Fake(), "openvino": Fake()})
    assert set(calls) == set(engines.BATCHES) and all(min(one) > 0 for one in times.values())
    assert all(len(one) == len(engines.BATCHES) for one in times.values())


@pytest.mark.parametrize(
    "stored", ["", "[]", "{}", '{"torch": [1]}', '{"torch": [1, 0]}', '{"torch": ["x", 1]}']
)
def test_a_damaged_record_is_measured_again(tmp_path, stored):
    (tmp_path / "times.json").write_text(stored)
    assert engines.read_times(tmp_path / "times.json") is None


def test_times_of_an_engine_that_was_removed_do_not_count(tmp_path):
    times = {"torch": [1.0, 1.0], "no_such_engine": [0.1, 0.1]}
    (tmp_path / "times.json").write_text(json.dumps(times))
    assert engines.read_times(tmp_path / "times.json") == {"torch": [1.0, 1.0]}


CACHED = """
import sys
from vitrail.cli.main import main
main(["predict", sys.argv[1], sys.argv[2], "--engine", "onnxruntime"])
assert "torch" not in sys.modules
"""


def test_cached_weights_predict_without_torch(model, digit):
    vitrail.load(model, engine="onnxruntime")
    done = subprocess.run([sys.executable, "-c", CACHED, model, digit], capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_evaluate_is_the_same_in_every_engine(capsys, model, engine):
    documents = []
    for one in ("torch", engine):
        code, out, _ = call(
            capsys, "evaluate", model, "digits", "--split", "test", "--engine", one, "--json"
        )
        assert code == 0
        documents.append(json.loads(out))
    assert documents[0]["accuracy"] == documents[1]["accuracy"]
    assert documents[0]["log_loss"] == pytest.approx(documents[1]["log_loss"], abs=1e-5)


def test_mistakes_are_one_line(capsys, model, digit, monkeypatch):
    path = vitrail.load(model, engine="onnxruntime").path
    for arguments, message in (
        ([path, "--engine", "torch"], "runs in onnxruntime, not in torch; leave --engine out"),
        ([model, "--engine", "openvino", "--device", "cuda"], "openvino runs on the CPU, not on"),
        ([model, "--engine", "openvino", "--head", "x"], "needs --engine torch, not openvino"),
    ):
        code, out, _ = call(capsys, "predict", arguments[0], digit, *arguments[1:])
        assert message in code and not out
    with pytest.raises(vitrail.UserError, match="unknown engine 'tpu'; choose auto, torch"):
        vitrail.load(model, engine="tpu")


def test_a_missing_engine_says_what_to_install(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(vitrail.UserError, match=r"pip install 'vitrail\[openvino\]'"):
        vitrail.load(model, engine="openvino")
