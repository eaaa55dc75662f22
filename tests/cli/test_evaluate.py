"""Which images `evaluate` judges, and what it tells of them."""

import json
import os
import shutil

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
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.run.classifier import Classifier, load
from vitrail.run.scores import evaluate, open_for
from vitrail.zoo.file import save_model

ODD = ["[/x]", "[cat] dog", "plain"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three classes of twelve squares, with names that look like markup."""
    place, luck = tmp_path_factory.mktemp("own") / "data", np.random.default_rng(0)
    for name in ("x", "cat", "plain"):
        (place / name).mkdir(parents=True)
        for number in range(12):
            pixels = luck.integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(place / name / f"{number}.png")
    return place


@pytest.fixture(scope="module")
def model(data):
    """What a run on that data would leave."""
    torch.manual_seed(0)
    source = open_data(data)
    facts = {
        "classes": list(source.classes),
        "preprocess": Preprocess(size=8).plain(),
        "data": {"name": "data", "source": str(data), "fingerprint": fingerprint(source)},
        "temperature": None,
    }
    vit = ViTConfig(image=8, patch=2, classes=3, width=8, depth=1, heads=1)
    save_model(data.parent / "model.safetensors", ViT(vit), facts)
    return data.parent / "model.safetensors"


def test_own_data_is_known_wherever_it_lies(model, data, tmp_path, caplog):
    shutil.copytree(data, tmp_path / "copy")
    own = open_data(data)
    for place in (tmp_path / "copy", data):
        source, part = open_for(load(model), place, None)
        assert part == "test" and source.splits.tolist() == own.splits.tolist()
    assert not caplog.records


def test_one_image_less_is_other_data_judged_whole_with_a_warning(model, data, tmp_path, caplog):
    shutil.copytree(data, tmp_path / "copy")
    (tmp_path / "copy" / "cat" / "3.png").unlink()
    source, part = open_for(load(model), tmp_path / "copy", None)
    assert part == "all" and len(source) == 35
    assert "images it learned from may be among these" in caplog.messages[0]
    open_for(load(model), tmp_path / "copy", "all")  # asked for
    assert len(caplog.messages) == 1


def test_own_data_that_was_changed_is_judged_with_a_warning(model, data, tmp_path, caplog):
    classifier = load(model)
    shutil.copytree(data, tmp_path / "copy")
    (tmp_path / "copy" / "cat" / "3.png").unlink()
    classifier.facts["data"]["source"] = str(tmp_path / "copy")
    assert open_for(classifier, tmp_path / "copy", None)[1] == "test"
    assert "images it learned from may be among these" in caplog.messages[0]


def test_training_images_are_judged_as_they_are_predicted(data, monkeypatch):
    """Not kept whole as well, for crops that nobody makes."""
    vit = ViTConfig(image=72, patch=24, classes=3, width=8, depth=1, heads=1)
    classifier = Classifier(ViT(vit), open_data(data).classes, Preprocess(size=72))
    kept = []
    monkeypatch.setattr(Loader, "_prepare", lambda self, split, reader: kept.append(reader) or {})
    monkeypatch.setattr(Loader, "evaluation", lambda self, split, batch: iter(()))
    with pytest.raises(UserError, match="no images to evaluate"):
        evaluate(classifier, open_data(data), "all")
    assert len(kept) == 3 and not any(reader.whole for reader in kept)


def test_data_too_small_to_be_split_is_judged_whole(model, data, tmp_path):
    for name in ("x", "cat", "plain"):
        (tmp_path / "few" / name).mkdir(parents=True)
        shutil.copy(data / name / "0.png", tmp_path / "few" / name)
    assert open_for(load(model), tmp_path / "few", None)[1] == "all"


def test_the_surest_mistakes_stand_in_the_json(capsys, model, data):
    code, out, _ = call(capsys, "evaluate", model, data, "--split", "all", "--json")
    numbers = json.loads(out)
    found = numbers["mistakes"]
    assert code == 0 and 0 < len(found) <= 20
    for one in found:
        assert list(one) == ["path", "label", "predicted", "probability"]
        assert (data / one["path"]).is_file() and one["path"].startswith(one["label"] + os.sep)
        assert one["predicted"] in numbers["classes"] and one["predicted"] != one["label"]
    sure = [one["probability"] for one in found]
    assert sure == sorted(sure, reverse=True)


@pytest.mark.parametrize("classes", [3, 13])
def test_names_that_look_like_markup_are_printed_as_they_are(capsys, model, data, classes):
    from vitrail.cli.evaluate import show
    from vitrail.run.scores import evaluate

    source = open_data(data)
    names = [*ODD, *(f"[b]{number}" for number in range(classes - 3))]
    vit = ViTConfig(image=8, patch=2, classes=classes, width=8, depth=1, heads=1)
    classifier = Classifier(ViT(vit), names, Preprocess(size=8))
    show(evaluate(classifier, source, "all"))
    out = capsys.readouterr().out
    assert "[/x]" in out and "[cat] dog" in out
