"""Tests for change: whether new predictions come from the same distribution as validation ones."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_EXPECTED = 5.0  # images of a class below which classes are pooled, as usual for chi-squared


def compare_shares(counts: NDArray[Any], shares: NDArray[Any], images: int) -> float:
    """P-value of a chi-squared test that counts have the shares of `images` earlier ones."""
    total = counts.sum()
    earlier = np.asarray(shares, float) * images
    if not total or not images:
        return 1.0
    expected = (counts + earlier) * total / (total + images)
    rare = expected < MIN_EXPECTED
    groups = [*((counts[k], earlier[k]) for k in np.flatnonzero(~rare))]
    if rare.any():
        groups.append((counts[rare].sum(), earlier[rare].sum()))
    statistic, ratio = 0.0, math.sqrt(images / total)
    for now, then in groups:
        if now + then:
            statistic += (now * ratio - then / ratio) ** 2 / (now + then)
    return chi_squared_tail(statistic, len(groups) - 1)


def compare_samples(now: Sequence[float], then: Sequence[float], images: int) -> float:
    """P-value of a two-sample Kolmogorov-Smirnov test; `then` are quantiles of `images` values."""
    new, old = np.sort(now), np.sort(then)
    if not len(new) or not len(old):
        return 1.0
    points = np.concatenate([new, old])
    distance = np.abs(
        np.searchsorted(new, points, side="right") / len(new)
        - np.searchsorted(old, points, side="right") / len(old)
    ).max()
    size = len(new) * images / (len(new) + images)
    return kolmogorov_tail((math.sqrt(size) + 0.12 + 0.11 / math.sqrt(size)) * float(distance))


def compare_rate(successes: int, total: int, rate: float) -> float:
    """One-sided p-value of a binomial test that a rate is not higher than expected."""
    if not total:
        return 1.0
    logs = [
        math.lgamma(total + 1)
        - math.lgamma(k + 1)
        - math.lgamma(total - k + 1)
        + k * math.log(rate)
        + (total - k) * math.log1p(-rate)
        for k in range(successes, total + 1)
    ]
    return min(1.0, sum(math.exp(value) for value in logs))


def chi_squared_tail(statistic: float, degrees: int) -> float:
    """The probability of a larger value of chi-squared: the upper incomplete gamma function."""
    if degrees < 1 or statistic <= 0:
        return 1.0
    a, x = degrees / 2, statistic / 2
    scale = math.exp(a * math.log(x) - x - math.lgamma(a)) if x > 0 else 0.0
    if x < a + 1:  # series of the lower function
        term = total = 1 / a
        n = a
        while term > total * 1e-15:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1 - scale * total)
    b, c = x + 1 - a, 1e300  # continued fraction of the upper one (Lentz)
    d = 1 / b
    h = d
    for i in range(1, 10_000):
        step = -i * (i - a)
        b += 2
        d = 1 / (step * d + b or 1e-300)
        c = b + step / c or 1e-300
        h *= d * c
        if abs(d * c - 1) < 1e-14:
            break
    return min(1.0, scale * h)


def kolmogorov_tail(x: float) -> float:
    """The probability of a larger value of Kolmogorov's statistic."""
    if x < 0.3:
        return 1.0
    terms = [math.exp(-2 * k * k * x * x) * (1 if k % 2 else -1) for k in range(1, 101)]
    return min(1.0, max(0.0, 2 * math.fsum(terms)))
