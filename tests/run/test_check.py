"""`vitrail.check`: the problems of a data set, and the plan that `train` would follow."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.cli.conftest import call
from vitrail.run.check import check
from vitrail.run.design import design_recipe
from vitrail.run.request import Request
from vitrail.training.device import pick_device


@pytest.fixture
def data(photos):
    """Photos with one copy across splits."""
    (photos / "test" / "dark" / "copy.png").write_bytes(
        (photos / "train" / "dark" / "0.png").read_bytes()
    )
    return photos


def test_the_plan_is_that_of_train(data):
    found = check(data)
    expected = design_recipe(found.source, Request(data=str(data)), pick_device("auto"))
    assert found.plan == expected and found.error is None and found.plan_error is None


def test_a_run_follows_the_plan(data, tmp_path, monkeypatch):
    """What `check` promises is what `train` writes into recipe.toml."""
    from vitrail.run.recipe import Recipe, read_recipe, settings_from_dict

    planned = check(data).plan.recipe
    monkeypatch.setattr("vitrail.run.train.complete_run", lambda *arguments: None)
    vitrail.train(data, out=tmp_path / "run", quiet=True)
    written = settings_from_dict(Recipe, read_recipe(tmp_path / "run" / "recipe.toml"))
    assert (written.model, written.vit) == (planned.model, planned.vit)
    assert written.source == planned.source
    measured = {"mean": written.preprocess.mean, "std": written.preprocess.std}
    assert written.preprocess == replace(planned.preprocess, **measured)


def test_the_result_is_the_document_that_the_command_prints(capsys, data):
    code, out, _ = call(capsys, "check", data, "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(check(data).to_dict()))


def test_counts_and_copies_are_attributes(data):
    found = check(data)
    assert found.images == 21 and found.split == {"train": 16, "val": 2, "test": 3}
    assert found.classes == {"dark": 11, "light": 10}
    assert found.leaks == [["test/dark/copy.png", "train/dark/0.png"]] or len(found.leaks) == 1
    assert found.broken == () and found.duplicates == []
    with pytest.raises(AttributeError):
        found.plan = None


def test_a_broken_image_is_an_error_unless_it_is_skipped(data):
    (data / "train" / "dark" / "bad.png").write_bytes(b"no image")
    assert "would fail" in check(data).error and check(data).broken[0].path.endswith("bad.png")
    assert check(data, skip_broken=True).error is None


def test_data_that_cannot_be_trained_on_has_no_plan(tmp_path):
    random = np.random.default_rng(0)
    for label in ("a", "b"):
        (tmp_path / "specks" / label).mkdir(parents=True)
        for number in range(5):
            pixels = random.integers(0, 256, (1, 1, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "specks" / label / f"{number}.png")
    found = check(tmp_path / "specks")
    assert (found.plan is None) == (found.plan_error is not None)
    assert (found.plan is None) == ("error" in found.to_dict()["plan"])


def test_pages_and_sheets_are_written(data, tmp_path):
    check(data, out=tmp_path / "check.html", augmented=tmp_path / "sheet.png")
    assert "<html" in (tmp_path / "check.html").read_text()
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > 100


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"out": "photos"}, "is a folder; give `out` a file name"),
        ({"out": "photos/train/dark/page.html"}, "choose another `out`"),
        ({"augmented": "sheet.jpg"}, r"ends in \.png"),
        ({"workers": -1}, "`workers` is -1"),
    ],
)
def test_a_wrong_target_is_refused_before_any_image_is_read(data, monkeypatch, target, message):
    monkeypatch.setattr("vitrail.run.check.audit_data", None)
    monkeypatch.chdir(data.parent)
    with pytest.raises(vitrail.UserError, match=message):
        check(data, **target)


def test_it_reads_well(data):
    found = check(data)
    assert "DataCheck of photos: 21 images of 2 classes" in repr(found)
    assert "model " in repr(found) and "<table>" in found._repr_html_()


def test_an_opened_data_set_can_be_checked():
    found = check(vitrail.open_data("digits"), workers=0)
    assert found.images == 1797 and found.plan.recipe.source == "digits"
