"""Multi-label from a table to the report: training, resuming, predicting, explaining."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.run.conftest import tensors
from vitrail.cli.main import main
from vitrail.errors import UserError
from vitrail.inference.head import load_with_head
from vitrail.run.drive import Stopped
from vitrail.run.storage.journal import read_journal
from vitrail.run.storage.record import read_run
from vitrail.training.loop import binary_cross_entropy, positive_weights

COLOURS = {"red": (0, 230), "green": (1, 230), "blue": (2, 230)}
SETTINGS = {
    "vit": {"width": 32, "depth": 2, "heads": 2, "image": 16, "patch": 4},
    "train": {"steps": 120, "batch": 16, "lr": 5e-3, "save_every": 3600, "class_weights": True},
    "data": {"workers": 0, "labels": "multi", "augment": {"mixup": 0.2}},
}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Grey images; each third shows one of three colours or not: labels in any combination."""
    folder = tmp_path_factory.mktemp("shapes")
    rng, rows = np.random.default_rng(0), []
    for number in range(160):
        pixels = rng.integers(90, 140, (16, 16, 3)).astype(np.uint8)
        labels = [name for name in COLOURS if rng.random() < 0.4] or ["red"]
        for name in labels:
            channel, level = COLOURS[name]
            pixels[4 * channel : 4 * channel + 4, :, channel] = level
        Image.fromarray(pixels).save(folder / f"{number}.png")
        rows.append([f"{number}.png", ";".join(labels)])
    with open(folder / "shapes.csv", "w", newline="") as file:
        csv.writer(file).writerows([["path", "label"], *rows])
    return folder / "shapes.csv"


def read_labels(table):
    with open(table, newline="") as file:
        return dict(list(csv.reader(file))[1:])


