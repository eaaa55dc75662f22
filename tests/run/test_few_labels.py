"""Training with few labels: from a pretraining, and with a part of the labels."""

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.run.conftest import SMALL
from tests.run.test_pretrain import TINY
from vitrail.data.split import keep_labels
from vitrail.errors import UserError
from vitrail.run.recipe import read_recipe

PLAIN = {**SMALL, "train": {"batch": 64, "log_every": 5}, "data": {"workers": 0}}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A pretraining, which no test changes."""
    out = tmp_path_factory.mktemp("runs") / "pre"
    return vitrail.pretrain("digits", out=out, settings=TINY, report=False, quiet=True).folder


def test_training_from_a_pretraining_uses_the_recipe_from_scratch(pretrained, digits):
    run = digits(weights=pretrained, settings={"train": {"steps": 5}, "data": {"workers": 0}})
    recipe = read_recipe(run.folder / "recipe.toml")
    assert recipe["train"]["optimizer"] == "muon" and recipe["train"]["layer_decay"] == 0.75
    assert recipe["train"]["lr"] == pytest.approx(1e-2 / 3, abs=1e-5)
    assert recipe["train"]["probe"] == 1412 and recipe["vit"]["width"] == 16
    stored = read_recipe(pretrained / "recipe.toml")
    assert recipe["preprocess"]["mean"] == stored["preprocess"]["mean"]
    text = (run.folder / "recipe.toml").read_text()
    assert "learned from the images of digits by masked" in text


def test_the_pretrained_weights_are_where_training_starts(pretrained, digits):
    tiny = {"train": {"steps": 1, "lr": 1e-9, "weight_decay": 0.0}, "data": {"workers": 0}}
    run = digits(weights=pretrained, settings=tiny)
    mine, theirs = run.classifier.model, vitrail.load_backbone(pretrained).model
    difference = mine.blocks[0].mlp.fc1.weight - theirs.blocks[0].mlp.fc1.weight
    assert float(difference.detach().abs().max()) < 1e-6


def test_a_part_that_learns_is_refused_after_a_pretraining(pretrained, digits):
    with pytest.raises(UserError, match="has learned without labels"):
        digits(weights=pretrained, tune="head")


def test_a_pretraining_has_no_classes_to_evaluate(pretrained):
    with pytest.raises(UserError, match="has no classification head"):
        vitrail.load(pretrained)


def test_a_pretraining_is_converted_and_has_features(pretrained, tmp_path):
    vitrail.convert(pretrained, to="timm", out=tmp_path / "timm")
    comparison = vitrail.compare_heads(pretrained, "digits", kinds=["nearest-mean"])
    assert comparison.best.accuracy > 0.2


def test_a_recipe_of_a_pretraining_is_not_for_training(pretrained, digits):
    with pytest.raises(UserError, match="repeat it with `vitrail pretrain`"):
        digits(settings={}, recipe=pretrained / "recipe.toml")


def test_a_fraction_of_the_labels_is_the_same_for_every_class_and_grows():
    source = vitrail.open_data("digits")
    tenth, fifth = keep_labels(source, 0.1), keep_labels(source, 0.2)
    train, few, more = (set(np.flatnonzero(s.splits == "train")) for s in (source, tenth, fifth))
    assert few < more < train
    counts = np.bincount(source.labels[sorted(few)])
    assert counts.min() >= 13 and counts.max() <= 15
    for split in ("val", "test"):
        assert np.array_equal(tenth.splits == split, source.splits == split)


def test_few_labels_are_pretrained_first(digits, tmp_path):
    run = digits(settings=PLAIN, labels_only=0.1, epochs=1)
    recipe = read_recipe(run.folder / "recipe.toml")
    assert recipe["weights"] == str(tmp_path / "run-pre")
    assert recipe["data"]["labelled"] == 0.1
    first = read_recipe(tmp_path / "run-pre" / "recipe.toml")
    assert first["pretrain"]["method"] == "masked"
    assert run.metrics["steps"] == 2 and read_steps(tmp_path / "run-pre") == 22


def read_steps(folder):
    return vitrail.resume(folder, report=False, quiet=True).metrics["steps"]


def test_without_weights_only_the_labelled_part_is_trained_on(digits, tmp_path):
    run = digits(settings=PLAIN, labels_only=0.1, weights="none", epochs=1)
    assert run.metrics["steps"] == 2 and not (tmp_path / "run-pre").exists()
    again = vitrail.resume(run.folder, report=False, quiet=True)
    assert again.metrics == run.metrics


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_an_impossible_fraction_is_one_line(digits, fraction):
    with pytest.raises(UserError, match="give a fraction above 0, at most 1"):
        digits(labels_only=fraction)


def test_a_table_with_empty_labels_says_how_to_use_them(tmp_path, monkeypatch, digits):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    rng, lines = np.random.default_rng(0), ["path,label"]
    for number in range(60):
        label = ("dark", "light")[number % 2]
        pixels = rng.integers(0, 60, (16, 16, 3)) + 190 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{label if number < 30 else ''}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    with pytest.raises(UserError, match="row 32: the label is missing; if images"):
        vitrail.open_data(tmp_path / "table.csv")
    assert len(vitrail.open_data(tmp_path / "table.csv", labels="partial")) == 30
    assert len(vitrail.open_data(tmp_path / "table.csv", labels="none")) == 60
    settings = {**PLAIN, "train": {"batch": 4}, "data": {"workers": 0, "labels": "partial"}}
    run = vitrail.train(
        tmp_path / "table.csv",
        settings=settings,
        epochs=1,
        out=tmp_path / "out",
        report=False,
        quiet=True,
    )
    assert read_steps(tmp_path / "out-pre") > 1.5 * run.metrics["steps"]
