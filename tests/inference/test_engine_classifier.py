"""Exported files as classifiers: the answers of PyTorch, without PyTorch."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest

import vitrail
from tests.cli.conftest import call
from tests.inference.test_classifier import CLASSES, HOT, PREPROCESS, make
from vitrail.inference.classifier import Classifier
from vitrail.zoo.file import save_model

WEIGHTS = "weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
PHOTOS = "data/imagenet-val-300"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One classifier as weights, as ONNX with bytes and features, and for OpenVINO."""
    path = tmp_path_factory.mktemp("exports")
    classifier = make()
    described = {"classes": CLASSES, "preprocess": PREPROCESS.to_dict(), "temperature": HOT}
    save_model(path / "model.safetensors", classifier.model, described)
    classifier.export(path / "a.onnx")
    classifier.export(path / "bytes.onnx", pixels="uint8", features=True)
    classifier.export(path / "a.xml")
    return path


@pytest.fixture(scope="module")
def images():
    digits = vitrail.open_data("digits")
    return [digits[index].content for index in range(40)]


@pytest.mark.parametrize("file", ["a.onnx", "bytes.onnx", "a.xml"])
def test_the_same_bytes_give_the_answer_of_pytorch(folder, images, file):
    exported, classifier = vitrail.load(folder / file), make()
    np.testing.assert_allclose(
        exported.probabilities(images), classifier.probabilities(images), atol=1e-5
    )
    found, expected = exported.predict(images, top=3), classifier.predict(images, top=3)
    assert [one.label for one in found] == [one.label for one in expected]
    assert isinstance(exported, vitrail.Classifier) and exported.temperature == HOT
    assert exported.index("7") == 7 and exported.classes == classifier.classes


@pytest.mark.parametrize("file", ["a.onnx", "a.xml"])
def test_a_split_engine_computes_two_batches_at_a_time(folder, images, file, monkeypatch):
    monkeypatch.setattr("vitrail.exporting.engine.thread_count", lambda: 2)
    predictor = vitrail.load(folder / file).predictor
    x = np.stack([predictor.load(image) for image in images])
    split, halves = predictor.split(2), (x[:20], x[20:])
    if file == "a.onnx":
        assert (predictor.engine.threads, split.engine.threads) == (2, 1)
    else:
        assert split.engine.compiled.get_property("NUM_STREAMS") == 2
    with ThreadPoolExecutor(2) as pool:
        found = [row for _ in range(5) for row in pool.map(split.logits, halves)]
    for number, rows in enumerate(found):
        np.testing.assert_allclose(rows, predictor.logits(halves[number % 2]), atol=1e-5)


@pytest.mark.parametrize("file", ["a.onnx", "bytes.onnx"])
def test_an_exported_model_is_evaluated_like_the_original(folder, file):
    found, expected = (
        vitrail.load(folder / name).evaluate("digits", split="test")
        for name in (file, "model.safetensors")
    )
    assert found.accuracy == expected.accuracy
    assert found.log_loss == pytest.approx(expected.log_loss, abs=1e-5)


def test_features_come_from_exports_that_have_them(folder, images):
    found = vitrail.load(folder / "bytes.onnx").features(images)
    np.testing.assert_allclose(found, make().features(images), atol=1e-5)
    with pytest.raises(vitrail.UserError, match="export it with `features=True`"):
        vitrail.load(folder / "a.onnx").features(images)


