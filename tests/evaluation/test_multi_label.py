"""Scores of images with several labels equal scikit-learn's, and their calibration calibrates."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn

from vitrail.evaluation import multi_label

RNG = np.random.default_rng(0)
LABELS = (RNG.random((200, 4)) < [0.5, 0.3, 0.1, 0.02]).astype(np.uint8)
SCORES = (RNG.normal(size=(200, 4)) + 1.5 * LABELS).round(1)  # with ties
LOGITS, TRUE = torch.from_numpy(SCORES), torch.from_numpy(LABELS).float()


def test_average_precision_is_scikit_learns_also_with_ties():
    for k in range(4):
        ours = multi_label.average_precision(LOGITS[:, k], TRUE[:, k])
        theirs = sklearn.average_precision_score(LABELS[:, k], SCORES[:, k])
        assert ours == pytest.approx(theirs, abs=1e-12)
    theirs = sklearn.average_precision_score(LABELS, SCORES, average="macro")
    assert multi_label.mean_average_precision(LOGITS, TRUE) == pytest.approx(theirs)


def test_a_class_without_positives_has_no_average_precision():
    nothing = torch.zeros(5)
    assert math.isnan(multi_label.average_precision(torch.arange(5.0), nothing))
    score = multi_label.score_labels(torch.rand(5, 1), nothing[:, None], (0.5,))[0]
    assert score.average_precision is None and score.count == 0


def test_f1_is_scikit_learns():
    probabilities, thresholds = LOGITS.sigmoid(), (0.6, 0.7, 0.8, 0.5)
    predicted = multi_label.predict_labels(probabilities, thresholds)
    scores = multi_label.score_labels(probabilities, TRUE, thresholds)
    micro, macro = (
        sklearn.f1_score(LABELS, predicted.numpy(), average=kind) for kind in ("micro", "macro")
    )
    assert multi_label.micro_f1(predicted, TRUE) == pytest.approx(micro)
    assert multi_label.macro_f1(scores) == pytest.approx(macro)
    exact = sklearn.accuracy_score(LABELS, predicted.numpy())
    assert multi_label.exact_match(predicted, TRUE) == pytest.approx(exact)


def test_thresholds_have_the_highest_f1():
    probabilities = LOGITS.sigmoid()
    chosen = multi_label.choose_thresholds(probabilities, TRUE)
    best = multi_label.score_labels(probabilities, TRUE, chosen)
    for other in np.linspace(0.02, 0.98, 49):
        for one, score in zip(
            multi_label.score_labels(probabilities, TRUE, (other,) * 4), best, strict=True
        ):
            assert one.f1 <= score.f1 + 1e-12


def test_platt_scaling_recovers_the_shift_and_scale_of_logits():
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(20000, 2, generator=generator, dtype=torch.float64) * 2
    labels = (
        torch.rand(20000, 2, generator=generator, dtype=torch.float64) < true.sigmoid()
    ).float()
    distorted = true * 3 + torch.tensor([1.0, -2.0])
    scaling = multi_label.fit_platt(distorted, labels)
    assert scaling.slopes == pytest.approx((1 / 3, 1 / 3), rel=0.05)
    assert scaling.intercepts == pytest.approx((-1 / 3, 2 / 3), abs=0.06)
    before = multi_label.expected_calibration_error(distorted.sigmoid(), labels)
    after = multi_label.expected_calibration_error(scaling.probabilities(distorted), labels)
    assert after < 0.02 < before


def test_separable_classes_get_finite_and_confident_probabilities():
    scores = torch.tensor([[-6.0], [-5.5], [-5.6], [5.4], [5.9], [6.0]])
    labels = (scores > 0).float()
    scaling = multi_label.fit_platt(scores, labels)
    p = scaling.probabilities(scores)
    assert (p[labels == 0] < 0.3).all() and (p[labels == 1] > 0.7).all()
    assert 0.3 < multi_label.choose_thresholds(p, labels)[0] < 0.7


def test_cooccurrence_counts_true_and_predicted_pairs():
    labels = torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    predicted = torch.tensor([[True, False, True], [True, False, False]])
    expected = [[2, 0, 1], [1, 0, 1], [0, 0, 0]]
    assert multi_label.cooccurrence(labels, predicted).long().tolist() == expected
