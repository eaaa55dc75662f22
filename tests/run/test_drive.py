"""Which weights of a run are the best."""

import pytest

from vitrail.run.drive import is_better
from vitrail.run.progress import Best


def evaluation(accuracy, loss):
    return Best(val_accuracy=accuracy, val_loss=loss, epoch=1, step=1)


@pytest.mark.parametrize(
    "new, best, images, wins",
    [
        (evaluation(0.80, 0.9), evaluation(0.70, 0.5), 1000, True),  # far more correct
        (evaluation(0.70, 0.5), evaluation(0.80, 0.9), 1000, False),
        (evaluation(0.984, 0.150), evaluation(0.989, 0.160), 184, True),  # one image less
        (evaluation(0.989, 0.160), evaluation(0.984, 0.150), 184, False),  # one image more
        (evaluation(0.989, 0.160), evaluation(0.984, 0.150), 18400, True),  # significant
        (evaluation(0.9946, 0.10), evaluation(1.0, 0.11), 184, True),  # also against 100 %
    ],
)
def test_the_loss_decides_where_the_accuracies_may_differ_by_chance(new, best, images, wins):
    assert is_better(new, best, images) is wins


def test_the_first_evaluation_is_the_best():
    assert is_better(evaluation(0.1, 2.3), None, 10)
