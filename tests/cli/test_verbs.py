"""train, evaluate and predict as a user calls them, on digits."""

import csv
import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.cli.conftest import FLAGS, call


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Three digits as files, and one file that is none."""
    from vitrail.data.source import open_data

    place = tmp_path_factory.mktemp("pictures")
    source = open_data("digits")
    for index in range(3):
        Image.fromarray(source[index].content[:, :, 0]).save(place / f"{index}.png")
    (place / "broken.png").write_bytes(b"\x89PNG but not really")
    return place


def test_train_prints_one_json_document(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)
    code, out, err = call(capsys, "train", "digits", *FLAGS, "--out", tmp_path / "r", "--json")
    assert code == 0
    assert list(json.loads(out)) == ["run", "model", "epochs", "steps", "seconds", "val", "test"]
    assert "augmentation" in err and "batch" in err


def test_flags_reach_the_recipe(folder):
    text = (folder / "recipe.toml").read_text()
    assert "width = 32" in text and "workers = 0" in text and "steps = 120" in text


def test_resume_takes_the_flag_that_a_broken_image_asks_for(capsys, folder):
    code, out, _ = call(capsys, "resume", folder, "--data.skip-broken", "--json")
    assert code == 0 and json.loads(out)["steps"] == 120


def test_evaluate_judges_the_test_split_by_default(capsys, folder):
    code, out, _ = call(capsys, "evaluate", folder, "digits", "--json")
    numbers = json.loads(out)
    assert code == 0
    metrics = json.loads((folder / "metrics.json").read_text())
    assert numbers["split"] == "test"
    assert numbers["accuracy"] == metrics["test"]["accuracy"]
    assert numbers["interval"] == metrics["test"]["interval"]
    assert np.trace(numbers["confusion"]) == round(numbers["accuracy"] * numbers["images"])
    assert set(numbers["per_class"]) == set(numbers["classes"])
    assert numbers["temperature"] > 0


def test_evaluate_takes_every_split(capsys, folder):
    counts = {}
    for split in ("train", "val", "test", "all"):
        _, out, _ = call(capsys, "evaluate", folder, "digits", "--split", split, "--json")
        counts[split] = json.loads(out)["images"]
    assert counts["all"] == counts["train"] + counts["val"] + counts["test"] == 1797


def test_evaluate_prints_a_table(capsys, folder):
    code, out, _ = call(capsys, "evaluate", folder, "digits")
    assert code == 0
    assert "95 % interval" in out and "precision" in out and "calibration error" in out


def test_predict_goes_on_past_a_bad_image(capsys, folder, pictures):
    code, out, _ = call(capsys, "predict", folder, pictures, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert len(lines) == 4
    assert [list(line) for line in lines if "broken" in line["path"]] == [["path", "error"]]
    good = [line for line in lines if "broken" not in line["path"]]
    assert all(list(line) == ["path", "label", "index", "probability", "top"] for line in good)
    assert all(len(line["top"]) == 5 for line in good)


def test_predict_as_csv(capsys, folder, pictures):
    _, out, _ = call(capsys, "predict", folder, pictures / "0.png", "--csv")
    (row,) = csv.DictReader(io.StringIO(out))
    assert list(row) == ["path", "label", "probability", "error"]


def test_predict_reads_paths_from_stdin(capsys, folder, pictures, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{pictures / '0.png'}\n{pictures / '1.png'}\n"))
    code, out, _ = call(capsys, "predict", folder, "-", "--top", "2")
    assert code == 0
    assert len(out.splitlines()) == 2


def test_a_lone_model_file_predicts_the_same(capsys, folder, pictures, tmp_path):
    shutil.copy(folder / "model.safetensors", tmp_path / "copy.safetensors")
    told = [
        call(capsys, "predict", model, pictures / "2.png", "--json")[1]
        for model in (folder, tmp_path / "copy.safetensors")
    ]
    assert told[0] == told[1]


def test_from_python_every_kind_of_picture_gives_the_same(folder, pictures):
    classifier = vitrail.load(folder)
    path = pictures / "0.png"
    image = Image.open(path)
    kinds = [path, str(path), path.read_bytes(), image, np.asarray(image)[:, :, None]]
    found = classifier.predict(kinds)
    assert len({prediction.probability for prediction in found}) == 1
    alone = classifier.predict(path)
    assert (alone.label, alone.probability) == (found[0].label, pytest.approx(found[0].probability))
    assert classifier.features(kinds).shape == (5, 32)
    assert classifier.probabilities(kinds).sum(axis=1) == pytest.approx(1)


def test_what_evaluate_sees_is_what_predict_sees(folder):
    from vitrail.data.source import indices, open_data

    source = open_data("digits")
    test = indices(source, "test")
    classifier = vitrail.load(folder)
    found = classifier.predict([source[i].content for i in test.tolist()])
    right = np.mean([p.index == label for p, label in zip(found, source.labels[test], strict=True)])
    metrics = json.loads((folder / "metrics.json").read_text())
    assert right == pytest.approx(metrics["test"]["accuracy"])


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["predict", "nowhere", "a.png"], "nowhere"),
        (["predict", "RUN"], "no images were given"),
        (["predict", "RUN", "a.png", "--top", "0"], "give a whole number of at least 1"),
        (["evaluate", "RUN", "nowhere"], "there is no 'nowhere'"),
        (["train", "nowhere"], "there is no 'nowhere'"),
        (["train"], "no data was given"),
        (["train", "digits", "--minutes", "0"], "give a number above 0"),
        (["train", "digits", "--model", "S16"], "the nearest are S/16"),
        (["train", "digits", "--model", "S/16"], "too few to learn from"),
        (["train", "digits", "--train.lr", "-1"], "lr is -1.0"),
        (["train", "digits", "--device", "gpu"], "device gpu cannot be used"),
        (["resume", "nowhere"], "nowhere is no run"),
    ],
)
def test_a_mistake_is_one_line(capsys, folder, tmp_path, monkeypatch, arguments, answer):
    monkeypatch.chdir(tmp_path)
    code, _, _ = call(capsys, *(str(folder) if word == "RUN" else word for word in arguments))
    assert isinstance(code, str) and code.startswith("error: ")
    assert answer in code
    assert "\n" not in code
    assert not list(tmp_path.iterdir()) or arguments[0] == "train"
