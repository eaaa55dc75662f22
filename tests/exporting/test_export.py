"""Whole exports: the files, their metadata, and nothing at all where one fails."""

import errno
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from tests.exporting.models import build_model, preprocess_of
from vitrail.errors import UserError
from vitrail.exporting import export as export_module
from vitrail.exporting import quantize, writers
from vitrail.exporting.engine import open_onnx, open_openvino
from vitrail.exporting.export import export_model
from vitrail.exporting.formats import FORMATS
from vitrail.exporting.onnx_file import OPSET
from vitrail.exporting.proof import Proof, to_float

CLASSES = ("ant", "bee", "cat", "dog", "elk")
TARGETS = {"onnx": "a.onnx", "openvino": "a.xml", "torch": "a.pt2"}


@pytest.fixture(scope="module")
def model():
    return build_model("cls", depth=2)


@pytest.fixture(scope="module")
def images(model):
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (40, 3, 16, 16)).astype(np.uint8)


@pytest.fixture(scope="module")
def labels(model, images):
    with torch.inference_mode():
        predicted = model(to_float(preprocess_of(model), images)).argmax(dim=1).numpy()
    predicted[::8] = (predicted[::8] + 1) % 5  # some are wrong
    return predicted


@pytest.fixture(scope="module")
def export(model):
    def run(target, **settings):
        settings = {"classes": CLASSES, "preprocess": preprocess_of(model), **settings}
        return export_model(settings.pop("model", model), target, **settings)

    return run


@pytest.fixture(scope="module", params=TARGETS)
def exported(request, export, tmp_path_factory):
    """One export in each format: its folder and its result."""
    folder = tmp_path_factory.mktemp(request.param)
    metadata = {"temperature": 1.5, "origin": "x"}
    target = folder / TARGETS[request.param]
    return folder, export(target, to=request.param, source="runs/a", metadata=metadata)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# ---- each format


def test_an_export_is_equal_and_has_its_proof_beside_it(exported):
    folder, result = exported
    target = TARGETS[result.format]
    second = {"a.bin"} if result.format == "openvino" else set()
    assert names(folder) == {target, f"{target}.proof.json", f"{target}.proof.html"} | second
    assert {path.name for path in result.files} == names(folder)
    assert result.largest_difference < 1e-4 and result.agreement == 1.0 and result.speedup > 0
    card = json.loads((folder / f"{target}.proof.json").read_text())
    assert card == json.loads(json.dumps(result.proof.to_dict()))
    assert "Equal to PyTorch" in (folder / f"{target}.proof.html").read_text()


def read_metadata(path):
    if path.suffix == ".pt2":
        extra = {"vitrail": ""}
        torch.export.load(path, extra_files=extra)
        return json.loads(extra["vitrail"])
    return (open_onnx if path.suffix == ".onnx" else open_openvino)(path, 1).metadata


def test_the_file_holds_all_that_is_needed_to_use_it(exported, model):
    folder, result = exported
    metadata = read_metadata(folder / TARGETS[result.format])
    assert metadata["classes"] == list(CLASSES) and metadata["temperature"] == 1.5
    assert metadata["preprocess"] == preprocess_of(model).to_dict()
    assert metadata["vit"]["width"] == 16 and metadata["origin"] == "x"
    assert metadata["versions"]["vitrail"] and metadata["format"] == 1
    assert metadata["export"]["outputs"] == ["logits"]
    assert metadata["export"].get("opset") == (None if result.format == "torch" else OPSET)
    assert metadata["proof"] == json.loads(json.dumps(result.proof.to_dict()))


def test_a_torch_program_takes_any_batch(exported):
    folder, result = exported
    if result.format == "torch":
        module = torch.export.load(folder / "a.pt2").module()
        for batch in (1, 3, 40):
            assert module(torch.randn(batch, 3, 16, 16))[0].shape == (batch, 5)


def test_openvino_computes_in_float32(exported):
    folder, result = exported
    if result.format == "openvino":
        compiled = open_openvino(folder / "a.xml").compiled
        assert "float" in str(compiled.get_property("INFERENCE_PRECISION_HINT"))


def test_all_outputs_and_bytes_in_openvino(export, tmp_path, model):
    result = export(
        tmp_path / "a.xml", to="openvino", attention=True, features=True, pixels="uint8"
    )
    assert result.proof.differences.keys() == {"logits", "features", "attention"}
    engine = open_openvino(tmp_path / "a.xml", 1)
    assert engine.pixels == "uint8"
    outputs = engine.run(np.zeros((2, 3, 16, 16), np.uint8))
    assert {name: x.shape for name, x in outputs.items()} == {
        "logits": (2, 5),
        "features": (2, 16),
        "attention": (2, 2, 2, 17, 17),
    }


