"""Which weights of a run are kept."""

import pytest

from vitrail.run.drive import better


def look(accuracy, loss):
    return {"val_accuracy": accuracy, "val_loss": loss}


@pytest.mark.parametrize(
    "now, kept, images, wins",
    [
        (look(0.80, 0.9), look(0.70, 0.5), 1000, True),  # far more right answers
        (look(0.70, 0.5), look(0.80, 0.9), 1000, False),
        (look(0.984, 0.150), look(0.989, 0.160), 184, True),  # one image less, surer of the others
        (look(0.989, 0.160), look(0.984, 0.150), 184, False),  # lucky with one image
        (look(0.989, 0.160), look(0.984, 0.150), 18400, True),  # of so many it is no luck
        (look(0.9946, 0.10), look(1.0, 0.11), 184, True),  # a faultless look leaves room for luck
    ],
)
def test_a_difference_that_may_be_chance_is_decided_by_the_loss(now, kept, images, wins):
    assert better(now, kept, images) is wins


def test_the_first_weights_are_kept():
    assert better(look(0.1, 2.3), None, 10)
