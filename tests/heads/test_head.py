"""Logits of a head, from probabilities, margins or predictions."""

import numpy as np
import pytest
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from tests.heads.samples import head, rows


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize(
    "wrap", [lambda svm: svm, lambda svm: make_pipeline(StandardScaler(), svm)]
)
def test_one_vs_one_margins_are_not_used_as_logits(classes, wrap):
    x, y = rows(60, classes=classes)
    svm = wrap(SVC(decision_function_shape="ovo")).fit(x, y)
    assert np.array_equal(head(svm, classes=classes).logits(x).argmax(axis=1), svm.predict(x))


def test_margins_are_divided_by_the_temperature():
    x, y = rows()
    svm = SVC().fit(x, y)
    made = head(svm)
    assert np.allclose(made.logits(x), svm.decision_function(x) / made.temperature)
