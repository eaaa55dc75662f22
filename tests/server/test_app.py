"""The endpoints over real sockets: right answers, and the right status for what is wrong."""

import base64
import hashlib
import json
import subprocess
import time

import numpy as np
import pytest

import vitrail
from tests.server.conftest import CLASSES, picture
from vitrail.insight.methods import FAST
from vitrail.server.app import build_app
from vitrail.server.openapi import ENDPOINTS, PARAMETERS

JPEG = picture()


@pytest.fixture(scope="module")
def classifier(model_file):
    return vitrail.load(model_file)


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_predict_answers_what_the_command_prints(server, classifier, model_file):
    answer = server.call("/predict?top=3", JPEG)
    expected = classifier.predict(JPEG, top=3).to_dict()
    assert answer.status == 200 and answer.json.keys() == {*expected, "sha256"}
    assert answer.json["sha256"] == sha256(model_file) == answer.headers["vitrail-model"]
    assert [one["label"] for one in answer.json["top"]] == [x["label"] for x in expected["top"]]
    assert answer.json["probability"] == pytest.approx(expected["probability"], abs=1e-6)


def test_more_classes_than_there_are_give_all(server):
    assert len(server.call("/predict?top=5", JPEG).json["top"]) == 4


def test_curl_is_the_whole_manual(server, classifier, tmp_path, need):
    (tmp_path / "cat.jpg").write_bytes(JPEG)
    command = [need("curl"), "-s", "--data-binary", "@cat.jpg", f"{server.url}/predict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert json.loads(done.stdout)["label"] == classifier.predict(JPEG).label


def test_a_list_is_answered_in_order_and_one_bad_image_spoils_nothing(server, classifier):
    images = [picture(seed=number) for number in range(5)]
    texts = [base64.b64encode(image).decode() for image in images]
    texts[2:2] = ["no base64!", base64.b64encode(b"not an image").decode(), 7]
    answers = server.call("/predict", json.dumps(texts).encode()).json
    assert [("error" in one) for one in answers] == [False] * 2 + [True] * 3 + [False] * 3
    labels = [one["label"] for one in answers if "label" in one]
    assert labels == [one.label for one in classifier.predict(images)]


def test_every_batch_size_gives_the_answers_of_single_images(server, classifier):
    images = [picture(seed=number) for number in range(32)]
    body = json.dumps([base64.b64encode(image).decode() for image in images]).encode()
    answers = server.call("/predict", body).json
    alone = [classifier.predict(image).probability for image in images]
    assert [one["probability"] for one in answers] == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/predict", b"", 400, "no body"),
        ("/predict", b"hello", 415, "not an image"),
        ("/predict", JPEG[:600], 422, "truncated"),
        ("/predict", b"\x89PNG\r\n\x1a\n" + b"\0" * 30, 422, "damaged"),
        ("/predict", b"\0\0\0\x18ftypisom" + b"\0" * 40, 415, "a video"),
        ("/predict", b"[1", 400, "not a JSON list"),
        ("/predict", b"[]", 400, "0 images"),
        ("/predict", json.dumps(["x"] * 33).encode(), 400, "33 images"),
        ("/predict?top=0", JPEG, 400, "top must be a whole number from 1"),
        ("/predict?top=1e9", JPEG, 400, "top must be"),
        ("/predict?topp=3", JPEG, 400, "unknown parameter"),
        ("/predict?class=cow", JPEG, 400, "no class is called"),
        ("/predict?mask=0,x", JPEG, 400, "mask must be"),
        ("/predict?mask=16", JPEG, 422, "0 to 15"),
        ("/predict?cropped=1", JPEG, 422, "32 x 32"),
        ("/explain?method=magic", JPEG, 400, "unknown method"),
        ("/explain", b"hello", 415, "not an image"),
        ("/explain", JPEG[:600], 422, "truncated"),
        ("/attention?layer=2", JPEG, 400, "layer must be"),
        ("/attention?head=9", JPEG, 400, "head must be"),
        ("/attention?row=16", JPEG, 400, "row must be"),
        ("/attention?format=csv", JPEG, 400, "unknown format"),
        ("/nowhere", JPEG, 404, "no such endpoint; openapi.json lists them"),
        ("/model", JPEG, 405, "this endpoint takes GET, HEAD"),
    ],
)
def test_a_mistake_has_its_status_and_one_line(server, path, body, status, words):
    answer = server.call(path, body)
    assert answer.status == status and words in answer.json["error"]
    assert "\n" not in answer.json["error"] and "0x" not in answer.json["error"]
    assert "Traceback" not in answer.json["error"] and "/" not in answer.json["error"]


def test_forms_and_compressed_bodies_are_refused_before_they_are_read(server):
    form = server.call("/predict", JPEG, content_type="multipart/form-data; boundary=x")
    assert form.status == 415 and "curl --data-binary" in form.json["error"]
    assert server.call("/predict", JPEG, content_encoding="gzip").status == 415


def test_masked_patches_have_the_mean_colour(server, classifier):
    from vitrail.insight.explain import mask_patches

    answer = server.call("/predict?mask=0,5&class=dog&top=1", JPEG).json
    x = classifier.predictor.load(JPEG)[None]
    import torch

    mask = torch.zeros(1, 16, dtype=torch.bool)
    mask[0, [0, 5]] = True
    logits = classifier.model(mask_patches(classifier.model, torch.as_tensor(x), mask))[0]
    expected = (logits / classifier.temperature).softmax(0)[1].item()
    assert answer["class"]["label"] == "dog" and len(answer["top"]) == 1
    assert answer["class"]["probability"] == pytest.approx(expected, abs=1e-5)


