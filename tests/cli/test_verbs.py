"""train, evaluate and predict as a user calls them, on digits."""

import csv
import io
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.cli.conftest import FLAGS, call
from vitrail.errors import UserError


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Three digits as files, and one file that is none."""
    from vitrail.data.open import open_data

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


def test_a_folder_named_on_stdin_is_searched(capsys, folder, pictures, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{pictures}\n"))
    code, out, _ = call(capsys, "predict", folder, "-")
    assert code == 1 and len(out.splitlines()) == 3


def test_a_closed_stdin_is_told_and_the_rest_go_on(capsys, folder, pictures, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    code, out, err = call(capsys, "predict", folder, "-", pictures / "0.png")
    assert code == 1 and len(out.splitlines()) == 1
    assert err == "error: -: stdin is closed; give paths on it, one a line\n"


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
    kinds += [bytearray(kinds[2]), memoryview(kinds[2])]
    found = classifier.predict(kinds)
    assert len({prediction.probability for prediction in found}) == 1
    assert classifier.predict(kinds[5]).label == classifier.predict(kinds[6]).label
    alone = classifier.predict(path)
    assert (alone.label, alone.probability) == (found[0].label, pytest.approx(found[0].probability))
    assert classifier.features(kinds).shape == (7, 32)
    assert classifier.probabilities(kinds).sum(axis=1) == pytest.approx(1)


def test_from_python_an_error_names_its_image(folder, pictures):
    classifier = vitrail.load(folder)
    good, gone = pictures / "0.png", pictures / "gone.png"
    for ask in (classifier.predict, classifier.probabilities, classifier.features):
        with pytest.raises(UserError, match=f"^{gone}: no such file$"):
            ask([good, gone])
        with pytest.raises(UserError, match=r"^image 2: not an image"):
            ask([good, b"words"])
    with pytest.raises(UserError, match=f"^{gone}: no such file$"):
        classifier.explain(gone)


@pytest.mark.parametrize("kind", [None, 7, io.BytesIO(b"x"), torch.zeros(8, 8)])
def test_from_python_what_is_no_picture_is_refused_by_its_type(folder, kind):
    classifier = vitrail.load(folder)
    name = type(kind).__name__
    for images in (kind, [kind]):
        with pytest.raises(UserError, match=f"^image 1: a {name} is no image; give a path"):
            classifier.predict(images)


def test_what_evaluate_sees_is_what_predict_sees(folder):
    from vitrail.data.open import open_data
    from vitrail.data.source import indices

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
        (["train", "digits", "--minutes", "1e307"], "minutes is 1e+307"),
        (["train", "digits", "--epochs", "0"], "epochs is 0"),
        (["train", "digits", "--seed", str(2**64)], "seed is 18446744073709551616"),
        (["train", "digits", "--data.cache-gb", "1e300"], "cache_gb is 1e+300"),
        (["train", "digits", "--data.disk-gb", "1e300"], "disk_gb is 1e+300"),
        (["train", "digits", "--view.crop", "1e-6"], "crop is 1e-06"),
        (["train", "digits", "--view.mean", "nan"], "mean is (nan,)"),
        (["train", "digits", "--out", "RUN"], "holds a run; go on with `vitrail resume"),
        (["train", "digits", "--out", 300 * "x"], "File name too long, shorten it"),
        (["train", "digits", "--model", "S16"], "the nearest are S/16"),
        (["train", "digits", "--model", "S/16"], "too few to learn from"),
        (["train", "digits", "--train.lr", "-1"], "lr is -1.0"),
        (["train", "digits", "--device", "gpu"], "device gpu cannot be used"),
        (["train", "digits", "--device", "meta"], "device meta cannot be used"),
        (["resume", "nowhere"], "nowhere is no run"),
        (["resume", 300 * "x"], "File name too long, shorten it"),
    ],
)
def test_a_mistake_is_one_line(capsys, caplog, folder, tmp_path, monkeypatch, arguments, answer):
    monkeypatch.chdir(tmp_path)
    words = (str(folder) if word == "RUN" else word for word in arguments)
    code, *said = call(capsys, *words)
    assert isinstance(code, str) and code.startswith("error: ")  # sys.exit prints it
    assert answer in code
    assert said == ["", ""] and not caplog.records
    assert not list(tmp_path.iterdir())


def test_a_run_in_the_way_is_told_before_the_data_is_opened(capsys, folder):
    code, *_ = call(capsys, "train", "nowhere", "--out", folder)
    assert "holds a run" in code
