"""Nearest neighbours: Vitrail's search against scikit-learn's, and whether they agree."""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.measure import Budget, Case, Task, Tick, measure, timed
from vitrail.heads.knn import Metric, Search

METRICS: dict[Metric, str] = {
    "cosine": "cosine",
    "euclid": "euclidean",
}  # ours, and what scikit-learn calls it
AMONG, ASKED = 50_000, 1000  # images that are known, and that are asked about
NEAREST = 10


def run(budget: Budget, tick: Tick) -> dict[str, Any]:
    among, asked = features(AMONG, 0), features(ASKED, 1)
    same: dict[str, float] = {}
    cases = [
        Case(
            label=f"{ASKED:,} images among {AMONG:,}, {metric}",
            unit="s",
            measure=timed(partial(tasks, metric, among, asked, same)),
        )
        for metric in METRICS
    ]
    found = measure(cases, budget, tick)
    told = ", ".join(f"{share:.2%} ({metric})" for metric, share in same.items())
    return {"cases": found, "note": f"Neighbours that both name: {told}.", "same": same}


def tasks(
    metric: Metric, among: NDArray[np.float32], asked: NDArray[np.float32], same: dict[str, float]
) -> dict[str, Task]:
    from sklearn.neighbors import NearestNeighbors

    ours = Search(among, metric)
    theirs = NearestNeighbors(n_neighbors=NEAREST, metric=METRICS[metric], algorithm="brute")
    theirs.fit(among)
    same[metric] = float((ours(asked, NEAREST)[1] == theirs.kneighbors(asked)[1]).mean())
    return {
        "vitrail": lambda: ours(asked, NEAREST),
        "scikit-learn": lambda: theirs.kneighbors(asked),
    }


def features(count: int, seed: int, width: int = 192) -> NDArray[np.float32]:
    """Rows like those of a ViT: some directions matter much, most matter little."""
    scale = np.arange(1, width + 1) ** -0.5
    drawn: NDArray[np.float64] = np.random.default_rng(seed).normal(size=(count, width)) * scale
    return drawn.astype(np.float32)
