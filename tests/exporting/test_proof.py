"""A proof measures what it says, and refuses what differs, with the place."""

import json

import numpy as np
import pytest
import torch

from tests.exporting.models import FakeEngine, build_graph, build_model, preprocess_of
from vitrail.errors import UserError
from vitrail.exporting import proof as proof_module
from vitrail.exporting.accuracy import compare_accuracy, paired_interval
from vitrail.exporting.card import render_proof
from vitrail.exporting.graph import ExportGraph, GraphOptions
from vitrail.exporting.proof import (
    BATCHES,
    choose_batches,
    collect_reference,
    decide,
    find_ties,
    measure_agreement,
    prove,
)


@pytest.fixture(scope="module")
def bundle():
    return collect_reference(build_graph("cls", GraphOptions(features=True)), None, None)


def add(image, position, error):
    """Adds an error to one value of one image; the proof runs images in order."""
    passed = 0

    def change(values):
        nonlocal passed
        rows = np.arange(passed, passed + len(values)) % 20
        passed += len(values)
        values = values.copy()
        values[(rows == image).nonzero()[0], position] += error
        return values

    return change


def test_an_equal_engine_is_proved_at_all_batch_sizes(bundle):
    engine = FakeEngine(bundle.graph, {})
    proof = prove(bundle, engine, "onnx")
    assert engine.sizes == BATCHES == (1, 2, 17)
    assert proof.largest_difference < 1e-5 and proof.agreement == 1.0
    assert proof.generated and proof.images == 20 and proof.tolerance == 1e-4


def test_the_largest_difference_is_that_of_the_worst_value(bundle):
    engine = FakeEngine(bundle.graph, {"logits": add(5, 2, 7e-5), "features": add(1, 0, 3e-5)})
    proof = prove(bundle, engine, "onnx")
    assert proof.differences["logits"] == pytest.approx(7e-5, rel=0.05)
    assert proof.differences["features"] == pytest.approx(3e-5, rel=0.05)
    assert proof.largest_difference == proof.differences["logits"]


@pytest.mark.parametrize(
    ("output", "where"),
    [("logits", r"image 14 of 20, class 3"), ("features", r"image 14 of 20, position 3")],
)
def test_a_difference_above_the_tolerance_says_how_much_and_where(bundle, output, where):
    engine = FakeEngine(bundle.graph, {output: add(13, 3, 1.5e-4)})
    with pytest.raises(UserError, match=rf"the {output} of fake differ .* by 0.00015 \({where}\)"):
        prove(bundle, engine, "onnx")


def test_the_tolerance_can_be_set(bundle):
    engine = FakeEngine(bundle.graph, {"logits": add(13, 3, 1.5e-4)})
    assert prove(bundle, engine, "onnx", tolerance=1e-3).tolerance == 1e-3
    with pytest.raises(UserError, match="more than 1e-06"):
        prove(bundle, FakeEngine(bundle.graph, {"logits": add(1, 1, 1e-5)}), "onnx", tolerance=1e-6)


def test_nan_is_a_difference(bundle):
    engine = FakeEngine(bundle.graph, {"logits": add(3, 1, np.nan)})
    with pytest.raises(UserError, match=r"differ from PyTorch's by inf \(image 4 of 20, class 1\)"):
        prove(bundle, engine, "onnx")


def test_another_shape_is_refused(bundle):
    engine = FakeEngine(bundle.graph, {"logits": lambda values: values[:1]})
    with pytest.raises(UserError, match=r"have the shape \(1, 5\), PyTorch's \(2, 5\)"):
        prove(bundle, engine, "onnx")


def test_a_deep_model_may_round_as_much_as_pytorch_itself(bundle, monkeypatch):
    engine = FakeEngine(bundle.graph, {"logits": add(13, 3, 1.5e-4)})
    monkeypatch.setattr(proof_module, "measure_rounding", lambda *arguments: 5e-5)
    assert prove(bundle, engine, "onnx").tolerance == pytest.approx(2e-4)


def test_rounding_is_the_difference_from_float64(bundle):
    error = proof_module.measure_rounding(bundle, "logits", 3)
    assert 0 < error < 1e-5
    bundle.reference["logits"][3, 1] += 0.5
    try:
        assert proof_module.measure_rounding(bundle, "logits", 3) == pytest.approx(0.5, rel=1e-3)
    finally:
        bundle.reference["logits"][3, 1] -= 0.5


def test_int8_is_measured_without_a_limit(bundle):
    proof = prove(
        bundle, FakeEngine(bundle.graph, {"logits": add(2, 0, 100.0)}), "onnx", exact=False
    )
    assert proof.tolerance is None and proof.largest_difference == pytest.approx(100, rel=1e-3)


@pytest.mark.parametrize("count", [1, 2, 19, 20, 21, 300])
def test_every_image_is_run_and_every_batch_size(count):
    batches = list(choose_batches(count))
    assert set(np.concatenate(batches)) == set(range(count))
    assert {len(batch) for batch in batches} == set(BATCHES)


def test_agreement_leaves_ties_out():
    reference = np.array([[1.0, 0.0], [1.0, 0.99995], [0.0, 2.0], [3.0, 0.0]], np.float32)
    outputs = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 2.0], [0.0, 3.0]], np.float32)
    assert find_ties(reference).tolist() == [False, True, False, False]
    assert measure_agreement(reference, outputs) == pytest.approx(2 / 3)


