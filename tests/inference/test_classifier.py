"""What `vitrail.load` returns: predictions, calibrated probabilities, evaluation."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.cli.conftest import call
from vitrail.data.config import Preprocess
from vitrail.evaluation import metrics
from vitrail.inference.classifier import Classifier
from vitrail.inference.head import FeatureClassifier
from vitrail.inference.load import load
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.zoo.file import save_model

CLASSES = [str(number) for number in range(10)]
PREPROCESS = Preprocess(size=8, channels=1)
HOT = 3.0  # a temperature far enough from 1 that ignoring it shows


def make(temperature=HOT):
    """A classifier of digits with confident random weights."""
    torch.manual_seed(0)
    model = ViT(ViTConfig(image=8, patch=2, channels=1, classes=10, width=16, depth=1, heads=1))
    torch.nn.init.normal_(model.head.weight)
    return Classifier(model, CLASSES, PREPROCESS, {"temperature": temperature}, "cpu")


@pytest.fixture(scope="module")
def digits():
    return vitrail.open_data("digits")


@pytest.fixture
def images(digits):
    return [digits[index].content for index in range(40)]


@pytest.fixture
def saved(tmp_path):
    """The classifier as a model file."""
    one = make()
    described = {"classes": CLASSES, "preprocess": PREPROCESS.to_dict(), "temperature": HOT}
    save_model(tmp_path / "model.safetensors", one.model, described)
    return tmp_path / "model.safetensors"


def softmax(classifier, images, temperature=1.0):
    predictor = classifier.predictor
    logits = np.concatenate([predictor.logits(x) for x in predictor.batches(images)])
    return (torch.from_numpy(logits).double() / temperature).softmax(dim=1).float().numpy()


def test_one_image_gives_a_prediction_and_many_a_list(images):
    classifier = make()
    one, many = classifier.predict(images[0]), classifier.predict(images[:3])
    assert isinstance(one, vitrail.Prediction) and isinstance(many, list)
    assert one.label == many[0].label and len(many) == 3
    assert classifier.predict([]) == []
    assert classifier.predict(iter(images[:3])) == many


def test_probabilities_are_divided_by_the_temperature(images):
    classifier = make()
    np.testing.assert_allclose(
        classifier.probabilities(images), softmax(classifier, images, HOT), rtol=1e-5
    )
    found = [one.probability for one in classifier.predict(images)]
    np.testing.assert_allclose(found, softmax(classifier, images, HOT).max(axis=1), rtol=1e-5)


def test_raw_gives_the_plain_softmax(images):
    classifier = make()
    plain = softmax(classifier, images)
    np.testing.assert_allclose(classifier.probabilities(images, raw=True), plain, rtol=1e-6)
    found = [one.probability for one in classifier.predict(images, raw=True)]
    np.testing.assert_allclose(found, plain.max(axis=1), rtol=1e-6)
    assert np.abs(plain - classifier.probabilities(images)).max() > 0.05


@pytest.mark.parametrize("temperature", [1e-3, HOT, 1e3])
def test_the_temperature_changes_no_prediction(images, temperature):
    classifier = make(temperature)
    calibrated, raw = classifier.predict(images), classifier.predict(images, raw=True)
    assert [one.label for one in calibrated] == [one.label for one in raw]


def test_without_a_temperature_probabilities_are_the_plain_softmax(images):
    classifier = make(None)
    assert classifier.temperature is None
    plain = softmax(classifier, images)
    np.testing.assert_allclose(classifier.probabilities(images), plain, rtol=1e-6)


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), float("inf"), "2", True, [1]])
def test_an_impossible_temperature_is_refused(temperature):
    with pytest.raises(vitrail.UserError, match=r"temperature is .*; wanted a .*number"):
        make(temperature)


def test_explanations_show_the_probabilities_of_predict(images):
    classifier = make()
    for raw in (False, True):
        explanation = classifier.explain(images[0], raw=raw)
        prediction = classifier.predict(images[0], raw=raw)
        assert explanation.target == prediction.label
        assert explanation.probability == pytest.approx(prediction.probability, rel=1e-4)
        expected = {one.label: one.probability for one in prediction.top}
        assert dict(explanation.top) == pytest.approx(expected, rel=1e-4)


def test_evaluation_measures_the_calibrated_probabilities(digits):
    classifier = make()
    items = np.flatnonzero(digits.splits == "test")
    x = np.concatenate(list(classifier.predictor.batches(digits[int(i)].content for i in items)))
    logits = torch.from_numpy(classifier.predictor.logits(x))
    labels = torch.from_numpy(digits.labels[items])
    for raw, temperature in ((False, HOT), (True, 1.0)):
        found = classifier.evaluate(digits, split="test", raw=raw)
        assert found.images == len(items)
        assert found.log_loss == pytest.approx(metrics.log_loss(logits, labels, temperature))
        diagram = metrics.reliability_diagram(logits, labels, temperature)
        assert found.ece == pytest.approx(metrics.calibration_error(diagram), abs=1e-5)
        surest = (logits / temperature).softmax(dim=1).amax(dim=1)[logits.argmax(1) != labels]
        assert found.mistakes[0].probability == pytest.approx(float(surest.max()), rel=1e-5)
    assert found.accuracy == classifier.evaluate(digits, split="test").accuracy


def test_an_evaluation_is_the_document_that_the_command_prints(capsys, saved):
    code, out, _ = call(capsys, "evaluate", saved, "digits", "--split", "all", "--json")
    assert code == 0
    found = load(saved).evaluate("digits", split="all")
    assert json.loads(out) == json.loads(json.dumps(found.to_dict()))


def test_an_evaluation_reads_well(digits):
    found = make().evaluate(digits, split="val")
    text = repr(found)
    assert "Evaluation on" in text and "accuracy" in text and "calibration error (ECE)" in text
    assert "<table>" in found._repr_html_()
    with pytest.raises(AttributeError):
        found.accuracy = 1.0


def test_data_with_other_classes_is_refused(photos):
    with pytest.raises(vitrail.UserError, match=r"classes=classifier\.classes"):
        make().evaluate(vitrail.open_data(photos))


def test_the_command_predicts_calibrated_probabilities(capsys, saved, digits, tmp_path):
    path = tmp_path / "digit.png"
    Image.fromarray(digits[0].content[:, :, 0]).save(path)
    for raw in (False, True):
        flags = ["--raw"] if raw else []
        _, out, _ = call(capsys, "predict", saved, path, "--json", *flags)
        expected = load(saved).predict(path, raw=raw).probability
        assert json.loads(out)["probability"] == pytest.approx(expected)
        _, out, _ = call(capsys, "predict", saved, path, "--csv", *flags)
        assert float(out.splitlines()[1].split(",")[2]) == pytest.approx(expected, abs=1e-6)
        _, out, _ = call(
            *(capsys, "explain", saved, path, "--json", "--out", tmp_path / f"why-{raw}", *flags)
        )
        assert json.loads(out.splitlines()[0])["probability"] == pytest.approx(expected, rel=1e-4)


def test_reports_show_calibrated_confidences():
    from tests.run.fabricated import images as fabricate
    from vitrail.run.report.gallery import ThumbnailAlbum
    from vitrail.run.report.page import error_cards
    from vitrail.run.storage.predictions import Predictions, SplitOutputs

    source = fabricate(["a", "b"])
    logits, labels = torch.tensor([[2.0, 0.0]]), torch.tensor([1])
    outputs = SplitOutputs(logits=logits, labels=labels, items=np.array([0]))
    splits = {"test": outputs.to_predictions(HOT)}
    metadata = {"classes": ["a", "b"], "images": {"test": 1}, "temperature": HOT}
    (card,) = error_cards(
        Predictions(splits=splits, metadata=metadata), ThumbnailAlbum(source, budget=10**6)
    )
    confidence = (logits / HOT).softmax(dim=1).max().item()
    assert card["confidence"] == f"{100 * confidence:.0f} %" == "66 %"  # the plain softmax: 88 %


def test_an_error_names_the_image(images):
    with pytest.raises(vitrail.UserError, match=r"^image 2: "):
        make().predict([images[0], b"no image"])
    with pytest.raises(vitrail.UserError, match=r"^missing\.png: "):
        make().predict("missing.png")


def test_predict_each_goes_on_after_an_unreadable_image(images):
    results = [result for _, result in make().predict_each([images[0], b"no image", images[1]])]
    kinds = [type(result) for result in results]
    assert kinds == [vitrail.Prediction, vitrail.UserError, vitrail.Prediction]


def test_a_model_without_a_head_needs_one():
    model = ViT(ViTConfig(image=8, patch=2, classes=3, width=8, depth=1, heads=1, head="none"))
    with pytest.raises(vitrail.UserError, match="no classification head"):
        Classifier(model, ["a", "b", "c"], PREPROCESS)


def test_reprs_are_short(images):
    classifier = make()
    assert "10 classes: 0, 1, 2, 3, 4, ...; 8 x 8 pixels, 1 channel" in repr(classifier)
    assert repr(classifier.predict(images[0], top=1)).startswith("Prediction(")
    assert "<td>" in classifier.predict(images[0])._repr_html_()


def test_a_classifier_on_features_is_composed_and_cannot_explain():
    assert not issubclass(FeatureClassifier, Classifier)
    assert not hasattr(FeatureClassifier, "explain")
