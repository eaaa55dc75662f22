"""Nearest neighbours: seconds of Vitrail's search and of scikit-learn's, and whether they agree."""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

ROUNDS = 5
METRICS = {"cosine": "cosine", "euclid": "euclidean"}  # ours, and what scikit-learn calls it


def main() -> None:
    import torch
    from sklearn.neighbors import NearestNeighbors

    from vitrail.heads.knn import Search

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--asked", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    among, x = features(asked.images, 0), features(asked.asked, 1)
    rows = []
    for ours, theirs in METRICS.items():
        search = Search(among, ours)  # type: ignore[arg-type]
        peer = NearestNeighbors(n_neighbors=10, metric=theirs, algorithm="brute").fit(among)
        seconds: list[list[float]] = [[], []]
        for _ in range(ROUNDS):  # one after the other, so that noise hits both
            found, own = timed(lambda search=search: search(x, 10)[1])
            wanted, other = timed(lambda peer=peer: peer.kneighbors(x)[1])
            seconds[0].append(own)
            seconds[1].append(other)
        own, other = min(seconds[0]), min(seconds[1])
        same = float((found == wanted).mean())
        row = {"metric": ours, "ours": own, "sklearn": other, "ratio": other / own, "same": same}
        rows.append(row)
    if asked.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(
            f"{row['metric']:<8} vitrail {row['ours']:.2f} s, scikit-learn {row['sklearn']:.2f} s: "
            f"{row['ratio']:.1f} times as fast, {row['same']:.2%} of the neighbours the same"
        )


def features(count: int, seed: int, width: int = 192) -> np.ndarray:
    """Rows like those of a ViT: some directions matter much, most matter little."""
    scale = np.arange(1, width + 1) ** -0.5
    drawn: np.ndarray = np.random.default_rng(seed).normal(size=(count, width)) * scale
    return drawn.astype(np.float32)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Processor seconds of all threads: other programs on the machine do not count."""
    start = time.process_time()
    answer = work()
    return answer, time.process_time() - start


if __name__ == "__main__":
    main()
