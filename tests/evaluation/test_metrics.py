import math

import pytest
import torch

from vitrail.evaluation.metrics import (
    Bin,
    accuracy,
    calibration_error,
    confusion,
    fit_temperature,
    interval,
    log_loss,
    mcnemar,
    mistakes,
    per_class,
    reliability,
)

LOGITS = torch.tensor([[3.0, 1, 2], [0, 5, 1], [4, 4, 0], [1, 2, 3]])
LABELS = torch.tensor([0, 2, 1, 2])


def drawn(temperature: float, count: int = 4000) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are `temperature` times too large for the labels drawn from them."""
    torch.manual_seed(0)
    fair = torch.randn(count, 5) * 2
    labels = torch.multinomial(fair.softmax(dim=1), 1)[:, 0]
    return fair * temperature, labels


def test_accuracy_is_the_share_of_right_answers():
    assert accuracy(LOGITS, LABELS) == 0.5


def test_a_tie_goes_to_the_lower_class_as_argmax_has_it():
    assert accuracy(LOGITS[2:3], torch.tensor([0])) == 1
    assert accuracy(LOGITS[2:3], torch.tensor([1])) == 0


def test_a_model_that_knows_nothing_gets_no_credit_for_ties():
    assert accuracy(torch.zeros(10, 5), torch.arange(10) % 5) == 0.2


def test_top_k_counts_labels_among_the_k_highest():
    assert [accuracy(LOGITS, LABELS, top) for top in (1, 2, 3, 5)] == [0.5, 1, 1, 1]


def test_wilson_interval_of_eight_in_ten():
    assert interval(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=5e-5)


def test_wilson_interval_of_none_in_ten():
    assert interval(0.0, 10) == pytest.approx((0, 0.2775), abs=5e-5)


def test_wilson_interval_stays_between_0_and_1():
    for count in range(1, 50):
        assert 0 <= interval(0.0, count)[0] < 1e-15
        assert 1 - 1e-15 < interval(1.0, count)[1] <= 1


def test_rows_of_the_confusion_matrix_are_the_true_classes():
    predicted = torch.tensor([0, 1, 0, 2])
    assert confusion(predicted, LABELS, 3).tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 1]]


def test_scores_of_a_class_by_hand():
    score = per_class(torch.tensor([[6, 2], [3, 9]]))[0]
    assert (score.precision, score.recall, score.count) == (6 / 9, 6 / 8, 8)
    assert score.f1 == pytest.approx(2 / (9 / 6 + 8 / 6))


def test_a_class_that_is_never_called_scores_zero():
    score = per_class(torch.tensor([[5, 0], [2, 0]]))[1]
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
    # 0.9 sure four times and right twice, 0.6 sure four times and right three times
    curve = [
        Bin(confidence=0.9, accuracy=0.5, count=4),
        Bin(confidence=0.6, accuracy=0.75, count=4),
    ]
    assert calibration_error(curve) == pytest.approx((0.4 + 0.15) / 2)


def test_bins_hold_confidence_accuracy_and_count():
    sure = torch.tensor([0.95, 0.95, 0.6])
    logits = torch.stack([sure.log(), (1 - sure).log()], dim=1)
    low, high = reliability(logits, torch.tensor([0, 1, 0]))
    assert (low.count, low.accuracy, high.count, high.accuracy) == (1, 1, 2, 0.5)
    assert (low.confidence, high.confidence) == pytest.approx((0.6, 0.95))


def test_a_bin_holds_its_upper_end():
    logits = torch.tensor([[0.0, 0.0]])  # 0.5 sure: the end of the first of two bins
    assert len(reliability(logits.repeat(3, 1), torch.zeros(3, dtype=torch.int64), bins=2)) == 1
    logits = torch.tensor([[0.0, 0.0], [0.1, 0.0]])
    assert len(reliability(logits, torch.zeros(2, dtype=torch.int64), bins=2)) == 2


def test_certainty_falls_into_the_last_bin():
    assert reliability(torch.tensor([[1e4, 0.0]]), torch.tensor([0]))[0].confidence == 1


def test_fair_logits_have_a_small_calibration_error():
    assert calibration_error(reliability(*drawn(1))) < 0.03
    assert calibration_error(reliability(*drawn(4))) > 0.1


@pytest.mark.parametrize("temperature", [0.3, 1, 4])
def test_the_fitted_temperature_is_the_one_the_logits_were_spoilt_with(temperature):
    assert fit_temperature(*drawn(temperature)) == pytest.approx(temperature, rel=0.05)


def test_no_temperature_has_less_log_loss_than_the_fitted_one():
    logits, labels = drawn(2)
    best = fit_temperature(logits, labels)
    around = [log_loss(logits, labels, best * factor) for factor in (0.97, 1.03)]
    assert log_loss(logits, labels, best) < min(around)


def test_a_faultless_validation_does_not_make_the_model_certain():
    logits = torch.eye(5).repeat(20, 1) * 3
    temperature = fit_temperature(logits, logits.argmax(dim=1))
    sure = (logits / temperature).softmax(dim=1).max()
    assert 0.98 < sure < 0.999


def test_logits_without_any_difference_keep_temperature_1():
    assert fit_temperature(torch.zeros(6, 3), torch.arange(6) % 3) == pytest.approx(1)


def test_mistakes_come_with_the_most_confident_first():
    found = mistakes(LOGITS, LABELS)
    assert [(m.index, m.label, m.predicted) for m in found] == [(1, 2, 1), (2, 1, 0)]
    assert found[0].probability == pytest.approx(float(LOGITS[1].softmax(dim=0)[1]))


def test_no_more_mistakes_than_asked_for():
    assert [m.index for m in mistakes(LOGITS, LABELS, most=1)] == [1]


def test_mcnemar_by_hand():
    # ten images tell: one model is right on 1, the other on 9; 2 (1 + 10) / 2^10
    labels = torch.zeros(30, dtype=torch.int64)
    one, other = labels.clone(), labels.clone()
    one[:9], other[9] = 1, 1
    assert mcnemar(one, other, labels) == pytest.approx(22 / 1024)


def test_mcnemar_of_equal_models_is_1():
    assert mcnemar(LABELS, LABELS, LABELS) == 1


def test_mcnemar_takes_thousands_of_differences():
    labels = torch.zeros(10_000, dtype=torch.int64)
    one, other = (torch.arange(10_000) < 4900).long(), (torch.arange(10_000) >= 4900).long()
    # normal approximation with continuity correction: z = 1.99, p = 0.0466
    assert mcnemar(one, other, labels) == pytest.approx(0.0466, abs=2e-4)
