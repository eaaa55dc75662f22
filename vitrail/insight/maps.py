"""Attention maps of any model: exact, only the rows asked for, in bounded memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from typing import Literal

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.model.attention import Attention
from vitrail.model.block import Block
from vitrail.model.vit import ViT

Numbers = int | Sequence[int]
Rows = Literal["cls", "dist", "mean", "all"] | Numbers

AT_ONCE = 2**24  # attention weights spelled out at a time: 64 MB, and twice that on the way


def attention(
    model: ViT,
    images: Tensor,
    layers: Numbers | None = None,
    heads: Numbers | None = None,
    rows: Rows | None = None,
) -> list[Tensor]:
    """How much the asking tokens listen to each token: for each layer (B, heads, rows, N).

    `layers` and `heads` are numbers, negative ones counted from the end; None is all of them.
    `rows` are those who ask: "cls" or "dist", which the head reads; "mean", the average patch (one
    row, the mean of the rows of all patches); "all" tokens; or numbers of patches in reading order
    from 0. None is "cls", or "mean" where there is no [CLS].
    Columns are all tokens, those in front of the patches too, so that every row sums to 1.
    """
    rows = usual(model) if rows is None else rows
    asking = queries(model, images, rows)
    wanted = chosen(layers, len(model.blocks), "layers")
    picked = chosen(heads, model.config.heads, "heads")
    found = {}
    with resting(model), torch.no_grad():
        for number, look in zip(range(max(wanted) + 1), walk(model, images), strict=False):
            if number in wanted:
                parts = look.maps(asking, picked)
                found[number] = average(parts) if rows == "mean" else joined(parts)
    return [sound(found[number], model, images) for number in wanted]


def pool_weights(model: ViT, images: Tensor) -> Tensor:
    """How much attention pooling listens to each patch, by each head: (B, h, 1, P)."""
    if model.attn_pool is None:
        raise UserError(
            f'this model pools by "{model.config.pool}", not by attention; ask for its attention'
        )
    with resting(model), torch.no_grad():
        patches = model.encode(images)[:, model.config.prefix :]
        weights: Tensor = model.attn_pool.weights(model.norm(patches))  # (B, h, 1, P)
    return sound(weights, model, images)


def patch_columns(model: ViT, maps: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
    """The columns that are patches, as a picture: (..., N) becomes (..., rows, columns).

    `grid` is that of the images, `model.grid(images)`; by default that of the model.
    """
    rows, columns = model.config.grid if grid is None else grid
    patches, tokens = rows * columns, maps.shape[-1]
    if tokens not in (patches, patches + model.config.prefix):
        raise UserError(
            f"maps of {tokens} tokens do not fit a grid of {rows} x {columns} patches; "
            f"give the grid of their images: model.grid(images)"
        )
    pictures: Tensor = maps[..., tokens - patches :].unflatten(-1, (rows, columns))
    return pictures


@dataclass(frozen=True, kw_only=True)
class Look:
    """One layer's attention and what it was given."""

    attention: Attention
    tokens: Tensor  # (B, N, D), normalised
    rope: Tensor | None

    def maps(
        self, asking: Sequence[int] | None = None, heads: Sequence[int] | None = None
    ) -> Iterator[Tensor]:
        """The attention of all rows or of these, a few rows at a time."""
        images, tokens, _ = self.tokens.shape
        asking = range(tokens) if asking is None else asking
        count = self.attention.heads if heads is None else len(heads)
        few = max(1, AT_ONCE // (images * count * tokens))
        for start in range(0, len(asking), few):
            rows = list(asking[start : start + few])
            yield self.attention.weights(self.tokens, heads, rows, rope=self.rope)


def walk(model: ViT, images: Tensor) -> Iterator[Look]:
    """Layer by layer, what its attention is given; a block runs when the next one is asked for."""
    x, rope = model.embed(images)
    for block in model.blocks:
        assert isinstance(block, Block)
        yield Look(attention=block.attn, tokens=block.norm1(x), rope=rope)
        x = block(x, rope)


@contextmanager
def resting(model: ViT) -> Iterator[None]:
    """Evaluation mode; afterwards every module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def usual(model: ViT) -> Rows:
    return "cls" if model.config.pool == "cls" else "mean"


def queries(model: ViT, images: Tensor, rows: Rows) -> Sequence[int]:
    """Numbers of the tokens that ask."""
    config = model.config
    height, width = model.grid(images)
    patches = range(config.prefix, config.prefix + height * width)
    if rows == "all":
        return range(patches.stop)
    if rows == "mean":
        return patches
    if isinstance(rows, str):
        there = {"cls": config.pool == "cls", "dist": config.distilled}
        if not there.get(rows, False):
            known = [*(name for name in there if there[name]), "mean", "all"]
            raise UserError(
                f'this model has no rows "{rows}"; ask for {", ".join(known)} or patch numbers'
            )
        return [0 if rows == "cls" else 1]
    return [patches[number] for number in chosen(rows, len(patches), "patches")]


def chosen(numbers: Numbers | None, count: int, what: str) -> Sequence[int]:
    """Numbers counted from the start, all of them by default."""
    if numbers is None:
        return range(count)
    asked = [index(n) for n in ([numbers] if isinstance(numbers, int) else numbers)]
    if not asked or not all(-count <= number < count for number in asked):
        raise UserError(
            f"no such {what}: {asked}; give numbers from 0 to {count - 1}, or from -1 down"
        )
    return [number % count for number in asked]


def joined(parts: Iterator[Tensor]) -> Tensor:
    first, *rest = parts
    return torch.cat([first, *rest], dim=2) if rest else first


def average(parts: Iterator[Tensor]) -> Tensor:
    """The mean row of all parts."""
    first = next(parts)
    total, rows = first.sum(dim=2, keepdim=True), first.shape[2]
    for part in parts:
        total, rows = total + part.sum(dim=2, keepdim=True), rows + part.shape[2]
    return total / rows


def sound(result: Tensor, model: ViT, images: Tensor) -> Tensor:
    """The result, if all of it is numbers; else the reason why it is not."""
    if result.isfinite().all():
        return result
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise UserError(f"the weights hold NaN or infinity in {name}; load other weights")
    if not images.isfinite().all():
        raise UserError("the images hold NaN or infinity; give finite numbers")
    raise UserError(f"the model overflows in {result.dtype} on these images; use float32")
