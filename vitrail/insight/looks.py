"""Where every patch of one image looks, packed small enough for a page."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.insight.explain import halved
from vitrail.insight.maps import Look, resting, walk
from vitrail.model.vit import ViT

ROOM = 3_000_000  # bytes for one image: 4 MB as text in a page
CELLS = 600  # squares of an image at most; larger grids are gathered into these

MEAN = -1  # instead of a head: the mean of all heads of the layer
FLOW = -1  # instead of a layer: rollout, all layers together


@dataclass(frozen=True, kw_only=True)
class Looks:
    """Maps of attention between cells, each row in bytes of its own largest share.

    The first row of a map is the reader's, [CLS] or the average patch; then come the cells.
    A cell is a patch, or `gathered` x `gathered` of them where there would be too many.
    """

    wanted: int  # layers that were asked for
    maps: tuple[tuple[int, int], ...]  # layer and head of each map; MEAN and FLOW see above
    cells: tuple[int, int]  # rows and columns
    gathered: int  # patches along the side of a cell
    shares: NDArray[np.uint8]  # (maps, 1 + cells, cells), 255 is the largest of its row
    most: NDArray[np.float32]  # (maps, 1 + cells), the largest share of each row
    front: NDArray[np.float32]  # (maps, 1 + cells), the share of tokens in front of the patches

    def share(self, layer: int, head: int) -> NDArray[np.float32]:
        """One map as shares of attention, to 1/255 of the largest of each row."""
        number = self.maps.index((layer, head))
        shares: NDArray[np.float32] = self.shares[number] * (self.most[number][:, None] / 255)
        return shares


def looks(
    model: ViT, x: Tensor, layers: Sequence[int], heads: Sequence[int], room: int = ROOM
) -> Looks:
    """What fits into `room` bytes of one image: rollout, means of heads, then single heads."""
    rows, columns = model.grid(x)
    gathered = 1
    while -(-rows // gathered) * -(-columns // gathered) > CELLS:
        gathered += 1
    cells = -(-rows // gathered), -(-columns // gathered)
    count = cells[0] * cells[1]
    wanted = choose(layers, heads, room // ((1 + count) * count))
    cell = cell_of(model.config.prefix, (rows, columns), gathered).to(x.device)
    found: dict[tuple[int, int], Tensor] = {}
    with resting(model), torch.no_grad():
        flow: Tensor | None = None
        for number, look in enumerate(walk(model, x)):
            own = [head for layer, head in wanted if layer == number and head != MEAN]
            mean, given = layer_of(look, own, cell)
            flow = halved(mean) if flow is None else halved(mean) @ flow
            for head, one in zip(own, given, strict=True):
                found[number, head] = asked(one, cell, model)
            if (number, MEAN) in wanted:
                found[number, MEAN] = asked(added(mean, cell), cell, model)
        assert flow is not None
        found[FLOW, MEAN] = asked(added(flow, cell), cell, model)
    return pack({name: found[name] for name in wanted}, len(layers), cells, gathered)


def layer_of(look: Look, heads: Sequence[int], cell: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of all heads (N, N), and what some heads give to each cell, (heads, N, cells)."""
    means, given = [], []
    for part in look.maps():  # a few rows at a time: of all heads at once there may be gigabytes
        means.append(part[0].mean(dim=0))
        given.append(added(part[0, list(heads)], cell))
    return torch.cat(means), torch.cat(given, dim=1)


def choose(layers: Sequence[int], heads: Sequence[int], room: int) -> list[tuple[int, int]]:
    """Which maps to keep of those wanted: as many layers, and of them all heads, as there is room.

    Where layers must be left out, those kept are spread evenly, the last among them.
    """
    kept = spread(layers, max(1, room - 1))
    whole = spread(kept, max(0, room - 1 - len(kept)) // len(heads))
    names = [(FLOW, MEAN)]
    for layer in kept:
        names.append((layer, MEAN))
        names += [(layer, head) for head in heads if layer in whole]
    return names


def spread(numbers: Sequence[int], most: int) -> list[int]:
    """At most so many of the numbers, evenly spread; always the last one."""
    if most >= len(numbers):
        return list(numbers)
    places = np.linspace(len(numbers) - 1, 0, most + (most == 1))[:most].round().astype(int)
    return [numbers[place] for place in sorted(places.tolist())]


def cell_of(prefix: int, grid: tuple[int, int], gathered: int) -> Tensor:
    """For each token the number of its cell; 0 stands for all tokens in front."""
    rows, columns = (torch.arange(side) // gathered for side in grid)
    across = int(columns[-1]) + 1
    cells = 1 + rows[:, None] * across + columns
    return torch.cat([torch.zeros(prefix, dtype=torch.int64), cells.flatten()])


def added(attention: Tensor, cell: Tensor) -> Tensor:
    """What is given to the tokens of a cell, together: (..., N) becomes (..., cells)."""
    count = int(cell.max()) + 1
    return attention.new_zeros(*attention.shape[:-1], count).index_add_(-1, cell, attention)


def asked(given: Tensor, cell: Tensor, model: ViT) -> Tensor:
    """What the tokens of a cell ask for, on average: (N, cells) becomes (cells, cells).

    Row 0 is the reader: [CLS], or the average patch of a model without it.
    """
    count = torch.bincount(cell, minlength=given.shape[1]).clamp(min=1)
    mean = given.new_zeros(len(count), len(count)).index_add_(0, cell, given) / count[:, None]
    cls = model.config.pool == "cls"
    mean[0] = given[0] if cls else given[model.config.prefix :].mean(dim=0)
    return mean


def pack(
    found: dict[tuple[int, int], Tensor], wanted: int, cells: tuple[int, int], gathered: int
) -> Looks:
    stacked = torch.stack(list(found.values())).float().cpu().numpy()
    front, given = stacked[:, :, 0], stacked[:, :, 1:]
    most = given.max(axis=2)
    shares = np.rint(given / np.maximum(most, np.float32(1e-30))[:, :, None] * 255)
    return Looks(
        wanted=wanted,
        maps=tuple(found),
        cells=cells,
        gathered=gathered,
        shares=shares.astype(np.uint8),
        most=most,
        front=np.ascontiguousarray(front),
    )
