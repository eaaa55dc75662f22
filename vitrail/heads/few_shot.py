"""Few-shot accuracy: heads fitted on a few images of each class, several times."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitrail.display.text import format_count
from vitrail.errors import UserError
from vitrail.heads.features import Examples
from vitrail.heads.fit import ignore_convergence_warnings
from vitrail.heads.head import score_all_classes
from vitrail.heads.kinds import TrainingSize, find_kind

DRAWS = 5  # random samples of the training images, each evaluated once


@dataclass(frozen=True, kw_only=True)
class FewShotScore:
    """Accuracy of a kind of head with a given number of training images per class."""

    shots: int  # training images of each class
    draws: int
    mean: float | None  # accuracy; None if the kind needs more images
    std: float | None  # standard deviation over the draws


def evaluate_few_shot(
    name: str, train: Examples, test: Examples, shots: int, classes: Sequence[str]
) -> FewShotScore:
    """Fits a kind of head on `DRAWS` samples with its default parameters.

    So few images do not allow cross-validation. All kinds get the same samples.
    """
    if shots < find_kind(name).min_shots:
        return FewShotScore(shots=shots, draws=0, mean=None, std=None)
    accuracies = []
    for draw in range(DRAWS):
        chosen = sample_shots(train.y, shots, classes, draw)
        size = TrainingSize(
            images=len(chosen), width=train.x.shape[1], classes=len(classes), smallest_class=shots
        )
        with ignore_convergence_warnings():
            estimator = find_kind(name).build(size).fit(train.x[chosen], train.y[chosen])
        predicted = score_all_classes(estimator, test.x, len(classes)).argmax(axis=1)
        accuracies.append(float((predicted == test.y).mean()))
    return FewShotScore(
        shots=shots,
        draws=DRAWS,
        mean=float(np.mean(accuracies)),
        std=float(np.std(accuracies, ddof=1)),
    )


def sample_shots(
    y: NDArray[np.int64], shots: int, classes: Sequence[str], draw: int
) -> NDArray[np.int64]:
    """Indices of `shots` random images of each class, a function of `shots` and `draw`."""
    rng = np.random.default_rng((shots, draw))
    chosen = []
    for label, name in enumerate(classes):
        members = np.flatnonzero(y == label)
        if len(members) < shots:
            raise UserError(
                f"class {name!r} has {format_count(len(members), 'training image')}, fewer than "
                f"{shots} shots; lower `shots`"
            )
        chosen.append(rng.choice(members, shots, replace=False))
    return np.concatenate(chosen)


def check_shots(shots: Sequence[int]) -> None:
    for number in shots:
        if number < 1:
            raise UserError(f"`shots` is {number}; give positive integers")
