"""Conformal sets, risk curves and neighbours as pure functions."""

import numpy as np
import pytest

from vitrail.errors import UserError
from vitrail.evaluation.conformal import fit_conformal, in_sets, measure_sets, tail_mass
from vitrail.evaluation.drift import (
    chi_squared_tail,
    compare_rate,
    compare_samples,
    compare_shares,
    kolmogorov_tail,
)
from vitrail.evaluation.odd import MAX_BYTES, auroc, fit_neighbours
from vitrail.evaluation.selective import fit_risk_curve, log_odds


def draw(count, seed, classes=10):
    """Probabilities and labels of a model that is right about its uncertainty."""
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.full(classes, 0.3), count)
    labels = np.array([rng.choice(classes, p=row) for row in probabilities])
    return probabilities, labels


@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95, 0.99])
def test_sets_have_the_coverage_that_was_asked_for(coverage):
    found = []
    for seed in range(5):
        conformal = fit_conformal(*draw(3000, seed))
        probabilities, labels = draw(5000, 100 + seed)
        members = in_sets(probabilities, conformal.thresholds(coverage, 10))
        quality = measure_sets(members, labels, coverage, [str(n) for n in range(10)])
        found.append(quality.coverage)
        assert members.any(axis=1).all()
    assert abs(np.mean(found) - coverage) < 0.01


def test_each_class_has_its_coverage():
    rng = np.random.default_rng(0)

    def biased(count):  # the model overrates class 0
        probabilities, labels = draw(count, int(rng.integers(1000)), 3)
        probabilities[:, 0] += 0.5
        return probabilities / probabilities.sum(axis=1, keepdims=True), labels

    conformal = fit_conformal(*biased(4000))
    assert conformal.classes.keys() == {"0", "1", "2"}
    probabilities, labels = biased(4000)
    members = in_sets(probabilities, conformal.thresholds(0.9, 3))
    per_class = measure_sets(members, labels, 0.9, ["0", "1", "2"]).per_class
    assert all(score.coverage > 0.87 for score in per_class.values())


def test_a_class_with_few_images_has_the_common_threshold():
    probabilities, labels = draw(400, 0)
    conformal = fit_conformal(probabilities, np.where(labels == 3, 4, labels))
    assert "3" not in conformal.classes
    thresholds = conformal.thresholds(0.9, 10)
    assert thresholds[3] == conformal.overall.threshold(0.9)


def test_tail_mass_is_the_probability_of_less_likely_classes():
    np.testing.assert_allclose(tail_mass(np.array([[0.2, 0.5, 0.3]])), [[0.2, 1.0, 0.5]])


def test_easy_classes_do_not_make_the_sets_cover_more_than_promised():
    """Four of ten classes are nearly always most likely, so that their sets cover nearly all."""

    def uneven(count: int, seed: int):
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, 10, count)
        right = rng.random(count) < np.where(labels < 4, 0.95, 0.78)
        guess = np.where(right, labels, (labels + rng.integers(1, 10, count)) % 10)
        logits = rng.normal(size=(count, 10))
        logits[np.arange(count), guess] += 4
        logits[np.arange(count), labels] += 1.5
        probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        return probabilities, labels

    found = []
    for seed in range(5):
        conformal = fit_conformal(*uneven(5000, seed))
        probabilities, labels = uneven(10_000, 100 + seed)
        members = in_sets(probabilities, conformal.thresholds(0.9, 10))
        found.append(measure_sets(members, labels, 0.9, [str(n) for n in range(10)]))
    assert abs(np.mean([quality.coverage for quality in found]) - 0.9) < 0.01
    assert all(one.coverage > 0.83 for quality in found for one in quality.per_class.values())


def test_too_few_images_cannot_promise_a_high_coverage():
    conformal = fit_conformal(*draw(50, 0))
    with pytest.raises(UserError, match="needs at least 99 validation images"):
        conformal.thresholds(0.99, 10)


