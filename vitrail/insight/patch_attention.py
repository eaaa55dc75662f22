"""Attention from every patch of one image, quantized to bytes so that it fits on a page."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.evaluation.loop import eval_mode
from vitrail.insight.explain import add_residual
from vitrail.insight.maps import LayerAttention, iterate_layers
from vitrail.model.vit import ViT

MAX_BYTES = 3_000_000  # of quantized maps for one image: 4 MB as base64
MAX_CELLS = 600  # of an image; patches of larger grids are merged into cells

MEAN = -1  # as a head: the mean over all heads of the layer
ROLLOUT = -1  # as a layer: rollout through all layers
SIMILARITY = -2  # as a layer: similarity of the features, of backbones without a head

MapName = tuple[int, int]  # layer and head


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PatchAttention:
    """Attention maps between cells, each row scaled by its own maximum to 8 bits.

    The first row of a map belongs to [CLS], or to the average patch of a model without it; then
    come the cells in reading order. A cell is a patch, or `cell_side` x `cell_side` patches.
    """

    requested_layers: int  # how many; fewer may fit
    maps: tuple[MapName, ...]  # layer and head of each map, where MEAN and ROLLOUT are possible
    grid: tuple[int, int]  # rows and columns of cells
    cell_side: int  # patches along the side of a cell
    levels: NDArray[np.uint8]  # (maps, 1 + cells, cells), 255 is the maximum of its row
    row_max: NDArray[np.float32]  # (maps, 1 + cells), the maximum of each row
    prefix: NDArray[np.float32]  # (maps, 1 + cells), attention to the prefix tokens

    def weights(self, layer: int, head: int) -> NDArray[np.float32]:
        """One map as attention weights, to 1/255 of the maximum of each row."""
        number = self.maps.index((layer, head))
        weights: NDArray[np.float32] = self.levels[number] * (self.row_max[number][:, None] / 255)
        return weights


def quantize_attention(
    model: ViT, x: Tensor, layers: Sequence[int], heads: Sequence[int], max_bytes: int = MAX_BYTES
) -> PatchAttention:
    """The maps of one image that fit into `max_bytes`: rollout, means over heads, single heads."""
    rows, columns = model.grid(x)
    side = 1
    while -(-rows // side) * -(-columns // side) > MAX_CELLS:
        side += 1
    grid = -(-rows // side), -(-columns // side)
    count = grid[0] * grid[1]
    names = choose_maps(layers, heads, max_bytes // ((1 + count) * count))
    cells = cell_indices(model.config.prefix, (rows, columns), side).to(x.device)  # (N)
    maps: dict[MapName, Tensor] = {}
    with eval_mode(model), torch.no_grad():
        flow: Tensor | None = None
        for number, layer in enumerate(iterate_layers(model, x)):
            own = [head for name, head in names if name == number and head != MEAN]
            mean, single = fuse_and_merge(layer, own, cells)
            step = add_residual(mean[None])[0]  # (N, N)
            flow = step if flow is None else step @ flow
            for head, columns_merged in zip(own, single, strict=True):
                maps[number, head] = merge_rows(columns_merged, cells, model)
            if (number, MEAN) in names:
                maps[number, MEAN] = merge_rows(merge_columns(mean, cells), cells, model)
        assert flow is not None
        maps[ROLLOUT, MEAN] = merge_rows(merge_columns(flow, cells), cells, model)
    return quantize_maps({name: maps[name] for name in names}, len(layers), grid, side)


def fuse_and_merge(
    layer: LayerAttention, heads: Sequence[int], cells: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean over all heads, and some heads with merged columns."""
    means, merged = [], []
    for chunk in layer.weights():  # a chunk of rows: all heads at once may need gigabytes
        means.append(chunk[0].mean(dim=0))
        merged.append(merge_columns(chunk[0, list(heads)], cells))
    mean = torch.cat(means)  # (N, N)
    single = torch.cat(merged, dim=1)  # (heads, N, cells)
    return mean, single


def choose_maps(layers: Sequence[int], heads: Sequence[int], count: int) -> list[MapName]:
    """At most `count` maps: rollout, the mean of as many layers as fit, then all heads of some.

    Layers that do not fit are dropped evenly; the last layer stays.
    """
    with_mean = spaced_subset(layers, max(1, count - 1))
    with_heads = spaced_subset(with_mean, max(0, count - 1 - len(with_mean)) // len(heads))
    names = [(ROLLOUT, MEAN)]
    for layer in with_mean:
        names.append((layer, MEAN))
        names += [(layer, head) for head in heads if layer in with_heads]
    return names


def spaced_subset(numbers: Sequence[int], count: int) -> list[int]:
    """At most `count` of the numbers, evenly spaced; the last one is always among them."""
    if count >= len(numbers):
        return list(numbers)
    indices = np.linspace(len(numbers) - 1, 0, count + (count == 1))[:count].round().astype(int)
    return [numbers[index] for index in sorted(indices.tolist())]


def cell_indices(prefix: int, grid: tuple[int, int], side: int) -> Tensor:
    """The cell of each token; all prefix tokens share cell 0."""
    rows, columns = (torch.arange(length) // side for length in grid)
    across = int(columns[-1]) + 1
    cells = 1 + rows[:, None] * across + columns  # (rows, columns)
    return torch.cat([torch.zeros(prefix, dtype=torch.int64), cells.flatten()])  # (N)


def merge_columns(attention: Tensor, cells: Tensor) -> Tensor:
    """Attention to a cell is the sum over its tokens: (..., N) to (..., cells)."""
    count = int(cells.max()) + 1
    return attention.new_zeros(*attention.shape[:-1], count).index_add_(-1, cells, attention)


def merge_rows(attention: Tensor, cells: Tensor, model: ViT) -> Tensor:  # (N, cells)
    """Attention from a cell is the mean over its tokens; row 0 is [CLS], or the average patch."""
    count = torch.bincount(cells, minlength=attention.shape[1]).clamp(min=1)  # (cells)
    total = attention.new_zeros(len(count), len(count)).index_add_(0, cells, attention)
    mean = total / count[:, None]  # (cells, cells)
    has_cls = model.config.has_cls
    mean[0] = attention[0] if has_cls else attention[model.config.prefix :].mean(dim=0)
    return mean


def quantize_maps(
    maps: dict[MapName, Tensor], requested_layers: int, grid: tuple[int, int], cell_side: int
) -> PatchAttention:
    stacked = torch.stack(list(maps.values())).float().cpu().numpy()  # (maps, 1 + cells, 1 + cells)
    prefix, weights = stacked[:, :, 0], stacked[:, :, 1:]
    row_max = weights.max(axis=2)  # (maps, 1 + cells)
    levels = np.rint(weights / np.maximum(row_max, np.float32(1e-30))[:, :, None] * 255)
    return PatchAttention(
        requested_layers=requested_layers,
        maps=tuple(maps),
        grid=grid,
        cell_side=cell_side,
        levels=levels.astype(np.uint8),
        row_max=row_max,
        prefix=np.ascontiguousarray(prefix),
    )
