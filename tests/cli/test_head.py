"""`vitrail head` as a user calls it, on digits."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier

import vitrail
from tests.cli.conftest import call
from tests.data.samples import write
from tests.heads.samples import tiny
from vitrail.cli.main import main
from vitrail.data.open import open_data
from vitrail.data.source import split_indices
from vitrail.heads.features import FeatureExtractor
from vitrail.heads.file import read_head_file, write_head_file
from vitrail.heads.kinds import KINDS
from vitrail.inference.head_comparison import default_head_path


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.getbasetemp() / "head-cache"))


@pytest.fixture(scope="module")
def kept(folder, tmp_path_factory):
    """The run with a head beside its model."""
    root = tmp_path_factory.mktemp("headed") / "digits"
    shutil.copytree(folder, root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_CACHE", str(tmp_path_factory.getbasetemp() / "head-cache"))
        main(["head", str(root), "digits", "--kind", "knn", "nearest-mean", "--json"])
    return root


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder that commands are called in."""
    root = tmp_path / "here"
    root.mkdir()
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def other(folder, tmp_path):
    """The same model with one weight changed, in a file beside which there is nothing."""
    from vitrail.zoo.file import load_model, save_model

    model, metadata = load_model(folder / "model.safetensors")
    model.norm.bias.data[0] += 1
    (tmp_path / "other").mkdir()
    save_model(tmp_path / "other" / "other.safetensors", model, metadata.document)
    return tmp_path / "other" / "other.safetensors"


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


def test_cls_features_can_be_requested(capsys, folder, tmp_path):
    from vitrail.zoo.file import load_model, save_model

    model, (_, metadata) = tiny(), load_model(folder / "model.safetensors")
    path = tmp_path / "cls.safetensors"
    save_model(path, model, {**metadata.document, "vit": vars(model.config)})
    arguments = ("--kind", "nearest-mean", "--features", "cls", "--out", tmp_path / "h.skops")
    code, out, _ = call(capsys, "head", path, "digits", *arguments, "--json")
    assert code == 0 and json.loads(out)[0]["accuracy"] > 0.3
    assert read_head_file(tmp_path / "h.skops").features.kind == "cls"


@pytest.mark.full
def test_all_kinds_beat_chance_on_digits(capsys, folder, tmp_path):
    _, out, _ = call(capsys, "head", folder, "digits", "--all", "--out", tmp_path / "h", "--json")
    rows = json.loads(out)
    assert [row["kind"] for row in rows] == list(KINDS)
    assert min(row["accuracy"] for row in rows) > 0.6


def test_the_best_head_is_saved_beside_the_model(kept):
    assert (kept / "head.skops").is_file()


def test_evaluate_accepts_a_head(capsys, folder, tmp_path):
    path = tmp_path / "h.skops"
    _, out, _ = call(
        *(capsys, "head", folder, "digits", "--kind", "nearest-mean", "--json"),
        *("--layers", "0", "--features", "average", "--out", path),
    )
    expected = json.loads(out)[0]["accuracy"]
    _, out, _ = call(capsys, "evaluate", folder, "digits", "--json")
    own = json.loads(out)["accuracy"]
    _, out, _ = call(capsys, "evaluate", folder, "digits", "--head", path, "--json")
    numbers = json.loads(out)
    source = open_data("digits")
    assert numbers["split"] == "test" and numbers["images"] == len(split_indices(source, "test"))
    assert numbers["accuracy"] == pytest.approx(expected) and expected != pytest.approx(own)
    assert numbers["classes"] == list(source.classes)


