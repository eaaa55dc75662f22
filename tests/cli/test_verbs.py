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

    root = tmp_path_factory.mktemp("pictures")
    source = open_data("digits")
    for index in range(3):
        Image.fromarray(source[index].content[:, :, 0]).save(root / f"{index}.png")
    (root / "broken.png").write_bytes(b"\x89PNG but not really")
    return root


def test_train_prints_one_json_document(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)
    monkeypatch.setattr("vitrail.run.finish.make_report", lambda *rest: None)
    code, out, err = call(capsys, "train", "digits", *FLAGS, "--out", tmp_path / "r", "--json")
    assert code == 0
    keys = ["run", "model", "epochs", "steps", "seconds", "val", "test", "trust"]
    assert list(json.loads(out)) == keys
    assert "augmentation" in err and "batch" in err


def test_flags_reach_the_recipe(folder):
    text = (folder / "recipe.toml").read_text()
    assert "width = 32" in text and "workers = 0" in text and "steps = 120" in text


def test_resume_accepts_the_flag_to_skip_broken_images(capsys, folder):
    code, out, _ = call(capsys, "resume", folder, "--data.skip-broken", "--json")
    assert code == 0 and json.loads(out)["steps"] == 120


def test_evaluate_uses_the_test_split_by_default(capsys, folder):
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


def test_evaluate_accepts_every_split(capsys, folder):
    counts = {}
    for split in ("train", "val", "test", "all"):
        _, out, _ = call(capsys, "evaluate", folder, "digits", "--split", split, "--json")
        counts[split] = json.loads(out)["images"]
    assert counts["all"] == counts["train"] + counts["val"] + counts["test"] == 1797


def test_evaluate_prints_a_table(capsys, folder):
    code, out, _ = call(capsys, "evaluate", folder, "digits")
    assert code == 0
    assert "95 % interval" in out and "precision" in out and "calibration error" in out


