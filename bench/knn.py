"""Nearest neighbours: the time of Vitrail and scikit-learn, and whether their results agree."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.measure import Budget, Case, OnProgress, measure
from bench.process import interleave_processes, start_processes
from vitrail.heads.knn import Metric, NeighbourSearch

METRICS: tuple[Metric, ...] = ("cosine", "euclidean")
IMAGES, QUERIES = 50_000, 1000  # indexed images, and images whose neighbours are searched
NEIGHBOURS = 10
CONTENDERS = ("vitrail", "scikit-learn")

Neighbours = tuple[NDArray[np.float64], NDArray[np.int64]]  # distances, indices


def run(budget: Budget, progress: OnProgress) -> dict[str, Any]:
    with start_processes("knn", CONTENDERS) as processes:
        cases = [
            Case(
                label=f"{QUERIES:,} queries, {IMAGES:,} images, {metric}",
                unit="s",
                measure=partial(interleave_processes, processes, (metric, IMAGES, QUERIES)),
            )
            for metric in METRICS
        ]
        measured = measure(cases, budget, progress)
    agreement = {metric: measure_agreement(metric) for metric in METRICS}
    listed = ", ".join(f"{fraction:.2%} ({metric})" for metric, fraction in agreement.items())
    note = f"Neighbours in common: {listed}."
    return {"cases": measured, "note": note, "agreement": agreement}


def prepare(contender: str, metric: Metric, images: int, queries: int) -> Callable[[], Neighbours]:
    """A search for the neighbours, with the same random features for both contenders."""
    x, y = random_features(images, 0), random_features(queries, 1)
    if contender == "vitrail":
        ours = NeighbourSearch(x, metric)
        return lambda: ours.kneighbors(y, NEIGHBOURS)
    from sklearn.neighbors import NearestNeighbors

    theirs = NearestNeighbors(n_neighbors=NEIGHBOURS, metric=metric, algorithm="brute")
    theirs.fit(x)
    return lambda: theirs.kneighbors(y)


def measure_agreement(metric: Metric) -> float:
    """The fraction of neighbours that both contenders find."""
    ours, theirs = (prepare(name, metric, IMAGES, QUERIES)()[1] for name in CONTENDERS)
    return float((ours == theirs).mean())


def random_features(count: int, seed: int, width: int = 192) -> NDArray[np.float32]:
    """Features with the spectrum of a ViT's: few directions have most of the variance."""
    scale = np.arange(1, width + 1) ** -0.5
    rng = np.random.default_rng(seed)
    rows: NDArray[np.float64] = rng.normal(size=(count, width)) * scale
    return rows.astype(np.float32)