@pytest.fixture(scope="module")
def run(shapes, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    return vitrail.train(shapes, out=out, settings=SETTINGS, quiet=True)


def test_it_learns_and_scores_are_those_of_several_labels(run):
    test = run.metrics["test"]
    assert {"map", "micro_f1", "macro_f1", "accuracy", "interval"} == test.keys()
    assert test["map"] > 0.9
    epochs = [line for line in read_journal(run.folder / "log.jsonl") if line["kind"] == "epoch"]
    assert any(line.get("val_map") for line in epochs)


def test_the_model_file_knows_its_labels_thresholds_and_calibration(run):
    metadata = run.classifier.metadata
    assert metadata.labels == "multi" and metadata.classes == ("blue", "green", "red")
    assert len(metadata.multi_label.thresholds) == 3
    assert all(0 < threshold < 1 for threshold in metadata.multi_label.thresholds)


def test_predict_lists_every_label_above_its_threshold(run, shapes, capsys):
    classifier = run.classifier
    table = read_labels(shapes)
    right = 0
    for path in list(table)[:40]:
        prediction = classifier.predict(shapes.parent / path)
        right += {one.label for one in prediction.labels} == set(table[path].split(";"))
    assert right > 30
    assert "labels" in prediction.to_dict()
    main(["predict", str(run.folder), str(shapes.parent / "0.png"), "--json"])
    assert json.loads(capsys.readouterr().out)["labels"]
    probabilities = classifier.probabilities([shapes.parent / "0.png"])
    assert probabilities.shape == (1, 3)
    assert not np.isclose(probabilities.sum(), 1)  # labels do not exclude each other


def test_evaluate_repeats_the_scores_of_the_run(run, shapes, capsys):
    evaluation = run.classifier.evaluate(shapes)
    assert evaluation.split == "test"
    assert evaluation.map == pytest.approx(run.metrics["test"]["map"])
    assert evaluation.cooccurrence.shape == (3, 3)
    assert "mean average precision" in repr(evaluation) and "<table>" in evaluation._repr_html_()
    main(["evaluate", str(run.folder), str(shapes), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["labels"] == "multi" and document["per_class"]["red"]["threshold"] > 0


def test_each_predicted_label_is_explained(run, shapes, tmp_path, capsys):
    table = read_labels(shapes)
    path = next(path for path, labels in table.items() if labels.count(";") == 1)
    image, out = str(shapes.parent / path), str(tmp_path / "why")
    main(["explain", str(run.folder), image, "--out", out, "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    predicted = run.classifier.predict(shapes.parent / path).labels
    assert [line["label"] for line in lines] == [one.label for one in predicted]
    explanation = run.classifier.explain(shapes.parent / path, "green")
    assert "grad-cam" in explanation.heatmaps


def test_the_report_shows_co_occurrence(run):
    page = (run.folder / "report.html").read_text()
    assert "mean average precision" in page and 'id="cooccurrence"' in page
    assert "Confusion matrix" not in page
    assert (run.folder / "figures" / "cooccurrence.png").is_file()


def test_a_resumed_run_has_the_same_bits(run, shapes, tmp_path, stop_at):
    stop_at(50)
    with pytest.raises(Stopped):
        vitrail.train(shapes, out=tmp_path / "part", settings=SETTINGS, report=False, quiet=True)
    stop_at(None)
    resumed = tensors(vitrail.resume(tmp_path / "part", report=False, quiet=True).folder)
    whole = tensors(run.folder)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_multi_label_model_starts_another(run, shapes, tmp_path):
    settings = {"train": {"steps": 4, "batch": 16}, "data": {"workers": 0, "labels": "multi"}}
    new = vitrail.train(
        shapes, weights=run.folder, out=tmp_path / "new", settings=settings, report=False,
        quiet=True,
    )  # fmt: skip
    assert new.classifier.metadata.labels == "multi"


def test_an_export_is_judged_by_its_labels(run, shapes, tmp_path):
    pytest.importorskip("onnxruntime", reason="needs vitrail[onnx]")
    exported = vitrail.export(run.folder, tmp_path / "shapes.onnx", data=shapes)
    assert exported.agreement == 1.0 and exported.largest_difference < 1e-4
    evaluated = run.classifier.evaluate(shapes)
    assert exported.accuracy["before"] == pytest.approx(evaluated.accuracy)
    image = shapes.parent / "3.png"
    assert vitrail.load(tmp_path / "shapes.onnx").predict(image).labels is not None
    one, other = (
        c.predict(image) for c in (vitrail.load(tmp_path / "shapes.onnx"), run.classifier)
    )
    assert [p.label for p in one.labels] == [p.label for p in other.labels]


def test_an_int8_export_keeps_the_labels(run, shapes, tmp_path):
    pytest.importorskip("onnxruntime", reason="needs vitrail[onnx]")
    exported = vitrail.export(run.folder, tmp_path / "small.onnx", data=shapes, int8=True)
    assert exported.accuracy["before"] - exported.accuracy["after"] < 0.05
    small, paths = vitrail.load(tmp_path / "small.onnx"), sorted(shapes.parent.glob("*.png"))[:40]
    both = [one.predict(paths) for one in (small, run.classifier)]
    names = [[[one.label for one in found.labels] for found in answers] for answers in both]
    assert np.mean([one == other for one, other in zip(*names, strict=True)]) > 0.9


@pytest.mark.parametrize("kind", ["logistic", "linear-svm", "knn"])
def test_heads_learn_several_labels(run, shapes, tmp_path, kind):
    pytest.importorskip("sklearn", reason="needs vitrail[heads]")
    compared = vitrail.compare_heads(
        run.folder, shapes, kinds=[kind], labels="multi", out=tmp_path / "head.skops"
    )
    assert compared.best.accuracy > 0.5
    loaded = load_with_head(run.folder, tmp_path / "head.skops")
    evaluated = loaded.evaluate(shapes)
    assert evaluated.accuracy == pytest.approx(compared.best.accuracy) and evaluated.map > 0.8
    assert loaded.predict(shapes.parent / "0.png").labels is not None


def test_any_estimator_becomes_a_head_of_several_labels(run, shapes):
    bayes = pytest.importorskip("sklearn.naive_bayes", reason="needs vitrail[heads]")
    fitted = vitrail.head(run.folder, bayes.GaussianNB()).fit(shapes, labels="multi")
    assert fitted.evaluate(shapes).map > 0.6
    with pytest.raises(UserError, match="`shots` needs one label per image"):
        vitrail.compare_heads(run.folder, shapes, labels="multi", shots=(1,))
    with pytest.raises(UserError, match="ViTClassifier learns one label per image"):
        vitrail.ViTClassifier().fit(np.zeros((4, 8, 8)), np.eye(4, 3))


def test_runs_are_compared_by_their_exact_matches(run, shapes, tmp_path):
    stored = read_run(run.folder).predictions.splits["test"]
    assert stored.accuracy == pytest.approx(run.metrics["test"]["accuracy"])
    assert stored.predicted.shape == stored.labels.shape == (len(stored), 3)
    settings = {**SETTINGS, "train": {"steps": 2, "batch": 16, "lr": 1e-5}}
    worse = vitrail.train(shapes, out=tmp_path / "w", settings=settings, report=False, quiet=True)
    compared = vitrail.compare(run, worse).runs[1]
    assert compared.difference.images == len(stored) and 0 <= compared.difference.p < 1
    right, wrong = (read_run(one.folder).predictions.splits["test"].correct for one in (run, worse))
    assert compared.difference.points == pytest.approx((right.double() - wrong.double()).mean())


def test_check_accepts_what_training_accepts(shapes):
    found = vitrail.check(shapes, labels="multi")
    assert found.error is None and found.plan.recipe.data.labels == "multi"
    assert "any number per image" in found.plan.reasons[0]
    with pytest.raises(UserError, match="contains ';'"):
        vitrail.check(shapes)


def test_binary_cross_entropy_weights_positives_and_smooths():
    logits, targets = torch.zeros(2, 3), torch.tensor([[1.0, 0, 0], [0, 0, 0]])
    plain = binary_cross_entropy(logits, targets, 0.0, None)
    assert plain == pytest.approx(2 * np.log(2), rel=1e-6)  # summed over images
    weights = positive_weights(torch.tensor([1, 5, 500]), 1000)
    assert weights.tolist() == [20.0, 20.0, 1.0]
    weighted = binary_cross_entropy(logits, targets, 0.0, weights)
    assert weighted == pytest.approx((2 * 3 + 19) / 3 * np.log(2), rel=1e-6)
    sure = torch.full((1, 1), 40.0)
    assert binary_cross_entropy(sure, torch.ones(1, 1), 0.1, None) > 1


def test_balanced_sampling_is_refused(shapes, tmp_path):
    with pytest.raises(UserError, match="balanced sampling needs one label per image"):
        vitrail.train(
            shapes, out=tmp_path / "no", settings={"data": {"labels": "multi", "balanced": True}}
        )


@pytest.mark.parametrize("labels", ["multi", "none"])
def test_images_with_several_labels_can_learn_features_from_a_teacher(
    run, shapes, tmp_path, labels
):
    settings = {
        "vit": SETTINGS["vit"],
        "train": {"steps": 4, "batch": 16},
        "data": {"workers": 0, "labels": labels},
        "pretrain": {"comparison": 0.0},
    }
    given = {"out": tmp_path / "pre", "report": False, "quiet": True}
    done = vitrail.pretrain(shapes, teacher=run.folder, settings=settings, **given)
    assert done.metrics["method"] == "teacher" and 0 < done.metrics["loss"] < 2