def test_a_single_class_has_no_ties():
    assert not find_ties(np.ones((3, 1), np.float32)).any()


def test_labels_are_judged_by_their_thresholds_and_not_by_the_largest_logit():
    rule = np.array([[1.0, 2.0], [0.5, -2.0]])  # labels begin at the logits -0.5 and 1
    reference = np.array([[-0.4, 5], [0, 0.99999], [-0.6, 2]], np.float32)
    outputs = np.array([[-0.6, 5], [0, 1.00001], [-0.7, 2]], np.float32)
    assert find_ties(reference, rule).tolist() == [False, True, False]
    assert measure_agreement(reference, outputs) == 1.0
    assert measure_agreement(reference, outputs, rule) == 0.5
    labels = np.array([[1, 1], [1, 0], [0, 1]])
    change = compare_accuracy(decide(reference, rule), decide(outputs, rule), labels)
    assert (change.before, change.after) == (1.0, pytest.approx(1 / 3))


def test_labels_give_the_accuracy_before_and_after():
    graph = build_graph("cls")
    images = np.random.default_rng(0).integers(0, 256, (40, 3, 16, 16)).astype(np.uint8)
    labels = collect_reference(graph, images, None).reference["logits"].argmax(axis=1)
    labels[:10] = (labels[:10] + 1) % 5
    bundle = collect_reference(graph, images, labels)
    engine = FakeEngine(graph, {"logits": lambda values: -values})
    proof = prove(bundle, engine, "onnx", exact=False)
    assert proof.accuracy.before == 0.75 and proof.accuracy.after < 0.5
    assert proof.accuracy.loss == pytest.approx(100 * (0.75 - proof.accuracy.after))
    low, high = proof.accuracy.interval
    assert low < -proof.accuracy.loss / 100 < high < 0


def test_the_paired_interval_is_agresti_and_mins():
    # 53 images: 2 gained, 7 lost (their adjusted Wald interval, computed by hand)
    before = np.array([True] * 7 + [False] * 2 + [True] * 44)
    after = np.array([False] * 7 + [True] * 2 + [True] * 44)
    total, gained, lost = 55, 2.5, 7.5
    change = (gained - lost) / total
    margin = 1.959964 * ((gained + lost - (gained - lost) ** 2 / total) ** 0.5) / total
    assert paired_interval(before, after) == pytest.approx((change - margin, change + margin))


def test_the_interval_of_equal_models_contains_zero_and_has_a_width():
    labels = np.zeros(50, np.int64)
    change = compare_accuracy(labels, labels, labels)
    assert change.interval[0] < 0 < change.interval[1]
    assert change.loss == 0


def test_the_paired_interval_covers_the_true_change():
    generator, covered = np.random.default_rng(0), 0
    for _ in range(1000):
        outcome = generator.choice(4, size=150, p=[0.7, 0.06, 0.02, 0.22])  # both, lost, gained
        before, after = np.isin(outcome, (0, 1)), np.isin(outcome, (0, 2))
        low, high = paired_interval(before, after)
        covered += low <= -0.04 <= high
    assert 930 <= covered <= 985


def test_images_must_fit_the_preprocessing():
    graph = build_graph("cls")
    with pytest.raises(UserError, match=r"images are float32 .*give uint8 of shape \(images, 3,"):
        collect_reference(graph, np.zeros((2, 3, 16, 16), np.float32), None)
    with pytest.raises(UserError, match="1 labels for 2 images"):
        collect_reference(graph, np.zeros((2, 3, 16, 16), np.uint8), np.zeros(1, np.int64))


def test_damaged_weights_are_refused():
    model = build_model("cls")
    with torch.no_grad():
        model.head.bias[0] = torch.nan
    graph = ExportGraph(model, preprocess_of(model), GraphOptions())
    with pytest.raises(UserError, match="PyTorch's logits are NaN or infinite"):
        collect_reference(graph, None, None)


def test_a_headless_model_is_proved_by_its_features():
    bundle = collect_reference(build_graph("headless"), None, None)
    proof = prove(bundle, FakeEngine(bundle.graph, {}), "onnx")
    assert proof.agreement is None and proof.differences.keys() == {"features"}
    assert "agreement" not in repr(proof)


def test_the_proof_is_json_and_text(bundle):
    proof = prove(bundle, FakeEngine(bundle.graph, {}), "onnx")
    document = json.loads(json.dumps(proof.to_dict()))
    assert document["batches"] == [1, 2, 17] and document["engine"] == "fake 1"
    assert document["largest_difference"] == proof.largest_difference
    assert repr(proof).startswith("Proof(onnx by fake 1, 20 images, largest difference ")


def test_the_card_shows_the_numbers_and_escapes_names(bundle):
    proof = prove(bundle, FakeEngine(bundle.graph, {}), "onnx")
    page = render_proof(proof, "<b>photos.onnx")
    assert "&lt;b&gt;photos.onnx" in page and "<b>photos" not in page
    assert "Equal to PyTorch within 0.0001." in page
    assert f"{proof.largest_difference:.2g}" in page and "1, 2, 17" in page
    assert "http" not in page.replace("http-equiv", "")  # it works offline
    assert proof._repr_html_().startswith("<!doctype html>")