PREDICT = """
import sys, vitrail
prediction = vitrail.load(sys.argv[1]).predict(sys.argv[2])
assert prediction.label, prediction
assert "torch" not in sys.modules
from vitrail.cli.main import main
main(["predict", sys.argv[1], sys.argv[2], "--json"])
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("file", ["a.onnx", "a.xml"])
def test_neither_load_nor_predict_imports_torch(folder, images, file, tmp_path):
    np.save(tmp_path / "digit.npy", images[0])
    done = subprocess.run(
        [sys.executable, "-c", PREDICT, folder / file, tmp_path / "digit.npy"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    expected = make().predict(images[0])
    assert json.loads(done.stdout)["label"] == expected.label


def test_what_needs_the_weights_says_so(folder, images, capsys, tmp_path, monkeypatch):
    exported = vitrail.load(folder / "a.onnx")
    for action in (lambda: exported.explain(images[0]), lambda: exported.model, exported.export):
        with pytest.raises(vitrail.UserError, match="give the run or weight file that it was exp"):
            action()
    with pytest.raises(AttributeError, match="no attribute 'speed'"):
        _ = exported.speed
    monkeypatch.chdir(tmp_path)
    for command in (["explain", folder / "a.onnx"], ["export", folder / "a.onnx"]):
        code, out, _err = call(capsys, *command)
        assert "the run or weight file that it was exported from" in code and not out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda"}, "runs on the CPU, not on 'cuda'"),
        ({"preprocess": "half"}, "are fixed; leave out `preprocess`"),
        ({"vit": {"image": 32}}, "are fixed; leave out `vit`"),
    ],
)
def test_settings_that_an_export_has_fixed_are_refused(folder, settings, message):
    with pytest.raises(vitrail.UserError, match=message):
        vitrail.load(folder / "a.onnx", **settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "does not say which classes and preprocessing it needs"),
        ({"classes": None}, "classes or preprocessing are missing"),
        ({"classes": [1] * 10}, "damaged metadata"),
        ({"classes": ["a"]}, "1 class names for 10 logits"),
        ({"preprocess": {"size": -1}}, "size is -1"),
        ({"preprocess": 5}, "damaged metadata"),
        ({"temperature": "hot"}, "temperature"),
        ("[1, 2]", "damaged metadata"),
        ("{", "damaged metadata"),
    ],
)
def test_damaged_metadata_is_one_line(folder, tmp_path, change, message):
    model = onnx.load(folder / "a.onnx")
    stored = change
    if isinstance(change, dict):
        stored = json.dumps(
            {**json.loads(model.metadata_props[0].value), **change} if change else {}
        )
    model.metadata_props[0].value = stored
    onnx.save(model, tmp_path / "b.onnx")
    with pytest.raises(vitrail.UserError, match=message) as caught:
        vitrail.load(tmp_path / "b.onnx")
    assert "\n" not in str(caught.value)


def test_a_predictor_reads_logits_row_by_row(folder, images):
    """What a server does: load in threads, compute a batch, read each row."""
    predictor = vitrail.load(folder / "bytes.onnx").predictor
    batch = np.stack([predictor.load(image) for image in images[:5]])
    rows = predictor.logits(batch)
    assert batch.dtype == np.uint8 and rows.shape == (5, 10)
    assert [predictor.prediction(row) for row in rows] == vitrail.load(
        folder / "bytes.onnx"
    ).predict(images[:5])
    assert isinstance(predictor.prediction(rows[0] * np.nan), vitrail.UserError)


def test_several_labels_have_their_thresholds_in_an_export(tmp_path, images):
    fitted = {"thresholds": [0.3] * 10, "slopes": [0.5] * 10, "intercepts": [0.1] * 10}
    described = {"labels": "multi", "multi_label": fitted}
    classifier = Classifier(make().model, CLASSES, PREPROCESS, described, "cpu")
    classifier.export(tmp_path / "a.onnx")
    found, expected = (
        one.predict(images[:8]) for one in (vitrail.load(tmp_path / "a.onnx"), classifier)
    )
    assert [[one.label for one in answer.labels] for answer in found] == [
        [one.label for one in answer.labels] for answer in expected
    ]
    assert len({len(answer.labels) for answer in expected}) > 1  # so that equality means something


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", ["onnxruntime", pytest.param("openvino", marks=pytest.mark.full)]
)
def test_published_weights_give_the_same_answers_in_every_engine(
    shared, engine, tmp_path, monkeypatch
):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))
    weights, photos = shared / WEIGHTS, sorted((shared / PHOTOS).glob("*.jpg"))[:6]
    found = vitrail.load(weights, engine=engine).predict(photos)
    expected = vitrail.load(weights, device="cpu").predict(photos)
    assert [one.label for one in found] == [one.label for one in expected]
    np.testing.assert_allclose(
        [one.probability for one in found], [one.probability for one in expected], atol=1e-4
    )
