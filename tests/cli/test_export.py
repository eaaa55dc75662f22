"""`vitrail export`: the files, the proof, and one line for every mistake."""

import json

import pytest

import vitrail
from tests.cli.conftest import call
from vitrail.inference.export import choose_target, name_model


def test_export_proves_on_the_validation_images_of_the_run(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _err = call(capsys, "export", folder, "--json")
    document = json.loads(out)
    assert code == 0 and document["target"] == "digits.onnx" and document["format"] == "onnx"
    val = (vitrail.open_data("digits").splits == "val").sum()
    assert document["images"] == val and document["agreement"] == 1.0
    assert document["largest_difference"] < 1e-4 and document["accuracy"]["before"] > 0.1
    assert {path.name for path in tmp_path.iterdir()} == {
        *("digits.onnx", "digits.onnx.proof.json", "digits.onnx.proof.html")
    }
    code, out, _err = call(capsys, "export", folder)
    assert "digits.onnx already exists; choose another --out, or set --overwrite" in code


def test_the_report_of_an_export_is_short(capsys, folder, tmp_path):
    code, out, _err = call(
        capsys, "export", folder, tmp_path / "repository", "--to", "triton", "--name", "digits"
    )
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith(str(tmp_path / "repository" / "digits"))
    assert [line.partition(":")[0] for line in lines[1:]] == [
        *("proof", "accuracy", "speed", "proof card")
    ]
    assert (tmp_path / "repository" / "digits" / "config.pbtxt").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "a.bin"], "a.bin does not end in .onnx, as files for onnx do"),
        (["--out", "a.xml", "--to", "onnx"], "a.xml does not end in .onnx"),
        (["--data", "missing"], "missing"),
        (["--any-size", "--vit.positions", "learned"], "positions"),
        (["--int8", "--to", "torch"], "--int8 needs --to onnx, --to openvino or --to triton"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    capsys, folder, tmp_path, monkeypatch, flags, message
):
    monkeypatch.chdir(tmp_path)
    code, out, _err = call(capsys, "export", folder, *flags)
    assert str(code).startswith("error: ") and message in code and "\n" not in code and not out
    assert not list(tmp_path.iterdir())


def test_int8_needs_labelled_images(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = tmp_path / "weights.safetensors"
    vitrail.convert(folder, "timm", weights)
    flags = ["--preprocess", "half", "--vit.heads", "1", "--int8"]
    code, _out, _err = call(capsys, "export", weights, *flags)
    assert "give labelled images as --data" in code
    assert list(tmp_path.iterdir()) == [weights]


def test_a_headless_model_returns_features(folder, tmp_path):
    exported = vitrail.export(folder, tmp_path / "a.onnx", vit={"head": "none"}, data="digits")
    assert exported.agreement is None and exported.proof.differences.keys() == {"features"}
    with pytest.raises(vitrail.UserError, match="has no classification head"):
        vitrail.load(tmp_path / "a.onnx")


def test_the_name_of_a_model_is_that_of_its_run_or_file(tmp_path):
    (tmp_path / "flowers-1").mkdir()
    (tmp_path / "flowers-1" / "model.safetensors").touch()
    assert name_model(tmp_path / "flowers-1") == "flowers-1"
    assert name_model(tmp_path / "flowers-1" / "model.safetensors") == "flowers-1"
    assert name_model("weights/my vit.pth") == "my-vit"
    assert name_model("hf:google/vit-base") == "vit-base"
    assert name_model("Ti/16 augreg") == "16-augreg"


def test_format_and_file_follow_from_each_other():
    assert choose_target(None, None, "a")[1].name == "a.onnx"
    assert choose_target(None, "openvino", "a")[1].name == "a.xml"
    assert choose_target("b.pt2", None, "a")[0] == "torch"
    assert choose_target("b.xml", None, "a")[0] == "openvino"
    with pytest.raises(vitrail.UserError, match="unknown format 'tflite'"):
        choose_target("b", "tflite", "a")