def test_abstention_keeps_the_error_rate():
    errors = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        confidence = rng.normal(size=6000)
        correct = rng.random(6000) < 1 / (1 + np.exp(-3 - 3 * confidence))
        threshold = fit_risk_curve(confidence[:3000], correct[:3000]).threshold(0.02)
        answered = confidence[3000:] >= threshold
        errors.append((~correct[3000:][answered]).mean())
    assert np.mean(errors) < 0.022


def test_log_odds_order_what_probabilities_round_to_one():
    odds = log_odds(np.array([[60.0, 0, 0], [80.0, 0, 0]]))
    assert odds[1] > odds[0] > 50


def test_neighbours_tell_far_features_and_fit_into_a_megabyte():
    rng = np.random.default_rng(0)

    def draw(images, logit=9, late=1, early=1):
        """Logits, late and early features, of which one may differ from those in training."""
        parts = [(logit, 4), (late, 256), (early, 256)]
        return np.concatenate([rng.normal(mean, 1, (images, n)) for mean, n in parts], axis=1)

    neighbours = fit_neighbours(draw(9000), draw(500), 4)
    early = neighbours.early
    stored = (neighbours.mean, neighbours.components, neighbours.features, early.components)
    assert 0.5 * MAX_BYTES < sum(map(len, stored)) + len(early.mean) < MAX_BYTES
    known = draw(2000)
    assert (neighbours.p_values(known) < 0.01).mean() < 0.03
    ordinary = draw(500, logit=0)
    ordinary[:, 260:] = 1  # early features like the mean do not hide logits unlike all others
    for far in (draw(500, logit=0), draw(500, late=-1), draw(500, early=2), ordinary):
        assert auroc(neighbours.measure(known), neighbours.measure(far)) > 0.99
        assert (neighbours.p_values(far) < 0.01).mean() > 0.9


def test_few_validation_images_are_enough_to_flag_odd_ones():
    rng = np.random.default_rng(0)
    train, val, known = (rng.normal(1, 1, (images, 20)) for images in (500, 30, 2000))
    neighbours = fit_neighbours(train, val, 4)
    assert (neighbours.p_values(rng.normal(9, 1, (100, 20))) < 0.01).all()
    assert (neighbours.p_values(known) < 0.01).mean() < 0.05


def test_auroc_counts_ties_half():
    assert auroc(np.array([1.0, 1.0]), np.array([1.0])) == 0.5
    assert auroc(np.array([0.0, 1.0]), np.array([2.0, 0.5])) == 0.75


def test_tests_for_change_have_their_level():
    """Of comparisons without a change, about one in twenty has a p-value below 0.05."""
    rng = np.random.default_rng(0)
    shares = np.array([0.5, 0.3, 0.15, 0.05])
    labels, confidence, odd = [], [], []
    for _ in range(300):
        then = rng.multinomial(2000, shares) / 2000
        labels.append(compare_shares(rng.multinomial(500, shares), then, 2000))
        old = np.quantile(rng.beta(5, 1, 2000), np.linspace(0, 1, 501))
        confidence.append(compare_samples(rng.beta(5, 1, 500), old, 2000))
        odd.append(compare_rate(int(rng.binomial(500, 0.01)), 500, 0.01))
    for p_values in (labels, confidence, odd):
        assert (np.array(p_values) < 0.05).mean() < 0.1
    assert compare_shares(np.array([100, 200, 100, 100]), shares, 2000) < 1e-6
    assert compare_samples(rng.beta(3, 2, 500), rng.beta(5, 1, 500), 2000) < 1e-6
    assert compare_rate(30, 500, 0.01) < 1e-6


def test_chi_squared_has_its_known_values():
    for statistic, degrees, p in ((3.841, 1, 0.05), (18.307, 10, 0.05), (2.558, 10, 0.99)):
        assert chi_squared_tail(statistic, degrees) == pytest.approx(p, abs=2e-4)
    assert kolmogorov_tail(1.3581) == pytest.approx(0.05, abs=1e-3)
