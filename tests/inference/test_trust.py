"""Prediction sets, abstention and odd images: what a model promises, and what is measured."""

import json
import re

import numpy as np
import pytest
import torch

import vitrail
from vitrail.cli.main import main
from vitrail.data.config import Preprocess
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.zoo.file import load_model, save_model

PREPROCESS = Preprocess(size=8, channels=1)
CONFIG = ViTConfig(image=8, patch=4, width=16, depth=1, heads=2, classes=10, channels=1)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """An untrained model of the digits, without any calibration."""
    torch.manual_seed(0)
    model = ViT(CONFIG).eval()
    torch.nn.init.normal_(model.head.weight, std=0.5)
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    metadata = {"classes": [str(n) for n in range(10)], "preprocess": PREPROCESS.to_dict()}
    save_model(path, model, metadata)
    return path


@pytest.fixture(scope="module")
def calibrated(weights):
    path = weights.parent / "calibrated.safetensors"
    vitrail.calibrate(weights, "digits", out=path)
    return path


@pytest.fixture(scope="module")
def image(weights):
    path = weights.parent / "digit.npy"
    np.save(path, np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8))
    return path


def test_a_promise_needs_validation_images(weights, image):
    classifier = vitrail.load(weights)
    assert "odd" not in classifier.predict(image).to_dict()
    for promise in ({"coverage": 0.9}, {"abstain": 0.1}):
        advice = (
            r"store them once with `vitrail calibrate MODEL DATA`, or .*`vitrail predict --data"
        )
        with pytest.raises(UserError, match=advice):
            classifier.predict(image, **promise)


@pytest.mark.parametrize("value", [0, 1, -1, 2.0, float("nan")])
def test_impossible_promises_are_one_line(calibrated, image, value):
    classifier = vitrail.load(calibrated)
    with pytest.raises(UserError, match="`coverage` is"):
        classifier.predict(image, coverage=value)
    with pytest.raises(UserError, match="`abstain` is"):
        classifier.predict(image, abstain=value)
    with pytest.raises(UserError, match="`coverage` is"):
        classifier.evaluate("digits", coverage=value)


def test_a_coverage_that_needs_more_images_says_how_many(calibrated, image):
    with pytest.raises(UserError, match="needs at least 9,999 validation images"):
        vitrail.load(calibrated).predict(image, coverage=0.9999)


def test_sets_cover_the_promise_and_grow_with_it(calibrated, image):
    classifier = vitrail.load(calibrated)
    small, large = (classifier.predict(image, coverage=c).set for c in (0.5, 0.95))
    assert set(small) <= set(large) and small[0] == classifier.predict(image).label
    sets = classifier.evaluate("digits", coverage=0.9).trust.sets
    assert sets.interval[0] - 0.05 < 0.9 < sets.interval[1] + 0.05
    assert 1 < sets.mean_size < 10 and sets.per_class.keys() == set(classifier.classes)


def test_abstention_keeps_what_it_promises_or_refuses(calibrated, image):
    classifier = vitrail.load(calibrated)
    with pytest.raises(UserError, match=r"no threshold keeps errors below 0\.001"):
        classifier.predict(image, abstain=0.001)
    trust = classifier.evaluate("digits", abstain=0.95).trust
    assert trust.abstention.promised == 0.95 and trust.abstention.error <= 0.97


def test_the_calibration_is_small_and_travels_with_the_file(calibrated, tmp_path, image):
    _, metadata = load_model(calibrated)
    assert len(json.dumps(metadata.document["calibration"])) < 1_100_000
    vitrail.convert(calibrated, to="vitrail", out=tmp_path / "copy.safetensors")
    first, second = (vitrail.load(p) for p in (calibrated, tmp_path / "copy.safetensors"))
    assert first.predict(image, coverage=0.9) == second.predict(image, coverage=0.9)


def test_odd_images_have_small_p_values(calibrated):
    classifier = vitrail.load(calibrated)
    source = vitrail.open_data("digits")
    known = [classifier.predict(source[i].content).p_value for i in range(0, 300, 10)]
    stripes = np.tile(np.array([0, 255], np.uint8), (8, 4))
    odd = classifier.predict(stripes)
    assert odd.p_value < np.median(known) and odd.odd is (odd.p_value < 0.01)
    assert np.mean(np.array(known) < 0.01) < 0.1


