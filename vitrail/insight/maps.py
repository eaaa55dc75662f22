"""Attention maps of any model: exact, only the requested rows, in bounded memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Literal

import torch
from torch import Tensor

from vitrail.arguments import check_arguments
from vitrail.errors import UserError
from vitrail.evaluation.loop import eval_mode
from vitrail.model.attention import Attention
from vitrail.model.block import Block
from vitrail.model.vit import ViT

Indices = int | Sequence[int]
Rows = Literal["cls", "dist", "mean", "all"] | Indices

CHUNK = 2**24  # attention weights computed at a time: 64 MB, and twice that for their softmax


@check_arguments
def attention(
    model: ViT,
    images: Tensor,
    layers: Indices | None = None,
    heads: Indices | None = None,
    rows: Rows | None = None,
) -> list[Tensor]:
    """The attention weights of each layer, of shape (B, heads, rows, N): the maps that papers show.

    `layers` and `heads` are indices, negative ones counted from the end; None is all of them.
    `rows` are the query tokens: "cls" or "dist", the tokens that a head reads; "mean", the average
    over all patches (one row); "all" tokens; or indices of patches in reading order.
    None is "cls", or "mean" for a model without [CLS].
    Columns are all tokens, prefix tokens included, so that every row sums to 1.

    >>> import torch, vitrail
    >>> config = vitrail.ViTConfig(image=32, patch=8, width=48, depth=2, heads=3)
    >>> maps = vitrail.attention(vitrail.ViT(config), torch.rand(1, 3, 32, 32))
    >>> len(maps), maps[0].shape  # 2 layers; 3 heads, [CLS] attends to [CLS] and 16 patches
    (2, torch.Size([1, 3, 1, 17]))
    """
    rows = default_rows(model) if rows is None else rows
    queries = query_tokens(model, images, rows)
    wanted = resolve_indices(layers, len(model.blocks), "layers")
    selected = resolve_indices(heads, model.config.heads, "heads")
    maps = {}
    with eval_mode(model), torch.no_grad():
        for number, layer in zip(
            range(max(wanted) + 1), iterate_layers(model, images), strict=False
        ):
            if number in wanted:
                chunks = layer.weights(queries, selected)
                maps[number] = mean_row(chunks) if rows == "mean" else concatenate_rows(chunks)
    return [check_finite(maps[number], model, images) for number in wanted]


def pool_attention(model: ViT, images: Tensor) -> Tensor:
    """The weights of attention pooling, for each head and patch: (B, h, 1, P)."""
    if model.attn_pool is None:
        raise UserError(
            f'this model has pool "{model.config.pool}", not "map"; use `vitrail.attention` instead'
        )
    with eval_mode(model), torch.no_grad():
        patches = model.encode(images)[:, model.config.prefix :]  # (B, P, D)
        weights: Tensor = model.attn_pool.weights(model.norm(patches))  # (B, h, 1, P)
    return check_finite(weights, model, images)


def patch_grid(model: ViT, maps: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
    """Drops the columns of prefix tokens and restores the grid: (..., N) to (..., rows, columns).

    `grid` is `model.grid(images)`; by default, that of the model's own image size.
    """
    rows, columns = model.config.grid if grid is None else grid
    patches, tokens = rows * columns, maps.shape[-1]
    if tokens not in (patches, patches + model.config.prefix):
        raise UserError(
            f"maps of {tokens} tokens do not fit a grid of {rows} x {columns} patches; "
            f"give the grid of their images: model.grid(images)"
        )
    grids: Tensor = maps[..., tokens - patches :].unflatten(-1, (rows, columns))
    return grids


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """The attention module of one layer with its input."""

    attention: Attention
    tokens: Tensor  # (B, N, D), after the block's first norm
    rope: Tensor | None

    def weights(
        self, queries: Sequence[int] | None = None, heads: Sequence[int] | None = None
    ) -> Iterator[Tensor]:
        """The attention weights of all rows or of these, a chunk of rows at a time."""
        images, tokens, _ = self.tokens.shape
        queries = range(tokens) if queries is None else queries
        count = self.attention.heads if heads is None else len(heads)
        step = max(1, CHUNK // (images * count * tokens))
        for start in range(0, len(queries), step):
            rows = list(queries[start : start + step])
            yield self.attention.weights(self.tokens, heads, rows, rope=self.rope)


def iterate_layers(model: ViT, images: Tensor) -> Iterator[LayerAttention]:
    """The attention of each layer; a block runs only when the next layer is requested."""
    x, rope = model.embed(images)
    for block in model.blocks:
        assert isinstance(block, Block)
        yield LayerAttention(attention=block.attn, tokens=block.norm1(x), rope=rope)
        x = block(x, rope)  # (B, N, D)


def default_rows(model: ViT) -> Rows:
    return "cls" if model.config.has_cls else "mean"


def query_tokens(model: ViT, images: Tensor, rows: Rows) -> Sequence[int]:
    """Indices of the query tokens among all tokens."""
    config = model.config
    height, width = model.grid(images)
    patches = range(config.prefix, config.prefix + height * width)
    if rows == "all":
        return range(patches.stop)
    if rows == "mean":
        return patches
    if isinstance(rows, str):
        available = {"cls": config.has_cls, "dist": config.distilled}
        if not available.get(rows, False):
            names = [*(name for name in available if available[name]), "mean", "all"]
            raise UserError(
                f'this model has no rows "{rows}"; give {", ".join(names)} or patch indices'
            )
        return [0 if rows == "cls" else 1]
    return [patches[number] for number in resolve_indices(rows, len(patches), "patches")]


def resolve_indices(numbers: Indices | None, count: int, what: str) -> Sequence[int]:
    """Indices counted from 0, where negative ones count from the end; None is all of them."""
    if numbers is None:
        return range(count)
    given = [index(n) for n in ([numbers] if isinstance(numbers, int) else numbers)]
    if not given or not all(-count <= number < count for number in given):
        raise UserError(
            f"no such {what}: {given}; give indices from 0 to {count - 1}, or from -1 down"
        )
    return [number % count for number in given]


def concatenate_rows(chunks: Iterator[Tensor]) -> Tensor:
    first, *rest = chunks
    return torch.cat([first, *rest], dim=2) if rest else first


def mean_row(chunks: Iterator[Tensor]) -> Tensor:
    """The mean over the rows of all chunks."""
    first = next(chunks)
    total, rows = first.sum(dim=2, keepdim=True), first.shape[2]
    for chunk in chunks:
        total, rows = total + chunk.sum(dim=2, keepdim=True), rows + chunk.shape[2]
    return total / rows  # (B, heads, 1, N)


def check_finite(result: Tensor, model: ViT, images: Tensor) -> Tensor:
    """The result if all its values are finite; otherwise, an error that names the cause."""
    if result.isfinite().all():
        return result
    for name, weight in model.named_parameters():
        check_finite_weight(weight, name)
    if not images.isfinite().all():
        raise UserError("the images contain NaN or infinity; give finite numbers")
    raise UserError(f"the model overflows in {result.dtype} on these images; use float32")


def check_finite_weight(weight: Tensor, name: str) -> None:
    if not weight.isfinite().all():
        raise UserError(f"the weights contain NaN or infinity in {name}; load other weights")
