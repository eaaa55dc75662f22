"""The style of all figures: matplotlib's own defaults, whatever the user's matplotlibrc says."""

from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib.style


@contextmanager
def default_style() -> Iterator[None]:
    """Decorates what draws or saves a figure; the user's settings return afterwards.

    A user's `text.usetex` would need LaTeX, and fail on names such as "50 % off_white".
    """
    with matplotlib.style.context("default", after_reset=True):
        yield