def test_predict_accepts_a_head(capsys, kept, tmp_path):
    from PIL import Image

    source = open_data("digits")
    for index in range(4):
        Image.fromarray(source[index].content[:, :, 0]).save(tmp_path / f"{index}.png")
    found, path = read_head_file(kept), tmp_path / "named.skops"
    write_head_file(path, replace(found, classes=tuple(f"{name}!" for name in found.classes)))
    _, out, _ = call(capsys, "predict", kept, tmp_path, "--head", path, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [one["label"] for one in lines] == [f"{one['index']}!" for one in lines]
    assert len(lines) == 4 and all(0 < one["probability"] <= 1 for one in lines)


def test_a_head_is_saved_beside_a_lone_model_file(capsys, other, here):
    _, out, _ = call(capsys, "head", other, "digits", "--kind", "nearest-mean")
    assert f"saved in {other.parent / 'head.skops'}" in out
    assert (other.parent / "head.skops").is_file() and list(here.iterdir()) == []


def test_a_head_is_saved_here_if_the_folder_of_the_model_is_not_writable(other, here, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert default_head_path(other) == Path("head.skops")


def test_a_head_of_other_weights_is_refused(capsys, kept, other):
    code, _, _ = call(capsys, "evaluate", other, "digits", "--head", kept)
    assert "was fitted on features of other weights" in code


@pytest.fixture
def no_features(monkeypatch):
    """Mistakes are reported before any features are computed."""
    monkeypatch.setattr(FeatureExtractor, "extract_split", None)


@pytest.mark.usefixtures("no_features")
def test_a_head_of_other_weights_is_not_replaced(capsys, kept, other):
    path = kept / "head.skops"
    before = path.read_bytes()
    code, _, _ = call(capsys, "head", other, "digits", "--out", path)
    assert "is a head of other weights; remove it, or choose another --out" in code
    shutil.copy(path, other.parent)
    code, _, _ = call(capsys, "head", other, "digits")
    assert "is a head of other weights; remove it, or choose another --out" in code
    assert path.read_bytes() == before == (other.parent / "head.skops").read_bytes()


def test_an_earlier_head_of_the_same_weights_is_replaced(capsys, folder, tmp_path):
    path = tmp_path / "h.skops"
    for kind in ("knn", "nearest-mean"):
        code, _, _ = call(capsys, "head", folder, "digits", "--kind", kind, "--out", path)
        assert code == 0 and read_head_file(path).kind == kind


@pytest.mark.usefixtures("no_features")
def test_files_that_are_not_heads_are_not_overwritten(capsys, other):
    before = other.read_bytes()
    code, _, _ = call(capsys, "head", other, "digits", "--out", other)
    assert "already exists and is not a readable head; remove it, or choose another --out" in code
    assert other.read_bytes() == before
    code, _, _ = call(capsys, "head", other, "digits", "--out", other.parent)
    assert "is a folder; give the name of a file" in code


@pytest.mark.usefixtures("no_features")
def test_a_head_is_not_saved_inside_the_data(capsys, folder, tmp_path):
    for label in ("a", "b"):
        for number in range(3):
            write(tmp_path / "photos" / label / f"{number}.png", number)
    for name in ("0.png", "head.skops"):
        out = tmp_path / "photos" / "a" / name
        code, _, _ = call(capsys, "head", folder, tmp_path / "photos", "--out", out)
        assert "is part of the data, which Vitrail never changes; choose another --out" in code


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--kind", "forest"), "the nearest is random-forest"),
        (("--kind", "knn", "--all"), "--all and --kind exclude each other"),
        (("--shots", "0"), "shots is 0"),
        (("--shots", "10000"), "fewer than 10000 shots"),
        (("--layers", "9"), "no such blocks"),
        (("--features", "cls"), "has no [CLS] token: its pool is 'avg'"),
    ],
)
def test_a_mistake_is_reported_in_one_line(capsys, folder, arguments, expected):
    code, out, _ = call(capsys, "head", folder, "digits", *arguments)
    assert code.startswith("error: ") and expected in code and "\n" not in code
    assert out == ""
    assert not (folder / "head.skops").exists()


def test_a_damaged_head_is_reported_in_one_line(capsys, folder, tmp_path):
    (tmp_path / "head.skops").write_bytes(b"PK\3\4 and nothing else")
    code, _, _ = call(capsys, "evaluate", folder, "digits", "--head", tmp_path)
    assert "is not a readable head" in code and "\n" not in code


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


def test_a_fitted_head_has_no_explanations(folder):
    """Maps show what the model's own head reads, not what a fitted one does."""
    assert not hasattr(vitrail.head(folder, RandomForestClassifier(5)), "explain")


def test_weights_without_a_head_can_get_one(folder, tmp_path):
    from vitrail.zoo.file import load_model, save_model
    from vitrail.zoo.load import load_weights

    _, metadata = load_model(folder / "model.safetensors")
    bare = load_weights(folder, vit={"head": "none"}).model
    save_model(
        tmp_path / "bare.safetensors",
        bare,
        {**metadata.document, "classes": [], "vit": vars(bare.config)},
    )
    headed = vitrail.head(tmp_path / "bare.safetensors", RandomForestClassifier(20))
    assert headed.fit("digits").score("digits") > 0.6
