"""Colormaps that everybody can read, and figures without global state."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib import colormaps

from vitrail.insight import canvas


def lightness(colours):
    """CIE L* of the 256 colours."""
    rgb = colormaps[colours](np.arange(256))[:, :3]
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    y = linear @ [0.2126, 0.7152, 0.0722]
    return np.where(y > 0.008856, 116 * np.cbrt(y) - 16, 903.3 * y)


@pytest.mark.parametrize("colours", [canvas.HEATMAP, canvas.MAGNITUDE, canvas.SIMILARITY])
def test_more_is_always_lighter(colours):
    assert (np.diff(lightness(colours)) > 0).all()


def test_jet_would_fail():
    assert not (np.diff(lightness("jet")) > 0).all()


def test_nothing_is_drawn_by_pyplot():
    folder = Path(canvas.__file__).parent
    assert not [path for path in folder.glob("*.py") if "pyplot" in path.read_text()]
