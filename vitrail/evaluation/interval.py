"""The confidence interval of a rate, without torch."""

import math

Z_95 = 1.959963984540054  # 97.5 % quantile of the standard normal: a two-sided 95 % interval


def wilson_interval(rate: float, count: int) -> tuple[float, float]:
    """95 % confidence interval of a rate measured on `count` images (Wilson, 1927)."""
    weight = Z_95**2 / count
    centre = (rate + weight / 2) / (1 + weight)
    margin = Z_95 / (1 + weight) * math.sqrt(rate * (1 - rate) / count + weight / (4 * count))
    return max(0.0, centre - margin), min(1.0, centre + margin)