def test_the_result_is_the_document_of_the_command(export, tmp_path, images, labels):
    result = export(tmp_path / "a.onnx", source="runs/a", images=images, labels=labels)
    document = json.loads(json.dumps(result.to_dict()))
    assert list(document) == [
        *("source", "target", "format", "bytes", "images", "largest_difference", "agreement"),
        *("accuracy", "speedup"),
    ]
    assert document["source"] == "runs/a" and document["target"] == str(tmp_path / "a.onnx")
    assert document["bytes"] == (tmp_path / "a.onnx").stat().st_size
    assert document["images"] == 40 and document["accuracy"]["before"] == 0.875
    assert "accuracy 87.5 % -> 87.5 %" in repr(result)
    assert "Equal to PyTorch" in result._repr_html_()


# ---- int8


def test_int8_is_judged_on_labelled_images(export, tmp_path, images, labels):
    result = export(tmp_path / "a.onnx", int8=True, images=images, labels=labels, most=10.0)
    engine = open_onnx(tmp_path / "a.onnx", 1)
    assert engine.metadata["export"]["int8"] is True and result.proof.tolerance is None
    assert result.images == 27  # the others calibrate it
    assert result.accuracy["before"] == pytest.approx(25 / 27)
    assert result.accuracy["after"] > result.accuracy["before"] - 0.1
    low, high = result.accuracy["interval"]
    assert low <= result.accuracy["after"] - result.accuracy["before"] <= high
    kinds = {entry.data_type for entry in onnx.load(tmp_path / "a.onnx").graph.initializer}
    assert onnx.TensorProto.INT8 in kinds
    assert "Quantised to int8" in (tmp_path / "a.onnx.proof.html").read_text()


def test_int8_runs_in_openvino(export, tmp_path, images, labels):
    result = export(
        tmp_path / "a.xml", to="openvino", int8=True, images=images, labels=labels, most=10.0
    )
    assert result.agreement > 0.85


def test_int8_without_labels_says_which_data_to_give(export, tmp_path, images):
    with pytest.raises(UserError, match="give labelled images as `data`"):
        export(tmp_path / "a.onnx", int8=True, images=images)
    assert names(tmp_path) == set()


def test_a_loss_above_the_limit_is_refused_unless_forced(
    export, tmp_path, images, labels, monkeypatch
):
    def damage(values, axis, limit):
        return np.zeros_like(values, np.int8), np.ones(values.shape[axis], np.float32)

    monkeypatch.setattr(quantize, "quantize_weight", damage)
    settings = {"int8": True, "images": images, "labels": labels}
    with pytest.raises(
        UserError, match=r"int8 loses \d+\.\d points .*on 27 images\), more than 2;"
    ):
        export(tmp_path / "a.onnx", most=2, **settings)
    assert names(tmp_path) == set()
    result = export(tmp_path / "a.onnx", most=2, force=True, **settings)
    assert result.accuracy["after"] < 0.6


def test_more_layers_stay_in_float_until_the_loss_is_within_the_limit(
    export, tmp_path, images, labels, monkeypatch
):
    tried = []

    def prove(bundle, engine, to, **settings):
        proof = original(bundle, engine, to, **settings)
        tried.append(proof)
        worse = proof.accuracy.__class__(
            before=0.9, after=0.9 - 0.1 / len(tried), interval=(0, 0), images=40
        )
        return Proof(**{**vars(proof), "accuracy": worse})

    original = export_module.prove
    monkeypatch.setattr(export_module, "prove", prove)
    monkeypatch.setattr(quantize, "TARGET_ERROR", 1.0)
    result = export(tmp_path / "a.onnx", int8=True, images=images, labels=labels, most=5.1)
    assert len(tried) == 2 and len(result.proof.float_layers) == 1
    assert result.proof.attempts == 2  # chosen on the images that judge it: the card says so
    assert "best of 2 int8 forms was chosen on these images" in result._repr_html_()


def test_int8_needs_a_runtime_that_has_it(export, tmp_path, images, labels):
    with pytest.raises(UserError, match="`int8` needs `to='onnx'`"):
        export(tmp_path / "a.pt2", to="torch", int8=True, images=images, labels=labels)


# ---- nothing half-written


