"""A lower bound for the time of a ViT: its matrix multiplications and nothing else."""

from collections.abc import Callable
from functools import partial

import torch

from vitrail.model.config import ViTConfig

MATMULS = "matmuls"  # the contender's name
Matmul = tuple[int, int, int, int]  # batch size, rows, inner dimension, columns


def forward_matmuls(config: ViTConfig, batch: int) -> list[Matmul]:
    """Every matrix multiplication of a forward pass, in order."""
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


def backward_matmuls(matmul: Matmul) -> list[Matmul]:
    """The two multiplications that compute the gradients of both factors."""
    count, rows, inner, columns = matmul
    return [(count, rows, columns, inner), (count, inner, rows, columns)]


def prepare_matmuls(config: ViTConfig, batch: int, training: bool = False) -> Callable[[], None]:
    """Returns a task that multiplies matrices of the model's shapes."""
    matmuls = forward_matmuls(config, batch)
    if training:
        matmuls += [gradient for matmul in matmuls for gradient in backward_matmuls(matmul)]
        matmuls.remove(backward_matmuls(matmuls[0])[0])  # the pixels need no gradient
    operations = {matmul: prepare_matmul(*matmul) for matmul in set(matmuls)}

    def run() -> None:
        for matmul in matmuls:
            operations[matmul]()

    return run


def prepare_matmul(count: int, rows: int, inner: int, columns: int) -> Callable[[], object]:
    """The right factor is stored by columns, as `nn.Linear` stores its weights."""
    left, right = torch.randn(count, rows, inner), torch.randn(count, columns, inner)
    out = torch.empty(count, rows, columns)
    if count == 1:
        return partial(torch.mm, left[0], right[0].mT, out=out[0])
    return partial(torch.bmm, left, right.mT, out=out)
