"""Near-duplicates: a perceptual hash that small changes preserve, and groups of similar hashes."""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Hashes = NDArray[np.uint64]

SIDE = 32  # pixels of the grey image that is hashed
FREQUENCIES = 12  # per axis: enough to contain the 64 lowest 2D frequencies
NOISE = 0.1  # grey levels: a coefficient below this carries no information
MAX_NOISE = 16  # coefficients of 64 that may be noise; an image with more has no reliable hash
# Bits of 64 in which the hashes of near-duplicates may differ. All of 300 photos were matched after
# JPEG compression at quality 30, at a quarter of the size, and with 2 % of each side cropped (205
# with 5 %); different photos were at least 13 bits apart. Of 48 groups in CIFAR-10, 45 were the
# same scene.
MAX_DISTANCE = 6
WINDOW = 256  # neighbours compared in a bucket: bounds the time if many images are very similar


def dct_basis() -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """The rows of a DCT, and the indices of the 64 lowest 2D frequencies except zero."""
    frequency, pixel = np.mgrid[:FREQUENCIES, :SIDE]
    rows = np.cos(np.pi * frequency * (2 * pixel + 1) / (2 * SIDE)) * 2 / SIDE
    pairs = ((i + j, i, j) for i in range(FREQUENCIES) for j in range(FREQUENCIES))
    _, vertical, horizontal = np.array(sorted(pairs)[1:65]).T
    return rows.astype(np.float32), vertical, horizontal


DCT, VERTICAL, HORIZONTAL = dct_basis()


def hash_image(image: Image.Image) -> int | None:
    """64 bits, the signs of the lowest DCT coefficients; None if too many of them are noise.

    Like pHash (Zauner, 2010), but with signs instead of comparisons with the median.
    """
    grey = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    coefficients = (DCT @ np.asarray(grey, np.float32) @ DCT.T)[VERTICAL, HORIZONTAL]
    if (np.abs(coefficients) < NOISE).sum() > MAX_NOISE:
        return None
    return int(np.packbits(coefficients > 0).view("<u8")[0])


def group_similar(hashes: Hashes) -> NDArray[np.int64]:
    """A group number for each hash; hashes linked by a chain of similar ones share it.

    Two hashes that differ in at most 6 bits agree in at least two of their 8 bytes, so only hashes
    that share a pair of bytes are compared.
    """
    distinct, inverse = np.unique(hashes, return_inverse=True)
    octets = distinct.astype("<u8").view(np.uint8).reshape(-1, 8).astype(np.uint16)
    group = np.arange(len(distinct))
    for i, j in combinations(range(8), 2):
        key = octets[:, i] << 8 | octets[:, j]
        order = np.argsort(key, kind="stable")
        key, sorted_, left = key[order], distinct[order], np.arange(len(order))
        for step in range(1, WINDOW):
            left = left[: np.searchsorted(left, len(order) - step)]
            left = left[key[left] == key[left + step]]
            if not len(left):
                break
            near = left[np.bitwise_count(sorted_[left] ^ sorted_[left + step]) <= MAX_DISTANCE]
            merge_groups(group, order[near], order[near + step])
    return group[inverse]


def merge_groups(group: NDArray[np.int64], a: NDArray[np.int64], b: NDArray[np.int64]) -> None:
    """Merges the groups of each pair in place: all members get the lowest number."""
    while (separate := group[a] != group[b]).any():
        first, second = group[a[separate]], group[b[separate]]
        np.minimum.at(group, np.maximum(first, second), np.minimum(first, second))
        while (higher := group[group] != group).any():
            group[higher] = group[group[higher]]
