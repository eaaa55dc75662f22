"""Logistic regression: equal to scikit-learn's, and honest about accuracy."""

import numpy as np
import pytest
import torch

from vitrail.heads.logistic import PENALTIES, assign_folds, fit_logistic, minimise


@pytest.fixture
def clouds():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(240) % 3
    centres = 1.5 * torch.randn(3, 8, generator=generator)
    return centres[labels] + torch.randn(240, 8, generator=generator), labels


def test_it_is_the_logistic_regression_of_scikit_learn(clouds):
    sklearn = pytest.importorskip("sklearn.linear_model")
    x, y = clouds
    penalty = 0.01
    weight, bias = minimise(x, y, penalty, torch.zeros(3, 8), torch.zeros(3), None)
    peer = sklearn.LogisticRegression(C=1 / (penalty * len(x)), max_iter=1000, tol=1e-8)
    logits = (x @ weight.T + bias).softmax(dim=1).numpy()
    assert np.abs(peer.fit(x.numpy(), y.numpy()).predict_proba(x.numpy()) - logits).max() < 1e-3


def test_its_accuracy_is_that_on_images_it_has_not_seen(clouds):
    x, y = clouds
    noise = torch.randn(240, 200, generator=torch.Generator().manual_seed(1))
    fit = fit_logistic(noise, y, 3)
    assert fit.accuracy < 0.5  # a third is chance; the fit itself knows its own images
    good = fit_logistic(x, y, 3)
    seen = (x @ good.weight.T + good.bias).argmax(dim=1) == y
    assert abs(good.accuracy - float(seen.float().mean())) < 0.08
    assert good.penalty in PENALTIES


def test_every_fold_has_every_class():
    labels = torch.tensor([0] * 9 + [1] * 6 + [2] * 3)
    folds = assign_folds(labels)
    assert all(set(folds[labels == k].tolist()) == {0, 1, 2} for k in range(3))