def test_a_difference_writes_nothing_and_names_the_block(export, tmp_path, monkeypatch):
    def damage(graph, example):
        proto = onnx.ModelProto()
        proto.CopyFrom(traced(graph, example))
        for entry in proto.graph.initializer:
            if entry.name == "model.blocks.1.mlp.fc2.bias":
                values = onnx.numpy_helper.to_array(entry) * 3
                entry.CopyFrom(onnx.numpy_helper.from_array(values, entry.name))
        return proto

    traced = writers.build_onnx
    monkeypatch.setattr(writers, "build_onnx", damage)
    with pytest.raises(UserError) as caught:
        export(tmp_path / "a.onnx")
    message = str(caught.value)
    assert "the logits of onnxruntime differ from PyTorch's by" in message
    assert message.endswith("the first block that differs is blocks.1; nothing was written")
    assert names(tmp_path) == set() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("failing", ["a.onnx", "a.onnx.proof.json"])
def test_a_full_disk_leaves_nothing(export, tmp_path, monkeypatch, failing):
    def full(self, *arguments, **settings):
        if self.name == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return (write_text if isinstance(arguments[0], str) else write_bytes)(
            self, *arguments, **settings
        )

    write_bytes, write_text = Path.write_bytes, Path.write_text
    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match="No space left on device, free some space; nothing was"):
        export(tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())


def test_an_existing_file_stays_unless_it_may_be_overwritten(export, tmp_path):
    (tmp_path / "a.onnx").write_text("mine")
    with pytest.raises(UserError, match="already exists; choose another `out`, or set `overwrite`"):
        export(tmp_path / "a.onnx")
    assert (tmp_path / "a.onnx").read_text() == "mine"
    export(tmp_path / "a.onnx", overwrite=True)
    assert open_onnx(tmp_path / "a.onnx").metadata["classes"] == list(CLASSES)


def test_a_failed_export_keeps_the_file_that_it_would_replace(export, tmp_path):
    (tmp_path / "a.onnx").write_text("mine")
    with pytest.raises(UserError, match="more than 1e-12"):
        export(tmp_path / "a.onnx", overwrite=True, tolerance=1e-12)
    assert names(tmp_path) == {"a.onnx"} and (tmp_path / "a.onnx").read_text() == "mine"


# ---- bad input


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        ("a.bin", {}, "does not end in .onnx"),
        ("folder.onnx", {}, "is a folder"),
        ("a.onnx", {"to": "tflite"}, "unknown format 'tflite'; choose onnx, openvino, torch"),
        ("a.onnx", {"classes": CLASSES[:3]}, "3 names for 5 classes"),
        ("a.onnx", {"model": "a head"}, "a scikit-learn head cannot be exported"),
        ("file", {"to": "triton"}, "is a file, not a folder"),
        ("repository", {"to": "triton", "name": "a/b"}, "not a model name that Triton accepts"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(export, tmp_path, target, settings, message):
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=message) as caught:
        export(tmp_path / target, **settings)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == {"file"}


@pytest.mark.parametrize(
    ("package", "to"),
    [("onnx", "onnx"), ("onnxruntime", "onnx"), ("onnxscript", "triton"), ("openvino", "openvino")],
)
def test_a_missing_package_says_what_to_install(export, tmp_path, monkeypatch, package, to):
    def refuse(name, *arguments):
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return load(name, *arguments)

    import importlib

    load = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", refuse)
    extra = "openvino" if package == "openvino" else "onnx"
    target = tmp_path / f"a{FORMATS[to].suffix}"
    with pytest.raises(UserError, match=rf"{package} is not installed; .*'vitrail\[{extra}\]'"):
        export(target, to=to)
    assert names(tmp_path) == set()


# ---- engines


def test_damaged_and_foreign_files_are_one_line(tmp_path, export):
    path = tmp_path / "a.onnx"
    export(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    (tmp_path / "b.xml").write_text("<net")
    (tmp_path / "b.bin").touch()
    foreign = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("Relu", ["x"], ["y"])],
            "foreign",
            [onnx.helper.make_tensor_value_info("x", 1, [1])],
            [onnx.helper.make_tensor_value_info("y", 1, [1])],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 20)],
        ir_version=10,
    )
    onnx.save(foreign, tmp_path / "foreign.onnx")
    for opening, file, message in (
        (open_onnx, "a.onnx", "cannot open .* with onnxruntime"),
        (open_onnx, "foreign.onnx", "has the inputs x, expected only pixels"),
        (open_onnx, "missing.onnx", "does not exist"),
        (open_openvino, "b.xml", "cannot open .* with OpenVINO"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            opening(tmp_path / file)
        assert "\n" not in str(caught.value)


def test_engines_import_no_torch():
    import subprocess
    import sys

    code = (
        "import sys, vitrail.exporting.engine, vitrail.exporting.formats; "
        "sys.exit('torch' in sys.modules or 'onnx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
