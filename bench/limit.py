"""The limit that no ViT can beat: its matrix products alone."""

from collections.abc import Callable
from functools import partial

import torch

from vitrail.model.config import ViTConfig

LIMIT = "limit"  # the contender that is no peer
Product = tuple[int, int, int, int]  # how many, and rows, inner length, columns of each


def products(config: ViTConfig, batch: int) -> list[Product]:
    """Every matrix product of a forward pass, in order."""
    tokens, width, heads = config.tokens, config.width, config.heads
    block = [
        (1, batch * tokens, width, 3 * width),  # queries, keys, values
        (batch * heads, tokens, width // heads, tokens),  # queries times keys
        (batch * heads, tokens, tokens, width // heads),  # attention times values
        (1, batch * tokens, width, width),
        (1, batch * tokens, width, config.hidden),
        (1, batch * tokens, config.hidden, width),
    ]
    patches = (1, batch * config.patches, config.channels * config.patch**2, width)
    return [patches, *block * config.depth, (1, batch, width, config.classes)]


def backward(product: Product) -> list[Product]:
    """The two products that pass the gradient of one on to its factors."""
    count, rows, inner, columns = product
    return [(count, rows, columns, inner), (count, inner, rows, columns)]


def limit(config: ViTConfig, batch: int, training: bool = False) -> Callable[[], None]:
    """A call that multiplies the same matrices, and does nothing else."""
    todo = products(config, batch)
    if training:  # nobody asks for the gradient of the pixels
        todo += [gradient for product in todo for gradient in backward(product)]
        todo.remove(backward(todo[0])[0])
    ready = {product: multiplication(*product) for product in set(todo)}

    def run() -> None:
        for product in todo:
            ready[product]()

    return run


def multiplication(count: int, rows: int, inner: int, columns: int) -> Callable[[], object]:
    """The right factor is stored by columns, as `nn.Linear` stores its weights."""
    left, right = torch.randn(count, rows, inner), torch.randn(count, columns, inner)
    out = torch.empty(count, rows, columns)
    if count == 1:
        return partial(torch.mm, left[0], right[0].mT, out=out[0])
    return partial(torch.bmm, left, right.mT, out=out)
