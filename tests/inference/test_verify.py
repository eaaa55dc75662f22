"""The same model, provably: a flipped bit is found, and so are other answers."""

import hashlib
import json
import random
import struct

import pytest
import torch

import vitrail
from vitrail.cli.main import main
from vitrail.data.config import Preprocess
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.zoo.file import load_model, save_model
from vitrail.zoo.load import load_weights
from vitrail.zoo.reference import compute_reference, describe_reference, reference_images

PREPROCESS = Preprocess(size=16, crop=0.8, channels=3)


@pytest.fixture
def path(tmp_path):
    torch.manual_seed(0)
    model = ViT(ViTConfig(image=16, patch=8, width=16, depth=2, heads=2, classes=3)).eval()
    torch.nn.init.normal_(model.head.weight)
    metadata = {
        "classes": ["a", "b", "c"],
        "preprocess": PREPROCESS.to_dict(),
        "reference": describe_reference(compute_reference(model, PREPROCESS)),
    }
    save_model(tmp_path / "model.safetensors", model, metadata)
    return tmp_path / "model.safetensors"


def spans(content):
    """Where each tensor starts and ends in the file."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    return {
        name: [8 + length + offset for offset in entry["data_offsets"]]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def test_an_untouched_model_passes(path):
    result = vitrail.verify(path)
    assert result.passed and result.largest_difference < 1e-5
    assert result.tensors == len(spans(path.read_bytes())) and result.images == 4


def test_a_flipped_bit_names_its_tensor(path):
    content = path.read_bytes()
    for name, (start, end) in spans(content).items():
        damaged, place = bytearray(content), random.Random(name).randrange(start, end)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        for load in (vitrail.load, load_weights, load_model):
            with pytest.raises(UserError, match=f"is damaged: its tensor {name} has the sha256"):
                load(path)


def test_a_changed_entry_of_the_metadata_is_found(path):
    content = path.read_bytes()
    assert content.count(b'\\"crop\\": 0.8') == 1
    path.write_bytes(content.replace(b'\\"crop\\": 0.8', b'\\"crop\\": 0.9'))
    with pytest.raises(UserError, match="metadata does not have the sha256"):
        vitrail.load(path)


def test_other_answers_do_not_pass(path, capsys):
    model, metadata = load_model(path)
    other = describe_reference(compute_reference(model, PREPROCESS) + 0.01)
    save_model(path, model, {**metadata.document, "reference": other})
    result = vitrail.verify(path)
    assert not result.passed and result.largest_difference == pytest.approx(0.01, rel=0.01)
    with pytest.raises(SystemExit) as exit:
        main(["verify", str(path)])
    assert exit.value.code == 1 and "computes different answers" in capsys.readouterr().out
    with pytest.raises(UserError, match="computes other answers here"):
        vitrail.export(path, path.parent / "model.onnx")
    with pytest.raises(SystemExit) as exit:
        main(["verify", str(path), "--json"])
    assert exit.value.code == 1 and json.loads(capsys.readouterr().out)["passed"] is False


def test_reference_answers_of_another_shape_are_one_line(path):
    model, metadata = load_model(path)
    save_model(path, model, {**metadata.document, "reference": {"logits": [[1.0, 2.0]]}})
    with pytest.raises(UserError, match="reference answers of shape"):
        vitrail.verify(path)


def test_a_model_without_checksums_says_how_to_add_them(path, tmp_path):
    vitrail.convert(path, to="timm", out=tmp_path / "timm")
    with pytest.raises(UserError, match="vitrail convert MODEL --to vitrail"):
        vitrail.verify(tmp_path / "timm")
    vitrail.convert(tmp_path / "timm", to="vitrail", out=tmp_path / "again.safetensors")
    assert vitrail.verify(tmp_path / "again.safetensors").passed


def test_adapted_weights_have_no_reference(path):
    adapted = vitrail.load(path, vit={"image": 32})
    assert adapted.metadata.reference is None and adapted.metadata.checksums is None


def test_the_identity_depends_on_weights_and_metadata(path):
    model, metadata = load_model(path)
    before = vitrail.verify(path).sha256
    save_model(path, model, dict(metadata.document))
    assert vitrail.verify(path).sha256 == before
    save_model(path, model, {**metadata.document, "classes": ["a", "b", "d"]})
    assert vitrail.verify(path).sha256 != before


def test_reference_images_never_change():
    """Their pixels are part of the file format: other pixels would fail every stored model."""
    for settings, wanted in (
        (PREPROCESS, "87c50ba7e856fd1e"),
        (Preprocess(size=8, channels=1), "715e34bd56753111"),
    ):
        content = b"".join(image.tobytes() for image in reference_images(settings))
        assert hashlib.sha256(content).hexdigest()[:16] == wanted


def test_the_command_prints_what_it_compared(path, capsys):
    main(["verify", str(path)])
    out = capsys.readouterr().out
    assert "is the model that was tested" in out and "4 reference images" in out


def test_an_exported_file_computes_the_same_answers(path, tmp_path):
    pytest.importorskip("onnxruntime")
    vitrail.export(path, tmp_path / "model.onnx")
    result = vitrail.verify(tmp_path / "model.onnx")
    assert result.passed and result.tensors == 0 and "onnxruntime" in result.engine
    assert result.sha256 == vitrail.verify(path).sha256
