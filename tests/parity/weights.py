"""Random weights that depend only on their names and shapes, so that fixtures do not store them."""

import math
from collections.abc import Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def random_weight(name: str, shape: Sequence[int]) -> Array:
    """Values for a parameter of this name and shape: every one matters, and none overflows.

    Patch projection, tokens and positions are small, as in trained models, so a wrong `eps` shows.
    """
    x = uniform_noise(f"{name} {tuple(shape)}", shape)
    if len(shape) == 1:  # a bias; or a norm or layer scale, near 1
        x = 0.2 * x if name.endswith("bias") else 1 + 0.2 * x
        # the last norm of a ResNet branch: at 1, float32 rounding grows to 7e-5 over 50 layers
        return 0.3 * x if "norm3" in name else x
    if not shape:  # CLIP's temperature
        return np.ones((), np.float32)
    if shape[0] == 1:  # tokens and positions
        return 0.1 * x
    scale = math.sqrt(3 / math.prod(shape[1:]))  # keeps the variance from layer to layer
    return (0.1 * scale if len(shape) == 4 else scale) * x


def random_image(seed: int, shape: Sequence[int]) -> Array:
    """A batch of images with mean 0 and variance 1."""
    return math.sqrt(3) * uniform_noise(f"image {seed}", shape)


def uniform_noise(seed: str, shape: Sequence[int]) -> Array:
    """Uniform numbers in [-1, 1), identical to the bit on every machine.

    NumPy guarantees that for the raw bits of a generator, not for its distributions.
    """
    number = int.from_bytes(sha256(seed.encode()).digest()[:8], "little")
    bits = np.random.PCG64(number).random_raw(math.prod(shape)) >> np.uint64(40)
    return (bits.astype(np.float32) * 2**-23 - 1).reshape(shape)
