"""`vitrail head` as a user calls it, on digits."""

import json
import shutil

import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier

import vitrail
from tests.cli.conftest import call
from tests.heads.samples import tiny
from vitrail.cli.main import main
from vitrail.data.source import indices, open_data
from vitrail.heads import keep
from vitrail.heads.kinds import KINDS


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.getbasetemp() / "head-cache"))


@pytest.fixture(scope="module")
def kept(folder, tmp_path_factory):
    """The run with a head beside its model."""
    place = tmp_path_factory.mktemp("headed") / "digits"
    shutil.copytree(folder, place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_CACHE", str(tmp_path_factory.getbasetemp() / "head-cache"))
        main(["head", str(place), "digits", "--kind", "knn", "nearest-mean", "--json"])
    return place


def test_a_table_of_heads_as_json(capsys, folder, tmp_path):
    arguments = ("--kind", "logistic", "lda", "--shots", "2", "--out", tmp_path / "h.skops")
    code, out, _ = call(capsys, "head", folder, "digits", *arguments, "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["kind"] for row in rows] == ["logistic", "lda"]
    keys = ["kind", "accuracy", "interval", "fit_seconds", "predict_seconds"]
    assert list(rows[0])[:5] == keys
    assert all(row["interval"][0] < row["accuracy"] < row["interval"][1] for row in rows)
    assert rows[0]["shots"][0]["mean"] < rows[0]["accuracy"]
    (best,) = (row for row in rows if row["best"])
    assert best["validation"] == max(row["validation"] for row in rows)
    assert (tmp_path / "h.skops").is_file()


def test_features_of_cls_can_be_asked_for(capsys, folder, tmp_path):
    from vitrail.zoo.file import load_model, save_model

    model, (_, facts) = tiny(), load_model(folder / "model.safetensors")
    path = tmp_path / "cls.safetensors"
    save_model(path, model, {**facts, "vit": vars(model.config)})
    arguments = ("--kind", "nearest-mean", "--features", "cls", "--out", tmp_path / "h.skops")
    code, out, _ = call(capsys, "head", path, "digits", *arguments, "--json")
    assert code == 0 and json.loads(out)[0]["accuracy"] > 0.3
    assert keep.load(tmp_path / "h.skops").features.what == "cls"


@pytest.mark.slow
def test_all_kinds_beat_chance_on_digits(capsys, folder, tmp_path):
    _, out, _ = call(capsys, "head", folder, "digits", "--all", "--out", tmp_path / "h", "--json")
    rows = json.loads(out)
    assert [row["kind"] for row in rows] == list(KINDS)
    assert min(row["accuracy"] for row in rows) > 0.6


def test_the_best_head_lies_beside_the_model(kept):
    assert (kept / "head.skops").is_file()


def test_evaluate_takes_a_head(capsys, kept):
    _, out, _ = call(capsys, "evaluate", kept, "digits", "--head", kept, "--json")
    numbers = json.loads(out)
    source, headed = open_data("digits"), vitrail.load(kept)
    assert numbers["split"] == "test" and numbers["images"] == len(indices(source, "test"))
    assert 0.7 < numbers["accuracy"] <= 1
    assert numbers["classes"] == list(headed.classes)


def test_predict_takes_a_head(capsys, kept, tmp_path):
    from PIL import Image

    source = open_data("digits")
    for index in range(4):
        Image.fromarray(source[index].content[:, :, 0]).save(tmp_path / f"{index}.png")
    _, out, _ = call(capsys, "predict", kept, tmp_path, "--head", kept / "head.skops", "--json")
    said = [json.loads(line) for line in out.splitlines()]
    assert len(said) == 4
    assert all(0 < one["probability"] <= 1 for one in said)


def test_foreign_folders_are_not_written_into(capsys, folder, tmp_path, monkeypatch):
    shutil.copy(folder / "model.safetensors", tmp_path / "weights.safetensors")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    model = tmp_path / "weights.safetensors"
    _, out, _ = call(capsys, "head", model, "digits", "--kind", "nearest-mean")
    assert "kept in head.skops" in out
    assert (tmp_path / "here" / "head.skops").is_file()


def test_a_head_of_other_weights_is_refused(capsys, kept, tmp_path):
    from vitrail.zoo.file import load_model, save_model

    model, facts = load_model(kept / "model.safetensors")
    model.norm.bias.data[0] += 1
    save_model(tmp_path / "other.safetensors", model, facts)
    code, _, _ = call(capsys, "evaluate", tmp_path / "other.safetensors", "digits", "--head", kept)
    assert "was fitted on features of other weights" in code


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--kind", "forest"), "the nearest is random-forest"),
        (("--kind", "knn", "--all"), "give --all or --kind"),
        (("--shots", "0"), "shots is 0"),
        (("--shots", "10000"), "fewer than 10000 shots"),
        (("--layers", "9"), "no such blocks"),
        (("--features", "cls"), "has no [CLS] token, it pools by 'avg'"),
    ],
)
def test_a_mistake_is_told_in_one_line(capsys, folder, arguments, told):
    code, out, _ = call(capsys, "head", folder, "digits", *arguments)
    assert code.startswith("error: ") and told in code and "\n" not in code
    assert out == ""
    assert not (folder / "head.skops").exists()


def test_a_damaged_head_is_told_in_one_line(capsys, folder, tmp_path):
    (tmp_path / "head.skops").write_bytes(b"PK\3\4 and nothing else")
    code, _, _ = call(capsys, "evaluate", folder, "digits", "--head", tmp_path)
    assert "is no readable head" in code and "\n" not in code


def test_any_classifier_from_python(folder):
    forest = RandomForestClassifier(20, random_state=0)
    headed = vitrail.head(vitrail.load(folder), forest)
    with pytest.raises(vitrail.UserError, match=r"call \.fit\(data\) first"):
        headed.predict(np.zeros((8, 8, 1), np.uint8))
    assert headed.fit("digits").score("digits") > 0.7
    source = open_data("digits")
    found = headed.predict([source[index].content for index in range(5)])
    assert {one.label for one in found} <= set(source.classes)
    assert not hasattr(forest, "estimators_")  # the one that was given stays as it is


def test_a_fitted_head_explains_nothing_it_does_not_know(folder):
    headed = vitrail.head(folder, RandomForestClassifier(5)).fit("digits")
    with pytest.raises(vitrail.UserError, match="explain the model"):
        headed.explain(np.zeros((8, 8, 1), np.uint8))


def test_weights_without_a_head_can_get_one(folder, tmp_path):
    from vitrail.zoo.file import load_model, save_model
    from vitrail.zoo.load import load

    _, facts = load_model(folder / "model.safetensors")
    bare = load(folder, vit={"head": "none"}).model
    save_model(
        tmp_path / "bare.safetensors", bare, {**facts, "classes": [], "vit": vars(bare.config)}
    )
    headed = vitrail.head(tmp_path / "bare.safetensors", RandomForestClassifier(20))
    assert headed.fit("digits").score("digits") > 0.6
