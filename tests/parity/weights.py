"""Weights from their names and shapes alone, so that a fixture need not hold them."""

import math
from collections.abc import Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def weight(name: str, shape: Sequence[int]) -> Array:
    """What a parameter of this name and shape holds: nothing idle, nothing that blows up.

    Patches, tokens and positions are small, as in trained models: there a wrong `eps` shows.
    """
    x = noise(f"{name} {tuple(shape)}", shape)
    if len(shape) == 1:  # a bias; or a norm or layer scale, near 1
        x = 0.2 * x if name.endswith("bias") else 1 + 0.2 * x
        # ends a branch of a ResNet: at 1, rounding in float32 grows to 7e-5 over 50 layers
        return 0.3 * x if "norm3" in name else x
    if shape[0] == 1:  # tokens and positions
        return 0.1 * x
    spread = math.sqrt(3 / math.prod(shape[1:]))  # keeps the variance from layer to layer
    return (0.1 * spread if len(shape) == 4 else spread) * x


def image(seed: int, shape: Sequence[int]) -> Array:
    """A batch of images with mean 0 and variance 1."""
    return math.sqrt(3) * noise(f"image {seed}", shape)


def noise(seed: str, shape: Sequence[int]) -> Array:
    """Numbers spread evenly over [-1, 1), to the last bit the same on every machine.

    NumPy promises that for the raw bits of a generator, not for its distributions.
    """
    number = int.from_bytes(sha256(seed.encode()).digest()[:8], "little")
    bits = np.random.PCG64(number).random_raw(math.prod(shape)) >> np.uint64(40)
    return (bits.astype(np.float32) * 2**-23 - 1).reshape(shape)
