"""A Triton repository, read back by a strict parser of protobuf's text format."""

import re

import numpy as np
import pytest

from tests.exporting.models import build_graph, build_model, preprocess_of
from vitrail.errors import UserError
from vitrail.exporting.engine import open_onnx
from vitrail.exporting.export import export_model
from vitrail.exporting.graph import GraphOptions
from vitrail.exporting.triton import check_model_name, render_config

# The part of inference.ModelConfig (model_config.proto, triton-inference-server/common) that a
# config of ours may use: field -> its kind; a dict is a message, [kind] a repeated field.
TENSOR = {"name": str, "data_type": "enum", "dims": [int]}
SCHEMA = {
    "name": str,
    "backend": str,
    "max_batch_size": int,
    "input": [TENSOR],
    "output": [{**TENSOR, "label_filename": str}],
    "dynamic_batching": {"max_queue_delay_microseconds": int},
}
DATA_TYPES = {"TYPE_FP32", "TYPE_UINT8"}
TOKEN = re.compile(r'\s*(?:#[^\n]*\n\s*)*("(?:[^"\\\n]|\\.)*"|-?\d+|\w+|[:{}\[\],;])')


class TextFormat:
    """Parses text format against a schema; raises ValueError on anything that is not in it."""

    def __init__(self, text):
        self.tokens, position = [], 0
        text = text.rstrip()
        while position < len(text):
            match = TOKEN.match(text, position)
            if not match:
                raise ValueError(f"cannot read {text[position : position + 20]!r}")
            self.tokens.append(match[1])
            position = match.end()

    def take(self, expected=None):
        if not self.tokens or (expected and self.tokens[0] != expected):
            raise ValueError(f"expected {expected}, found {self.tokens[:1]}")
        return self.tokens.pop(0)

    def message(self, schema, end=None):
        fields = {}
        while self.tokens and self.tokens[0] != end:
            name = self.take()
            if name not in schema:
                raise ValueError(f"no field {name}")
            kind = schema[name]
            repeated = isinstance(kind, list)
            if name in fields and not repeated:
                raise ValueError(f"{name} occurs twice")
            if self.tokens[0] == ":":
                self.take(":")
            elif not isinstance(kind[0] if repeated else kind, dict):
                raise ValueError(f"a colon must follow {name}")
            if repeated:
                fields.setdefault(name, []).extend(self.values(kind[0]))
            else:
                fields[name] = self.value(kind)
        return fields

    def values(self, kind):
        if self.tokens[0] != "[":
            return [self.value(kind)]
        self.take("[")
        values = [self.value(kind)]
        while self.tokens[0] == ",":
            self.take(",")
            values.append(self.value(kind))
        self.take("]")
        return values

    def value(self, kind):
        if isinstance(kind, dict):
            self.take("{")
            fields = self.message(kind, "}")
            self.take("}")
            return fields
        token = self.take()
        if kind is str and token.startswith('"'):
            return token[1:-1]
        if kind is int and re.fullmatch(r"-?\d+", token):
            return int(token)
        if kind == "enum" and token in DATA_TYPES:
            return token
        raise ValueError(f"{token} is not {kind}")


def parse(text):
    return TextFormat(text).message(SCHEMA)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("triton") / "repository"
    model = build_model("cls")
    result = export_model(
        model,
        folder,
        to="triton",
        classes=["ant", "bee", "cat\nfish", "dög", "elk"],
        preprocess=preprocess_of(model),
        source="runs/insects-1",
        attention=True,
        features=True,
    )
    return folder, result


def test_the_repository_has_the_layout_of_the_server(repository):
    folder, result = repository
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    model_files = ("config.pbtxt", "labels.txt", "1/model.onnx")
    expected = (*model_files, "proof.json", "proof.html")
    assert files == {f"insects-1/{name}" for name in expected}
    assert result.target == str(folder / "insects-1") and result.largest_difference < 1e-4
    sizes = [(folder / "insects-1" / name).stat().st_size for name in model_files]
    assert result.bytes == sum(sizes)


def test_the_config_describes_the_model(repository):
    folder, _ = repository
    config = parse((folder / "insects-1" / "config.pbtxt").read_text())
    engine = open_onnx(folder / "insects-1" / "1" / "model.onnx", 1)
    assert config["name"] == "insects-1" and config["backend"] == "onnxruntime"
    assert config["max_batch_size"] > 1
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] > 0
    (pixels,) = config["input"]
    assert pixels == {"name": "pixels", "data_type": "TYPE_FP32", "dims": [3, 16, 16]}
    outputs = engine.run(np.zeros((3, 3, 16, 16), np.float32))
    assert [output["name"] for output in config["output"]] == list(outputs)
    for output in config["output"]:
        assert output["dims"] == list(outputs[output["name"]].shape[1:])
    assert config["output"][0]["label_filename"] == "labels.txt"


def test_labels_have_one_line_each(repository):
    folder, _ = repository
    text = (folder / "insects-1" / "labels.txt").read_text(encoding="utf-8")
    assert text == "ant\nbee\ncat fish\ndög\nelk\n"


def test_an_existing_model_is_not_replaced(repository):
    folder, _ = repository
    model = build_model("cls")
    with pytest.raises(UserError, match="already exists; remove it, or choose another `name`"):
        export_model(
            model,
            folder,
            to="triton",
            classes=list("abcde"),
            preprocess=preprocess_of(model),
            source="runs/insects-1",
            overwrite=True,
        )


def test_any_size_is_minus_one():
    graph = build_graph("rotary", GraphOptions(any_size=True, attention=True, pixels="uint8"))
    config = parse(render_config("a", graph, graph.preprocess))
    assert config["input"][0]["dims"] == [2, -1, -1]
    assert config["input"][0]["data_type"] == "TYPE_UINT8"
    assert config["output"][1]["dims"] == [1, 2, -1, -1]


@pytest.mark.parametrize("name", ["", "a b", "a/b", "../a", ".a", "é"])
def test_a_name_must_fit_a_url(name):
    with pytest.raises(UserError, match="not a model name that Triton accepts"):
        check_model_name(name)


@pytest.mark.parametrize(
    "text",
    [
        'nome: "a"',
        "name: a",
        'name "a"',
        'input [ { name: "a" }',
        'max_batch_size: "8"',
        'name: "a" name: "b"',
        "input [ { dims: [1, ] } ]",
        "input [ { data_type: TYPE_FP31 } ]",
    ],
)
def test_the_parser_of_this_test_is_strict(text):
    with pytest.raises((ValueError, IndexError)):
        parse(text)
