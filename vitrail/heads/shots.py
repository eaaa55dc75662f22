"""Learning from very few images of each class: several draws, their mean and spread."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import UserError
from vitrail.heads.features import Examples
from vitrail.heads.head import raw, spread
from vitrail.heads.kinds import Shape, find, patient

DRAWS = 5


@dataclass(frozen=True, kw_only=True)
class Shots:
    shots: int  # training images of each class
    draws: int
    mean: float | None  # accuracy; None where the kind needs more images
    spread: float | None  # standard deviation of a draw


def judge(name: str, train: Examples, test: Examples, shots: int, classes: Sequence[str]) -> Shots:
    """How a kind does with so few images, with parameters that were fixed before.

    There is nothing to choose them on. All kinds see the same draws.
    """
    if shots < find(name).least:
        return Shots(shots=shots, draws=0, mean=None, spread=None)
    rates = []
    for number in range(DRAWS):
        chosen = draw(train.y, shots, classes, number)
        shape = Shape(
            images=len(chosen), width=train.x.shape[1], classes=len(classes), rarest=shots
        )
        with patient():
            estimator = find(name).make(shape).fit(train.x[chosen], train.y[chosen])
        said = spread(estimator, raw(estimator, test.x), len(classes)).argmax(axis=1)
        rates.append(float((said == test.y).mean()))
    return Shots(
        shots=shots,
        draws=DRAWS,
        mean=float(np.mean(rates)),
        spread=float(np.std(rates, ddof=1)),
    )


def draw(
    y: NDArray[np.int64], shots: int, classes: Sequence[str], number: int
) -> NDArray[np.int64]:
    """So many images of each class; other ones with another number."""
    random = np.random.default_rng((shots, number))
    chosen = []
    for label, name in enumerate(classes):
        mine = np.flatnonzero(y == label)
        if len(mine) < shots:
            images = "1 training image" if len(mine) == 1 else f"{len(mine)} training images"
            raise UserError(f"class {name!r} has {images}, fewer than {shots} shots; ask for less")
        chosen.append(random.choice(mine, shots, replace=False))
    return np.concatenate(chosen)


def check(shots: Sequence[int]) -> None:
    for number in shots:
        if number < 1:
            raise UserError(f"shots is {number}; give whole numbers of at least 1")
