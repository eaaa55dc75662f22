"""Which images `evaluate` uses, and what it prints about them."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.cli.conftest import call
from vitrail.data.config import Preprocess
from vitrail.data.loader import Loader
from vitrail.data.open import open_data
from vitrail.data.source import fingerprint
from vitrail.errors import UserError
from vitrail.inference.classifier import Classifier
from vitrail.inference.evaluate import evaluate
from vitrail.inference.labelled_data import open_evaluation_data
from vitrail.inference.load import load
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.zoo.file import save_model

ODD = ["[/x]", "[cat] dog", "plain"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three classes of twelve squares, with names that look like markup."""
    root, rng = tmp_path_factory.mktemp("own") / "data", np.random.default_rng(0)
    for name in ("x", "cat", "plain"):
        (root / name).mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def model(data):
    """The model file of a run on that data."""
    torch.manual_seed(0)
    source = open_data(data)
    metadata = {
        "classes": list(source.classes),
        "preprocess": Preprocess(size=8).to_dict(),
        "data": {"name": "data", "source": str(data), "fingerprint": fingerprint(source)},
        "temperature": None,
    }
    vit = ViTConfig(image=8, patch=2, classes=3, width=8, depth=1, heads=1)
    save_model(data.parent / "model.safetensors", ViT(vit), metadata)
    return data.parent / "model.safetensors"


def test_training_data_is_recognised_after_it_was_moved(model, data, tmp_path, caplog):
    shutil.copytree(data, tmp_path / "copy")
    own = open_data(data)
    for root in (tmp_path / "copy", data):
        source, part = open_evaluation_data(load(model).predictor, root, None)
        assert part == "test" and source.splits.tolist() == own.splits.tolist()
    assert not caplog.records


def test_data_with_one_image_less_is_evaluated_whole_with_a_warning(model, data, tmp_path, caplog):
    shutil.copytree(data, tmp_path / "copy")
    (tmp_path / "copy" / "cat" / "3.png").unlink()
    source, part = open_evaluation_data(load(model).predictor, tmp_path / "copy", None)
    assert part == "all" and len(source) == 35
    assert "some of these images may be training images" in caplog.messages[0]
    open_evaluation_data(
        load(model).predictor, tmp_path / "copy", "all"
    )  # no warning: it was requested
    assert len(caplog.messages) == 1


def test_changed_training_data_is_evaluated_with_a_warning(model, data, tmp_path, caplog):
    predictor = load(model).predictor
    shutil.copytree(data, tmp_path / "copy")
    (tmp_path / "copy" / "cat" / "3.png").unlink()
    training_data = replace(predictor.training_data, source=str(tmp_path / "copy"))
    predictor = replace(predictor, training_data=training_data)
    assert open_evaluation_data(predictor, tmp_path / "copy", None)[1] == "test"
    assert "some of these images may be training images" in caplog.messages[0]


def test_training_images_are_preprocessed_as_in_predict(data, monkeypatch):
    """Without the larger copies that random crops need."""
    vit = ViTConfig(image=72, patch=24, classes=3, width=8, depth=1, heads=1)
    classifier = Classifier(ViT(vit), open_data(data).classes, Preprocess(size=72))
    kept = []
    monkeypatch.setattr(Loader, "_prepare", lambda self, split, reader: kept.append(reader) or {})
    monkeypatch.setattr(Loader, "evaluation", lambda self, split, batch: iter(()))
    with pytest.raises(UserError, match="no images to evaluate"):
        evaluate(classifier.predictor, open_data(data), "all")
    assert len(kept) == 3 and not any(reader.uncropped for reader in kept)


def test_data_too_small_to_split_is_evaluated_whole(model, data, tmp_path):
    for name in ("x", "cat", "plain"):
        (tmp_path / "few" / name).mkdir(parents=True)
        shutil.copy(data / name / "0.png", tmp_path / "few" / name)
    assert open_evaluation_data(load(model).predictor, tmp_path / "few", None)[1] == "all"


def test_json_lists_the_most_confident_errors(capsys, model, data):
    code, out, _ = call(capsys, "evaluate", model, data, "--split", "all", "--json")
    numbers = json.loads(out)
    found = numbers["mistakes"]
    assert code == 0 and 0 < len(found) <= 20
    for one in found:
        assert list(one) == ["path", "label", "predicted", "probability"]
        assert (data / one["path"]).is_file() and one["path"].startswith(one["label"] + os.sep)
        assert one["predicted"] in numbers["classes"] and one["predicted"] != one["label"]
    confidence = [one["probability"] for one in found]
    assert confidence == sorted(confidence, reverse=True)


@pytest.mark.parametrize("classes", [3, 13])
def test_class_names_are_not_interpreted_as_markup(capsys, model, data, classes):
    from vitrail.cli.evaluate import print_evaluation

    source = open_data(data)
    names = [*ODD, *(f"[b]{number}" for number in range(classes - 3))]
    vit = ViTConfig(image=8, patch=2, classes=classes, width=8, depth=1, heads=1)
    classifier = Classifier(ViT(vit), names, Preprocess(size=8))
    print_evaluation(evaluate(classifier.predictor, source, "all").to_dict())
    out = capsys.readouterr().out
    assert "[/x]" in out and "[cat] dog" in out