def test_foreign_images_need_no_labels_and_known_ones_are_not_foreign(calibrated, tmp_path):
    rng = np.random.default_rng(0)
    for number in range(30):
        stripes = np.tile(np.array([0, 255], np.uint8), (8, 4)) ^ rng.integers(0, 40, (8, 8), "u1")
        np.save(tmp_path / f"{number}.npy", stripes)
    classifier = vitrail.load(calibrated)
    found = classifier.evaluate("digits", foreign=tmp_path).foreign
    assert found.images == 30 and found.auroc > 0.95 and found.flagged > 0.5
    assert classifier.evaluate("digits", foreign="digits").foreign.auroc == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("sets", "overall", "values"), ["a"]),
        (("sets", "overall"), None),
        (("risk", "answered"), [1]),
        (("neighbours", "features"), "not base64"),
        (("neighbours", "images"), 10**9),
        (("neighbours", "known"), []),
    ],
)
def test_a_damaged_calibration_is_one_line(calibrated, tmp_path, place, value):
    model, metadata = load_model(calibrated)
    document = json.loads(json.dumps(metadata.document))
    table = document["calibration"]
    for key in place[:-1]:
        table = table[key]
    table[place[-1]] = value
    save_model(tmp_path / "model.safetensors", model, document)
    with pytest.raises(UserError) as caught:
        vitrail.load(tmp_path / "model.safetensors")
    assert "\n" not in str(caught.value)


def test_the_command_prints_sets_and_odd_images(calibrated, weights, image, capsys):
    main(["predict", str(calibrated), str(image), "--coverage", "0.9", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["label"] in answer["set"] and {"odd", "p_value"} <= answer.keys()
    main(["predict", str(weights), str(image), "--coverage", "0.9", "--data", "digits"])
    assert "one of: " in capsys.readouterr().out
    main(["predict", str(calibrated), str(image), "--coverage", "0.9", "--csv"])
    header, row = capsys.readouterr().out.splitlines()
    assert header == "path,label,probability,error,answered,odd,set" and ";" in row
    main(["evaluate", str(calibrated), "digits", "--coverage", "0.9"])
    assert "sets for a coverage of 90.0%" in capsys.readouterr().out


def test_corruptions_are_measured_and_drawn(calibrated, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vitrail.inference.robustness.QUICK_IMAGES", 12)
    page = tmp_path / "page.html"
    arguments = ["digits", "--corruptions", "quick", "--page", str(page), "--json"]
    main(["evaluate", str(calibrated), *arguments])
    found = json.loads(capsys.readouterr().out)["corruptions"]
    assert found["images"] == 12 and len(found["accuracy"]) == 18 and found["strengths"] == [2, 4]
    text = page.read_text()
    assert text.count("data:image/jpeg") == 18 and "gaussian noise" in text
    assert not re.search(r'(src|href)="(?!#|data:)', text)
    with pytest.raises(TypeError, match="`corruptions`"):
        vitrail.load(calibrated).evaluate("digits", corruptions=3)
    with pytest.raises(UserError, match="give 'quick' or 'full'"):
        vitrail.load(calibrated).evaluate("digits", corruptions="slow")


def predictions(classifier, items, change=lambda pixels: pixels):
    source = vitrail.open_data("digits")
    images = [change(source[int(item)].content) for item in items]
    return [json.dumps(one.to_dict()) for one in classifier.predict(images, top=1)]


def test_monitor_finds_a_change_and_no_other(calibrated, tmp_path, capsys):
    classifier = vitrail.load(calibrated)
    same = tmp_path / "same.jsonl"
    same.write_text("\n".join(predictions(classifier, range(0, 1797, 9))))
    main(["monitor", str(calibrated), str(same), "--page", str(tmp_path / "same.html")])
    assert "no change found" in capsys.readouterr().out
    dark = tmp_path / "dark.jsonl"
    dark.write_text("\n".join(predictions(classifier, range(0, 1797, 9), lambda x: 255 - x)))
    with pytest.raises(SystemExit) as exit:
        main(["monitor", str(calibrated), str(dark), "--page", str(tmp_path / "d.html"), "--json"])
    assert exit.value.code == 3
    document = json.loads(capsys.readouterr().out)
    assert document["changed"] and "have changed" in (tmp_path / "d.html").read_text()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("not json", "not valid JSON"),
        ('{"label": 3, "probability": 0.5}', "line 1 is not a prediction"),
        ('{"label": "3", "probability": "high"}', "line 1 is not a prediction"),
        ('{"label": "3", "probability": 0.5}', "give at least 20"),
        ('{"error": "broken"}', "give at least 20"),
    ],
)
def test_monitor_refuses_what_are_no_predictions(calibrated, tmp_path, line, why):
    (tmp_path / "p.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=why):
        vitrail.monitor(calibrated, tmp_path / "p.jsonl")


def test_monitor_needs_a_calibration(weights, tmp_path):
    with pytest.raises(UserError, match="vitrail calibrate MODEL DATA"):
        vitrail.monitor(weights, tmp_path)
