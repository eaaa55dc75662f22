"""Nearest neighbours: Vitrail's search against scikit-learn's, and whether they agree."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.alone import all_alone, turns
from bench.measure import Budget, Case, Tick, measure
from vitrail.heads.knn import Metric, Search

METRICS: dict[Metric, str] = {
    "cosine": "cosine",
    "euclid": "euclidean",
}  # ours, and what scikit-learn calls it
AMONG, ASKED = 50_000, 1000  # images that are known, and that are asked about
NEAREST = 10
CONTENDERS = ("vitrail", "scikit-learn")

Found = tuple[NDArray[np.float64], NDArray[np.int64]]  # distances, positions


def run(budget: Budget, tick: Tick) -> dict[str, Any]:
    with all_alone("knn", CONTENDERS) as processes:
        cases = [
            Case(
                label=f"{ASKED:,} images among {AMONG:,}, {metric}",
                unit="s",
                measure=partial(turns, processes, (metric, AMONG, ASKED)),
            )
            for metric in METRICS
        ]
        found = measure(cases, budget, tick)
    same = {metric: agreement(metric) for metric in METRICS}
    told = ", ".join(f"{share:.2%} ({metric})" for metric, share in same.items())
    return {"cases": found, "note": f"Neighbours that both name: {told}.", "same": same}


def prepare(contender: str, metric: Metric, among: int, asked: int) -> Callable[[], Found]:
    """The distances and positions of the neighbours, of the same images for both."""
    known, queries = features(among, 0), features(asked, 1)
    if contender == "vitrail":
        ours = Search(known, metric)
        return lambda: ours(queries, NEAREST)
    from sklearn.neighbors import NearestNeighbors

    theirs = NearestNeighbors(n_neighbors=NEAREST, metric=METRICS[metric], algorithm="brute")
    theirs.fit(known)
    return lambda: theirs.kneighbors(queries)


def agreement(metric: Metric) -> float:
    """The share of the neighbours that both name."""
    ours, theirs = (prepare(name, metric, AMONG, ASKED)()[1] for name in CONTENDERS)
    return float((ours == theirs).mean())


def features(count: int, seed: int, width: int = 192) -> NDArray[np.float32]:
    """Rows like those of a ViT: some directions matter much, most matter little."""
    scale = np.arange(1, width + 1) ** -0.5
    drawn: NDArray[np.float64] = np.random.default_rng(seed).normal(size=(count, width)) * scale
    return drawn.astype(np.float32)
