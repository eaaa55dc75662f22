"""Metrics against hand-computed values."""

import math

import pytest
import torch

from vitrail.evaluation.metrics import (
    ECE_BINS,
    Bin,
    accuracy,
    calibrated_softmax,
    calibration_error,
    confusion_matrix,
    fit_temperature,
    log_loss,
    mcnemar,
    most_confident_errors,
    reliability_diagram,
    score_classes,
    wilson_interval,
)

LOGITS = torch.tensor([[3.0, 1, 2], [0, 5, 1], [4, 4, 0], [1, 2, 3]])
LABELS = torch.tensor([0, 2, 1, 2])
PREDICTIONS = calibrated_softmax(LOGITS).max(dim=1)


def sample_logits(temperature: float, count: int = 4000) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are `temperature` times too large for the labels sampled from them."""
    torch.manual_seed(0)
    calibrated = torch.randn(count, 5) * 2
    labels = torch.multinomial(calibrated.softmax(dim=1), 1)[:, 0]
    return calibrated * temperature, labels


def test_accuracy_is_the_fraction_of_correct_predictions():
    assert accuracy(LOGITS, LABELS) == 0.5


def test_ties_go_to_the_lower_class_as_in_argmax():
    assert accuracy(LOGITS[2:3], torch.tensor([0])) == 1
    assert accuracy(LOGITS[2:3], torch.tensor([1])) == 0


def test_constant_logits_have_chance_accuracy():
    assert accuracy(torch.zeros(10, 5), torch.arange(10) % 5) == 0.2


def test_top_k_counts_labels_among_the_k_highest():
    assert [accuracy(LOGITS, LABELS, top) for top in (1, 2, 3, 5)] == [0.5, 1, 1, 1]


def test_wilson_interval_of_eight_in_ten():
    assert wilson_interval(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=5e-5)


def test_wilson_interval_of_none_in_ten():
    assert wilson_interval(0.0, 10) == pytest.approx((0, 0.2775), abs=5e-5)


def test_wilson_interval_stays_between_0_and_1():
    for count in range(1, 50):
        assert 0 <= wilson_interval(0.0, count)[0] < 1e-15
        assert 1 - 1e-15 < wilson_interval(1.0, count)[1] <= 1


def test_rows_of_the_confusion_matrix_are_the_true_classes():
    predicted = torch.tensor([0, 1, 0, 2])
    assert confusion_matrix(predicted, LABELS, 3).tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 1]]


def test_scores_of_a_class_by_hand():
    score = score_classes(torch.tensor([[6, 2], [3, 9]]))[0]
    assert (score.precision, score.recall, score.count) == (6 / 9, 6 / 8, 8)
    assert score.f1 == pytest.approx(2 / (9 / 6 + 8 / 6))


def test_a_class_that_is_never_predicted_scores_zero():
    score = score_classes(torch.tensor([[5, 0], [2, 0]]))[1]
    assert (score.precision, score.recall, score.f1, score.count) == (0, 0, 0, 2)


def test_log_loss_by_hand():
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]])
    assert log_loss(logits, torch.tensor([0, 1])) == pytest.approx(
        (math.log(4 / 3) + math.log(2)) / 2
    )


def test_log_loss_divides_by_the_temperature():
    logits = torch.tensor([[2 * math.log(3.0), 0.0]])
    assert log_loss(logits, torch.tensor([0]), temperature=2) == pytest.approx(math.log(4 / 3))


def test_calibration_error_by_hand():
    # confidence 0.9 four times and correct twice, 0.6 four times and correct three times
    curve = [
        Bin(confidence=0.9, accuracy=0.5, count=4),
        Bin(confidence=0.6, accuracy=0.75, count=4),
    ]
    assert calibration_error(curve) == pytest.approx((0.4 + 0.15) / 2)


def test_bins_hold_confidence_accuracy_and_count():
    confidence = torch.tensor([0.95, 0.95, 0.6])
    logits = torch.stack([confidence.log(), (1 - confidence).log()], dim=1)
    low, high = reliability_diagram(logits, torch.tensor([0, 1, 0]))
    assert (low.count, low.accuracy, high.count, high.accuracy) == (1, 1, 2, 0.5)
    assert (low.confidence, high.confidence) == pytest.approx((0.6, 0.95))


def test_a_bin_includes_its_upper_end():
    logits = torch.tensor([[0.0, 0.0]])  # confidence 0.5: the upper end of the first of two bins
    assert (
        len(reliability_diagram(logits.repeat(3, 1), torch.zeros(3, dtype=torch.int64), bins=2))
        == 1
    )
    logits = torch.tensor([[0.0, 0.0], [0.1, 0.0]])
    assert len(reliability_diagram(logits, torch.zeros(2, dtype=torch.int64), bins=2)) == 2


def test_confidence_1_falls_into_the_last_bin():
    assert reliability_diagram(torch.tensor([[1e4, 0.0]]), torch.tensor([0]))[0].confidence == 1


def test_calibrated_logits_have_a_small_calibration_error():
    assert calibration_error(reliability_diagram(*sample_logits(1))) < 0.03
    assert calibration_error(reliability_diagram(*sample_logits(4))) > 0.1


@pytest.mark.parametrize("temperature", [0.3, 1, 4])
def test_the_fitted_temperature_recovers_the_true_one(temperature):
    assert fit_temperature(*sample_logits(temperature)) == pytest.approx(temperature, rel=0.05)


def test_the_fitted_temperature_minimises_the_log_loss():
    logits, labels = sample_logits(2)
    best = fit_temperature(logits, labels)
    around = [log_loss(logits, labels, best * factor) for factor in (0.97, 1.03)]
    assert log_loss(logits, labels, best) < min(around)


def test_validation_data_without_errors_leaves_confidence_below_1():
    logits = torch.eye(5).repeat(20, 1) * 3
    temperature = fit_temperature(logits, logits.argmax(dim=1))
    confidence = (logits / temperature).softmax(dim=1).max()
    assert 0.98 < confidence < 0.999


def test_constant_logits_have_temperature_1():
    assert fit_temperature(torch.zeros(6, 3), torch.arange(6) % 3) == pytest.approx(1)


def test_calibrated_softmax_divides_by_the_temperature():
    logits = torch.tensor([[2 * math.log(3.0), 0.0]])
    assert calibrated_softmax(logits, 2.0)[0].tolist() == pytest.approx([0.75, 0.25])
    assert torch.equal(calibrated_softmax(logits), calibrated_softmax(logits, 1.0))


def test_the_calibration_error_shrinks_at_the_fitted_temperature():
    logits, labels = sample_logits(4)
    diagram = reliability_diagram(logits, labels, fit_temperature(logits, labels))
    assert len(diagram) <= ECE_BINS
    assert calibration_error(diagram) < 0.03


def test_errors_are_sorted_by_confidence():
    found = most_confident_errors(*PREDICTIONS, LABELS)
    assert [(m.index, m.label, m.predicted) for m in found] == [(1, 2, 1), (2, 1, 0)]
    assert found[0].probability == pytest.approx(float(LOGITS[1].softmax(dim=0)[1]))


def test_the_number_of_errors_is_limited():
    assert [m.index for m in most_confident_errors(*PREDICTIONS, LABELS, limit=1)] == [1]


def test_mcnemar_by_hand():
    # ten discordant images: one model is correct on 1, the other on 9; 2 (1 + 10) / 2^10
    labels = torch.zeros(30, dtype=torch.int64)
    one, other = labels.clone(), labels.clone()
    one[:9], other[9] = 1, 1
    assert mcnemar(one, other, labels) == pytest.approx(22 / 1024)


def test_mcnemar_of_equal_models_is_1():
    assert mcnemar(LABELS, LABELS, LABELS) == 1


def test_mcnemar_handles_thousands_of_discordant_images():
    labels = torch.zeros(10_000, dtype=torch.int64)
    one, other = (torch.arange(10_000) < 4900).long(), (torch.arange(10_000) >= 4900).long()
    # normal approximation with continuity correction: z = 1.99, p = 0.0466
    assert mcnemar(one, other, labels) == pytest.approx(0.0466, abs=2e-4)
