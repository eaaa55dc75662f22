"""One explanation of a small model, to be drawn and shown."""

from dataclasses import replace
from typing import Any

import numpy as np

from tests.insight.samples import pictures, small
from vitrail.insight.explanation import Explanation, explained

NAMES = ("tench", "sturgeon", "eel", "barracouta", "coho")


def example(kind: str = "plain", names: tuple[str, ...] = NAMES, **wishes: Any) -> Explanation:
    """Of noise, by a model that knows nothing, but with every array in its place."""
    model = small(kind)
    x = pictures(model, 1)
    pixels = (x[0].permute(1, 2, 0).sigmoid() * 255).byte().numpy()
    return explained(model, x, pixels, names, **wishes)


def bright(one: Explanation, row: int, column: int, method: str | None = None) -> Explanation:
    """The same with one hot patch and no other."""
    heat = np.zeros(one.grid, np.float32)
    heat[row, column] = 1.0
    return replace(one, heats={**one.heats, method or one.method: heat})
