"""What a head says of features, whatever its estimator can say."""

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
def test_margins_between_pairs_are_not_taken_for_those_of_classes(classes, wrap):
    x, y = rows(60, classes=classes)
    svm = wrap(SVC(decision_function_shape="ovo")).fit(x, y)
    assert np.array_equal(head(svm, classes=classes).scores(x).argmax(axis=1), svm.predict(x))


def test_margins_of_classes_are_told_as_they_are():
    x, y = rows()
    svm = SVC().fit(x, y)
    made = head(svm)
    assert np.allclose(made.scores(x), svm.decision_function(x) / made.temperature)
