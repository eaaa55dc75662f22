"""KServe's protocol: what existing clients send, in JSON and in Triton's binary extension."""

import base64
import json

import pytest

import vitrail
from tests.server.conftest import CLASSES, picture

IMAGES = [picture(seed=number) for number in range(3)]


@pytest.fixture(scope="module")
def expected(model_file):
    return vitrail.load(model_file).predict(IMAGES)


def call(images, **changes):
    data = [base64.b64encode(image).decode() for image in images]
    tensor = {"name": "image", "datatype": "BYTES", "shape": [len(images)], "data": data}
    return json.dumps({"id": "7", "inputs": [tensor], **changes}).encode()


def outputs(answer):
    return {one["name"]: one for one in answer.json["outputs"]}


def test_metadata_names_one_input_of_bytes(server):
    assert server.call("/v2").json["name"] == "vitrail"
    answer = server.call("/v2/models/birds").json
    assert answer["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
    assert server.call(f"/v2/models/birds/versions/{answer['versions'][0]}").json == answer
    assert server.call("/v2/models/birds/ready").json["ready"] is True
    assert server.call("/v2/health/live").status == server.call("/v2/health/ready").status == 200
    for path in ("/v2/models/cats", "/v2/models/birds/versions/9"):
        assert server.call(path).status == 404


def test_infer_answers_labels_and_probabilities(server, expected):
    answer = server.call("/v2/models/birds/infer", call(IMAGES))
    found = outputs(answer)
    assert answer.json["id"] == "7" and answer.json["model_name"] == "birds"
    assert found["label"]["data"] == [one.label for one in expected]
    assert found["probability"]["data"] == pytest.approx([one.probability for one in expected])
    assert found["probabilities"]["shape"] == [3, len(CLASSES)]
    assert sum(found["probabilities"]["data"]) == pytest.approx(3)
    wanted = call(IMAGES[:1], outputs=[{"name": "label"}])
    assert list(outputs(server.call("/v2/models/birds/infer", wanted))) == ["label"]


def test_infer_takes_binary_data(server, expected):
    data = b"".join(len(image).to_bytes(4, "little") + image for image in IMAGES)
    tensor = {"name": "image", "datatype": "BYTES", "shape": [3]}
    tensor["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps({"inputs": [tensor]}).encode()
    answer = server.call(
        "/v2/models/birds/infer", head + data, inference_header_content_length=str(len(head))
    )
    assert outputs(answer)["label"]["data"] == [one.label for one in expected]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"inputs": []}', 400),
        (b'{"inputs": [{"datatype": "FP32", "shape": [1], "data": [1]}]}', 400),
        (b'{"inputs": [{"datatype": "BYTES", "shape": [1], "data": "x"}]}', 400),
        (b'{"inputs": [{"datatype": "BYTES", "shape": [2], "data": ["aGVsbG8="]}]}', 400),
        (b'{"inputs": [{"datatype": "BYTES", "shape": [1], "data": ["aGVsbG8="]}]}', 415),
        (call([IMAGES[0][:500]]), 422),
        (call(IMAGES[:1], outputs=[{"name": "magic"}]), 400),
        (call([]), 400),
    ],
)
def test_a_malformed_call_is_answered(server, body, status):
    assert server.call("/v2/models/birds/infer", body).status == status


def test_damaged_binary_data_are_refused(server):
    head = b'{"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1]}]}'
    for data, length in ((b"\xff\xff\xff\x7fabc", str(len(head))), (b"", "999"), (b"", "x")):
        path = "/v2/models/birds/infer"
        answer = server.call(path, head + data, inference_header_content_length=length)
        assert answer.status == 400
