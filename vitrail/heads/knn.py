"""The nearest neighbours of many rows at once: scikit-learn's answers, sooner."""

import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.errors import UserError

Metric = Literal["euclid", "cosine"]

ROOM = 1 << 23  # distances held at once
SPARE = 6  # candidates beyond the wanted ones: those that float32 might put in a wrong order
BLOCK = 64  # distances, at most, of which first only the smallest is looked at


class NearestNeighbours:
    """The vote of the `k` nearest training rows, like KNeighborsClassifier of scikit-learn.

    Of equally near rows the earlier one counts, of equally many votes the lower class.
    """

    def __init__(self, k: int = 5, metric: Metric = "euclid"):
        self.k, self.metric = k, metric
        self._search: Search | None = None

    def fit(self, x: NDArray[Any], y: NDArray[Any]) -> "NearestNeighbours":
        if not 1 <= self.k <= len(x):
            raise UserError(f"k is {self.k}; give a number from 1 to {len(x)}, all images")
        self._search = None
        self.classes_, self.labels_ = np.unique(y, return_inverse=True)
        self.rows_ = np.ascontiguousarray(x, np.float32)
        return self

    def predict_proba(self, x: NDArray[Any]) -> NDArray[np.float64]:
        """The share of the votes for each class."""
        if self._search is None:
            self._search = Search(self.rows_, self.metric)
        near = self._search.among(x, self.k)
        return votes(self.labels_[near], len(self.classes_)) / self.k

    def predict(self, x: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = self.classes_[self.predict_proba(x).argmax(axis=1)]
        return found

    def __getstate__(self) -> dict[str, Any]:
        """What is kept in a file; the rest is made again from it."""
        return {name: value for name, value in vars(self).items() if name != "_search"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._search = None


def votes(labels: NDArray[np.int64], classes: int) -> NDArray[np.float64]:
    """How often each class (across) is among the labels of each row (down)."""
    rows = np.arange(len(labels))[:, None]
    counts = np.bincount((rows * classes + labels).ravel(), minlength=len(labels) * classes)
    return counts.reshape(-1, classes).astype(np.float64)


class Search:
    """Rows made ready to be searched.

    Candidates are found in float32 and put in order in float64. Where float32 might have missed
    one, all distances of that row are computed in float64: the answer is exact, ties included.
    """

    def __init__(self, rows: NDArray[Any], metric: Metric = "euclid"):
        self.metric = metric
        self.rows = prepared(rows, metric)
        self.middle = self.rows.mean(dim=0)  # around it, float32 loses least
        self.moved = self.rows - self.middle
        self.squares = self.moved.square().sum(dim=1)
        self.longest = float(self.squares.max().sqrt())
        self.fast, self.fast_squares = self.moved.float(), self.squares.float()

    def __call__(self, x: NDArray[Any], k: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Distances and positions of the `k` nearest rows for each of `x`, the nearest first."""
        near = torch.empty(len(x), k, dtype=torch.float64)
        index = torch.empty(len(x), k, dtype=torch.int64)
        for part, some, room in self.parts(x):
            near[part], index[part] = self.settled(some, room, self.roughly(some, room), k)
        distances = near / 2 if self.metric == "cosine" else near.sqrt()
        return distances.numpy(), index.numpy()

    def among(self, x: NDArray[Any], k: int) -> NDArray[np.int64]:
        """Positions of the `k` nearest rows for each of `x`, in any order, which is known sooner:
        only where the next one is as near, within what float32 can tell, is more to do."""
        index = torch.empty(len(x), k, dtype=torch.int64)
        for part, some, room in self.parts(x):
            doubt = self.roughly(some, room)
            values, places = smallest(room, min(k + 1, len(self.rows)))
            index[part] = places[:, :k]
            if k < len(self.rows):
                gap = values[:, k].double() - values[:, k - 1]
                unsure = (gap <= 2 * doubt).nonzero()[:, 0]
                if len(unsure):
                    found = self.settled(some[unsure], room[unsure], doubt[unsure], k)
                    index[part.start + unsure] = found[1]
        return index.numpy()

    def parts(self, x: NDArray[Any]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """As many rows at once as there is room for their distances, and this room, which is the
        same for all parts: new memory for each takes a fifth of the time."""
        queries, size = prepared(x, self.metric), max(1, ROOM // len(self.rows))
        room = torch.empty(min(size, len(x)), len(self.rows))
        for start in range(0, len(x), size):
            part = slice(start, start + size)
            yield part, queries[part], room[: len(queries[part])]

    def roughly(self, x: Tensor, room: Tensor) -> Tensor:
        """Fills the room with |x - y|^2 for all rows y, without |x|^2, which is the same for all
        of them, as float32 has it; tells how wrong such a number can be for each of `x`."""
        moved = x - self.middle
        torch.addmm(self.fast_squares, moved.float(), self.fast.T, alpha=-2, out=room)
        reach: Tensor = (moved.norm(dim=1) + self.longest).square()
        return reach * rounding(x.shape[1], torch.float32)

    def settled(self, x: Tensor, rough: Tensor, doubt: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Squared distances and positions in their true order: the best of some candidates."""
        values, places = smallest(rough, min(k + SPARE, len(self.rows)))
        near, index = self.ordered(x, places, k)
        if places.shape[1] < len(self.rows):
            moved = x - self.middle
            limit = values[:, -1].double() + moved.square().sum(dim=1)
            unsure = near[:, -1] >= limit - doubt
            for row in unsure.nonzero()[:, 0].tolist():
                near[row], index[row] = self.exactly(x[row], moved[row], k)
        return near, index

    def ordered(self, x: Tensor, places: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The best of the candidates, by distance, then by position."""
        places = places.sort(dim=1).values
        apart = self.rows[places].sub_(x[:, None])
        near, order = apart.square_().sum(dim=2).sort(dim=1, stable=True)
        return near[:, :k], places.gather(1, order[:, :k])

    def exactly(self, x: Tensor, moved: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """For one row, from every distance that may be among the `k` smallest."""
        rough = self.squares - 2 * (self.moved @ moved)
        doubt = rounding(len(x), torch.float64) * (float(moved.norm()) + self.longest) ** 2
        limit = rough.kthvalue(k).values + 2 * doubt
        near, index = self.ordered(x[None], (rough <= limit).nonzero()[:, 0][None], k)
        return near[0], index[0]


def prepared(rows: NDArray[Any], metric: Metric) -> Tensor:
    """In float64; for cosine distances all of length 1, where half the square is the distance."""
    x = torch.from_numpy(np.asarray(rows, np.float64))
    if metric == "cosine":
        x = x / x.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return x


def rounding(width: int, dtype: torch.dtype) -> float:
    """The largest relative error of a sum of `width` products (Higham, 2002, section 3.1)."""
    return (width + 4) * torch.finfo(dtype).eps


def smallest(rough: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` smallest numbers of each row, in order, and where these stand.

    They lie in the `count` blocks whose smallest number is smallest, so few others are compared.
    """
    width = rough.shape[1]
    block = min(BLOCK, math.isqrt(width // count))
    if block < 4:
        found = rough.topk(count, dim=1, largest=False)
        return found.values, found.indices
    number = width // block
    whole = number * block
    # the numbers of a block stand far apart, so that all blocks are compared at once
    chosen = rough[:, :whole].unflatten(1, (block, number)).amin(dim=1)
    chosen = chosen.topk(count, dim=1, largest=False).indices
    inside = chosen[:, :, None] + number * torch.arange(block)
    rest = torch.arange(whole, width).expand(len(rough), -1)
    candidates = torch.cat([inside.flatten(1), rest], dim=1)
    values, order = rough.gather(1, candidates).topk(count, dim=1, largest=False)
    return values, candidates.gather(1, order)