def test_predict_continues_after_a_bad_image(capsys, folder, pictures):
    code, out, _ = call(capsys, "predict", folder, pictures, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert len(lines) == 4
    assert [list(line) for line in lines if "broken" in line["path"]] == [["path", "error"]]
    good = [line for line in lines if "broken" not in line["path"]]
    keys = ["path", "label", "index", "probability", "top", "odd", "p_value"]
    assert all(list(line) == keys for line in good)
    assert all(len(line["top"]) == 5 for line in good)


def test_probabilities_are_calibrated_unless_raw_is_given(capsys, folder, pictures):
    arguments = ("predict", folder, pictures / "0.png", "--json", "--top", 10)
    calibrated, raw = (
        {one["label"]: one["probability"] for one in json.loads(out)["top"]}
        for _, out, _ in (call(capsys, *arguments), call(capsys, *arguments, "--raw"))
    )
    temperature = vitrail.load(folder).temperature
    assert temperature != pytest.approx(1, abs=0.01)
    expected = (torch.tensor(list(raw.values())).double().log() / temperature).softmax(dim=0)
    assert [calibrated[label] for label in raw] == pytest.approx(expected.tolist(), abs=1e-6)


def test_evaluate_measures_calibrated_probabilities_unless_raw_is_given(capsys, folder):
    calibrated, raw = (
        json.loads(
            call(capsys, "evaluate", folder, "digits", "--split", "val", "--json", *flags)[1]
        )
        for flags in ((), ("--raw",))
    )
    assert calibrated["log_loss"] < raw["log_loss"]  # the temperature minimises it on this split
    assert calibrated["ece"] != raw["ece"]
    for key in ("accuracy", "temperature", "confusion"):
        assert calibrated[key] == raw[key]


def test_evaluate_prints_the_temperature(capsys, folder):
    shown = f"temperature {vitrail.load(folder).temperature:.2f}"
    assert f"{shown}\n" in call(capsys, "evaluate", folder, "digits")[1]
    assert f"{shown} (not applied: --raw)" in call(capsys, "evaluate", folder, "digits", "--raw")[1]


def test_predict_as_csv(capsys, folder, pictures):
    _, out, _ = call(capsys, "predict", folder, pictures / "0.png", "--csv")
    (row,) = csv.DictReader(io.StringIO(out))
    assert list(row) == ["path", "label", "probability", "error", "answered", "odd", "set"]


def test_predict_reads_paths_from_stdin(capsys, folder, pictures, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{pictures / '0.png'}\n{pictures / '1.png'}\n"))
    code, out, _ = call(capsys, "predict", folder, "-", "--top", "2")
    assert code == 0
    assert len(out.splitlines()) == 2


def test_a_folder_named_on_stdin_is_searched(capsys, folder, pictures, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{pictures}\n"))
    code, out, _ = call(capsys, "predict", folder, "-")
    assert code == 1 and len(out.splitlines()) == 3


def test_a_closed_stdin_is_reported_and_others_are_predicted(capsys, folder, pictures, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    code, out, err = call(capsys, "predict", folder, "-", pictures / "0.png")
    assert code == 1 and len(out.splitlines()) == 1
    assert err == "error: -: stdin is closed; give paths on it, one per line\n"


def test_a_lone_model_file_predicts_the_same(capsys, folder, pictures, tmp_path):
    shutil.copy(folder / "model.safetensors", tmp_path / "copy.safetensors")
    outputs = [
        call(capsys, "predict", model, pictures / "2.png", "--json")[1]
        for model in (folder, tmp_path / "copy.safetensors")
    ]
    assert outputs[0] == outputs[1]


def test_from_python_every_kind_of_image_gives_the_same(folder, pictures):
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
def test_from_python_other_types_are_refused_by_name(folder, kind):
    classifier = vitrail.load(folder)
    name = type(kind).__name__
    for images in (kind, [kind]):
        answers = rf"^`images` is .*{name}.*; give |^image 1: a {name} is not an image; give a path"
        with pytest.raises((UserError, TypeError), match=answers):
            classifier.predict(images)


def test_predict_has_the_accuracy_that_evaluate_measures(folder):
    from vitrail.data.open import open_data
    from vitrail.data.source import split_indices

    source = open_data("digits")
    test = split_indices(source, "test")
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
        (["evaluate", "RUN", "nowhere"], "'nowhere' does not exist"),
        (["train", "nowhere"], "'nowhere' does not exist"),
        (["train"], "DATA is missing; give a folder"),
        (["train", "digits", "--minutes", "0"], "give a number above 0"),
        (["train", "digits", "--minutes", "1e307"], "minutes is 1e+307"),
        (["train", "digits", "--epochs", "0"], "epochs is 0"),
        (["train", "digits", "--seed", str(2**64)], "seed is 18446744073709551616"),
        (["train", "digits", "--data.cache-gb", "1e300"], "cache_gb is 1e+300"),
        (["train", "digits", "--data.disk-gb", "1e300"], "disk_gb is 1e+300"),
        (["train", "digits", "--preprocess.crop", "1e-6"], "crop is 1e-06"),
        (["train", "digits", "--preprocess.mean", "nan"], "mean is (nan,)"),
        (
            ["train", "digits", "--out", "RUN"],
            "contains a run; resume it with `vitrail resume",
        ),
        (["train", "digits", "--out", 300 * "x"], "name is too long; shorten it"),
        (["train", "digits", "--model", "S16"], "the nearest are S/16"),
        (["train", "digits", "--model", "S/16"], "try --vit.patch 2"),
        (["train", "digits", "--train.lr", "-1"], "lr is -1.0"),
        (["train", "digits", "--device", "gpu"], "cannot use device gpu"),
        (["train", "digits", "--device", "meta"], "cannot use device meta"),
        (["resume", "nowhere"], "nowhere is not a run folder"),
        (["resume", 300 * "x"], "name is too long; shorten it"),
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


def test_an_existing_run_is_reported_before_the_data_is_opened(capsys, folder):
    code, *_ = call(capsys, "train", "nowhere", "--out", folder)
    assert "already contains a run" in code
