"""Exact nearest neighbours in torch: scikit-learn's results, in less time."""

import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.errors import UserError

Metric = Literal["euclidean", "cosine"]

CHUNK_DISTANCES = 1 << 23  # distances computed at once: 32 MiB in float32
EXTRA_CANDIDATES = 6  # candidates beyond k: float32 may rank some of them in the wrong order
MAX_BLOCK = 64  # distances, at most, that `select_smallest` first reduces to their minimum
MIN_BLOCK = 4  # with smaller blocks, a plain top-k is faster
TINY_NORM = 1e-300  # avoids division by zero for rows of norm 0


class NearestNeighbours:
    """Majority vote of the `k` nearest training rows, like scikit-learn's KNeighborsClassifier.

    Ties go to the earlier row, and among classes to the lower index.
    """

    def __init__(self, k: int = 5, metric: Metric = "euclidean"):
        self.k, self.metric = k, metric
        self._search: NeighbourSearch | None = None

    def fit(self, x: NDArray[Any], y: NDArray[Any]) -> "NearestNeighbours":
        if not 1 <= self.k <= len(x):
            raise UserError(
                f"k is {self.k}; give an integer from 1 to {len(x)}, the number of images"
            )
        self._search = None
        self.classes_, self.labels_ = np.unique(y, return_inverse=True)
        self.rows_ = np.ascontiguousarray(x, np.float32)
        return self

    def predict_proba(self, x: NDArray[Any]) -> NDArray[np.float64]:
        """The fraction of the votes for each class."""
        if self._search is None:
            self._search = NeighbourSearch(self.rows_, self.metric)
        neighbours = self._search.kneighbor_sets(x, self.k)
        return count_votes(self.labels_[neighbours], len(self.classes_)) / self.k

    def predict(self, x: NDArray[Any]) -> NDArray[Any]:
        labels: NDArray[Any] = self.classes_[self.predict_proba(x).argmax(axis=1)]
        return labels

    def __getstate__(self) -> dict[str, Any]:
        """The state without the search index, which is built again when it is needed."""
        return {name: value for name, value in vars(self).items() if name != "_search"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._search = None


def count_votes(labels: NDArray[np.int64], classes: int) -> NDArray[np.float64]:
    """How often each class (column) occurs among the labels of each row."""
    rows = np.arange(len(labels))[:, None]
    counts = np.bincount((rows * classes + labels).ravel(), minlength=len(labels) * classes)
    return counts.reshape(-1, classes).astype(np.float64)


class NeighbourSearch:
    """Brute-force search among `rows`, exact including ties.

    It selects candidates in float32 and ranks them in float64. Where the rounding error of float32
    could have excluded a true neighbour, it computes all distances of that query in float64.
    """

    def __init__(self, rows: NDArray[Any], metric: Metric = "euclidean"):
        self.metric = metric
        self.rows = to_float64(rows, metric)
        self.mean = self.rows.mean(dim=0)  # float32 loses the least precision around the mean
        self.centred = self.rows - self.mean
        self.squared_norms = self.centred.square().sum(dim=1)
        self.max_norm = float(self.squared_norms.max().sqrt())
        self.centred32, self.squared_norms32 = self.centred.float(), self.squared_norms.float()

    def kneighbors(self, x: NDArray[Any], k: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Distances and indices of the `k` nearest rows of each query in `x`, nearest first."""
        squares = torch.empty(len(x), k, dtype=torch.float64)
        index = torch.empty(len(x), k, dtype=torch.int64)
        for part, queries, buffer in self.chunks(x):
            bound = self.approximate(queries, buffer)
            squares[part], index[part] = self.refine(queries, buffer, bound, k)
        distances = squares / 2 if self.metric == "cosine" else squares.sqrt()
        return distances.numpy(), index.numpy()

    def kneighbor_sets(self, x: NDArray[Any], k: int) -> NDArray[np.int64]:
        """Indices of the `k` nearest rows of each query in `x`, in any order.

        Faster than `kneighbors`: it refines only queries whose neighbours k and k + 1 are closer
        to each other than the rounding error of float32.
        """
        index = torch.empty(len(x), k, dtype=torch.int64)
        for part, queries, buffer in self.chunks(x):
            bound = self.approximate(queries, buffer)
            values, candidates = select_smallest(buffer, min(k + 1, len(self.rows)))
            index[part] = candidates[:, :k]
            if k < len(self.rows):
                gap = values[:, k].double() - values[:, k - 1]
                ambiguous = (gap <= 2 * bound).nonzero()[:, 0]
                if len(ambiguous):
                    _, exact = self.refine(
                        queries[ambiguous], buffer[ambiguous], bound[ambiguous], k
                    )
                    index[part.start + ambiguous] = exact
        return index.numpy()

    def chunks(self, x: NDArray[Any]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Slices of the queries, the queries, and a buffer for their distances.

        All chunks share one buffer: allocating one per chunk would take a fifth of the time.
        """
        queries, size = to_float64(x, self.metric), max(1, CHUNK_DISTANCES // len(self.rows))
        buffer = torch.empty(min(size, len(x)), len(self.rows))
        for start in range(0, len(x), size):
            part = slice(start, start + size)
            yield part, queries[part], buffer[: len(queries[part])]

    def approximate(self, x: Tensor, buffer: Tensor) -> Tensor:
        """Writes |x - y|^2 - |x|^2 for all rows y to `buffer`, computed in float32.

        Returns a bound of the rounding error for each query.
        """
        centred = x - self.mean
        torch.addmm(self.squared_norms32, centred.float(), self.centred32.T, alpha=-2, out=buffer)
        scale: Tensor = (centred.norm(dim=1) + self.max_norm).square()
        return scale * rounding_error(x.shape[1], torch.float32)

    def refine(
        self, x: Tensor, approximate: Tensor, bound: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        """Exact squared distances and indices of the `k` nearest rows, nearest first."""
        values, candidates = select_smallest(approximate, min(k + EXTRA_CANDIDATES, len(self.rows)))
        squares, index = self.rank_candidates(x, candidates, k)
        if candidates.shape[1] < len(self.rows):
            centred = x - self.mean
            limit = values[:, -1].double() + centred.square().sum(dim=1)
            ambiguous = squares[:, -1] >= limit - bound
            for row in ambiguous.nonzero()[:, 0].tolist():
                squares[row], index[row] = self.search_float64(x[row], centred[row], k)
        return squares, index

    def rank_candidates(self, x: Tensor, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The `k` nearest candidates, by distance, then by index."""
        candidates = candidates.sort(dim=1).values
        differences = self.rows[candidates].sub_(x[:, None])
        squares, order = differences.square_().sum(dim=2).sort(dim=1, stable=True)
        return squares[:, :k], candidates.gather(1, order[:, :k])

    def search_float64(self, x: Tensor, centred: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The `k` nearest rows of one query, from all distances in float64."""
        approximate = self.squared_norms - 2 * (self.centred @ centred)
        scale = (float(centred.norm()) + self.max_norm) ** 2
        bound = rounding_error(len(x), torch.float64) * scale
        limit = approximate.kthvalue(k).values + 2 * bound
        candidates = (approximate <= limit).nonzero()[:, 0]
        squares, index = self.rank_candidates(x[None], candidates[None], k)
        return squares[0], index[0]


def to_float64(rows: NDArray[Any], metric: Metric) -> Tensor:
    """Rows in float64; for the cosine metric with norm 1, where the distance is |x - y|^2 / 2."""
    x = torch.from_numpy(np.asarray(rows, np.float64))
    if metric == "cosine":
        x = x / x.norm(dim=1, keepdim=True).clamp(min=TINY_NORM)
    return x


def rounding_error(width: int, dtype: torch.dtype) -> float:
    """The largest relative error of a sum of `width` products (Higham, 2002, section 3.1)."""
    return (width + 4) * torch.finfo(dtype).eps


def select_smallest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` smallest values of each row, in ascending order, and their column indices.

    These values are in the `count` blocks with the smallest minima, so a top-k over the minima
    leaves few values to compare.
    """
    width = values.shape[1]
    block = min(MAX_BLOCK, math.isqrt(width // count))
    if block < MIN_BLOCK:
        top = values.topk(count, dim=1, largest=False)
        return top.values, top.indices
    blocks = width // block
    divisible = blocks * block
    # a block has every `blocks`-th column, so that the minima of all blocks are computed together
    minima = values[:, :divisible].unflatten(1, (block, blocks)).amin(dim=1)
    chosen = minima.topk(count, dim=1, largest=False).indices
    inside = chosen[:, :, None] + blocks * torch.arange(block)
    rest = torch.arange(divisible, width).expand(len(values), -1)
    candidates = torch.cat([inside.flatten(1), rest], dim=1)
    smallest, order = values.gather(1, candidates).topk(count, dim=1, largest=False)
    return smallest, candidates.gather(1, order)
