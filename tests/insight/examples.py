"""An explanation of a small model, to draw and to show."""

from dataclasses import replace
from typing import Any

import numpy as np

from tests.insight.samples import pictures, small
from vitrail.insight.explanation import Explanation, explain_image

NAMES = ("tench", "sturgeon", "eel", "barracouta", "coho")


def example(kind: str = "plain", names: tuple[str, ...] = NAMES, **settings: Any) -> Explanation:
    """An explanation of noise by an untrained model, with all its arrays."""
    model = small(kind)
    x = pictures(model, 1)
    pixels = (x[0].permute(1, 2, 0).sigmoid() * 255).byte().numpy()
    return explain_image(model, x, pixels, names, **settings)


def with_hot_patch(
    one: Explanation, row: int, column: int, method: str | None = None
) -> Explanation:
    """The same explanation with a single hot patch."""
    heatmap = np.zeros(one.grid, np.float32)
    heatmap[row, column] = 1.0
    return replace(one, heatmaps={**one.heatmaps, method or one.method: heatmap})