def test_the_crop_is_the_input_of_the_model(server):
    whole = server.call("/predict?crop=1", JPEG).json
    png = base64.b64decode(whole.pop("crop").removeprefix("data:image/png;base64,"))
    assert server.call("/predict?cropped=1", png).json == whole


def test_explain_gives_every_method_with_its_faithfulness(server, classifier):
    answer = server.call("/explain?class=heron&method=relevance", JPEG).json
    expected = classifier.explain(JPEG, "heron", method="relevance")
    maps = {one["method"]: one for one in answer["heatmaps"]}
    assert answer["class"]["label"] == "heron" and answer["method"] == "relevance"
    assert set(maps) == set(FAST)
    assert np.allclose(maps["relevance"]["values"], expected.heatmap, atol=1e-5)
    assert maps["relevance"]["faithfulness"] == pytest.approx(
        expected.scores["relevance"], abs=1e-3
    )


def test_attention_of_a_layer_head_and_row(server, classifier):
    import torch

    x = torch.as_tensor(classifier.predictor.load(JPEG))[None]
    expected = vitrail.attention(classifier.model, x, layers=1, heads=1, rows=6)[0][0, 0, 0]
    answer = server.call("/attention?layer=1&head=1&row=6", JPEG).json
    assert np.allclose(np.ravel(answer["attention"]), expected[1:], atol=1e-5)
    assert answer["prefix"] == pytest.approx([expected[0].item()], abs=1e-5)
    every = server.call("/attention?row=all", JPEG).json
    assert np.shape(every["attention"]) == (17, 4, 4)


def test_packed_attention_holds_all_layers_and_heads(server):
    answer = server.call("/attention?format=packed", JPEG).json
    maps = [tuple(one) for one in answer["maps"]]
    assert {(0, 0), (0, 1), (1, 0), (1, 1), (1, -1), (-1, -1)} <= set(maps)
    assert len(base64.b64decode(answer["levels"])) == len(maps) * 17 * 16


def test_features_are_the_input_of_the_head(server, classifier):
    answer = server.call("/features", JPEG).json
    assert np.allclose(answer["features"], classifier.features(JPEG)[0], atol=1e-5)


def test_the_model_tells_what_its_file_says_and_no_paths(server, model_file):
    answer = server.call("/model")
    assert answer.json["classes"] == CLASSES and answer.json["sha256"] == sha256(model_file)
    assert answer.json["metrics"]["test"]["interval"] == [0.6, 0.9]
    assert answer.json["data"] == {"name": "zoo"} and b"secret" not in answer.body
    assert answer.json["limits"]["pixels"] == 50_000_000


def test_live_and_ready(server):
    assert server.call("/live").json == {"live": True}
    ready = server.call("/ready")
    assert ready.status == 200 and ready.json["ready"] and ready.json["seconds"] > 0


def test_ready_really_computes(server, monkeypatch):
    service = server.server.service

    def fail(batch):
        raise RuntimeError("no memory")

    monkeypatch.setattr(
        "vitrail.server.model.ServedModel.logits", lambda self, batch, alone: fail(batch)
    )
    monkeypatch.setattr(service, "probe_task", None)
    answer = server.call("/ready")
    assert answer.status == 503 and answer.json == {"error": "the model does not answer"}
    monkeypatch.undo()
    service.probe_task = None
    assert server.call("/ready").status == 200


def test_an_internal_error_hides_its_cause(server, monkeypatch, caplog):
    def fail(self, batch, alone):
        raise RuntimeError("secret cause")

    monkeypatch.setattr("vitrail.server.model.ServedModel.logits", fail)
    answer = server.call("/predict", JPEG)
    assert answer.status == 500 and b"secret" not in answer.body
    end = time.monotonic() + 10  # it is logged just after it is answered
    while "secret cause" not in caplog.text:
        assert time.monotonic() < end
        time.sleep(0.01)
    monkeypatch.undo()
    assert server.call("/predict", JPEG).status == 200


def test_metrics_count_what_happened(server):
    server.call("/predict", JPEG)
    text = server.call("/metrics").body.decode()
    assert 'vitrail_requests_total{endpoint="/predict",status="200"}' in text
    for name in ("vitrail_batch_images_bucket", "vitrail_queued_images", "process_resident_memory"):
        assert name in text


def test_openapi_describes_every_route(server):
    document = server.call("/openapi.json").json
    described = {
        (method.upper(), path) for path, found in document["paths"].items() for method in found
    }
    app = build_app(server.server.service)
    routes = {
        (next(iter(route.methods - {"HEAD"})), route.path)
        for route in app.routes
        if not route.path.startswith("/assets/")
    }
    assert described == routes
    assert {name for *_, names, _ in ENDPOINTS for name in names} <= set(PARAMETERS)


def test_every_described_parameter_is_read(server):
    for method, path, _, names, _ in ENDPOINTS:
        if method == "post" and names:
            error = server.call(f"{path}?nonsense=1", JPEG).json["error"]
            assert error.endswith(f"known: {', '.join(names)}")


def test_nothing_can_be_loaded_by_path_or_url(server):
    for body in (b"/etc/passwd", b"file:///etc/passwd", b"http://127.0.0.1/x.png"):
        assert server.call("/predict", body).status == 415
    for path in ("/assets/../../model.py", "/assets/%2e%2e/app.py", "/..%2f..%2fetc/passwd"):
        assert server.call(path).status == 404
