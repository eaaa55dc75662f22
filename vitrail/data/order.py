"""The order of an epoch, a function of (seed, epoch): of all images, or of windows of shards.

Windows are for shards in a store that exceed the local copy: every image would be in another block.
The shards are shuffled and laid end to end; this sequence is cut into one lane for each part of a
batch, up to 64; each lane is read from its start to its end, and shuffled in windows of 16 MB. A
batch takes images from all lanes. Ranks take consecutive parts of every batch, hence other lanes,
hence other shards, while the order itself depends on neither ranks nor machines.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

ORDER_STREAM, MIX_STREAM, WINDOW_STREAM = 1, 2, 3  # purposes of an RNG: no two share a seed
LANES = 64  # parts of a batch that are read from different places
WINDOW = 16 << 20  # bytes of a lane that are shuffled; all lanes have 1 GB of them

Indices = NDArray[np.int64]


def epoch_order(labels: NDArray[np.int64], seed: int, epoch: int, balanced: bool) -> Indices:
    """Returns the order of one epoch; if balanced, of the same length with equal class shares."""
    rng = np.random.default_rng((ORDER_STREAM, seed, epoch))
    if not balanced:
        return rng.permutation(len(labels))
    _, counts = np.unique(labels, return_counts=True)
    groups = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    shares = np.full(len(groups), len(labels) // len(groups))
    shares[rng.permutation(len(groups))[: len(labels) % len(groups)]] += 1
    chosen = []
    for group, share in zip(groups, shares, strict=True):
        rounds = [rng.permutation(group) for _ in range(-(-share // len(group)))]
        chosen += [np.concatenate([group[:0], *rounds])[:share]]
    return rng.permutation(np.concatenate(chosen))


def count_repeats(items: Indices) -> Indices:
    """Counts the earlier occurrences of each item: 0 for its first."""
    by_item = np.argsort(items, kind="stable")
    ordered = items[by_item]
    is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    position = np.arange(len(items))
    since = position - np.maximum.accumulate(np.where(is_first, position, 0))
    counts = np.empty_like(items)
    counts[by_item] = since
    return counts


def window_order(shards: Indices, sizes: Indices, batch: int, seed: int, epoch: int) -> Indices:
    """Returns the order of one epoch that reads shards from start to end, window by window.

    `shards` and `sizes` are those of each image. Images that do not fill a batch come last.
    """
    rng = np.random.default_rng((WINDOW_STREAM, seed, epoch))
    names, counts = np.unique(shards, return_counts=True)
    groups = np.split(np.argsort(shards, kind="stable"), np.cumsum(counts)[:-1])
    sequence = np.concatenate([groups[number] for number in rng.permutation(len(names))])
    steps = len(shards) // batch
    lanes = min(LANES, batch)
    places = [batch * lane // lanes for lane in range(lanes + 1)]  # in a batch
    window = max(1, WINDOW // max(1, int(sizes.mean())))
    order = np.empty((steps, batch), np.int64)
    for first, last in pairwise(places):
        lane = shuffle_windows(sequence[steps * first : steps * last], window, rng)
        order[:, first:last] = lane.reshape(steps, last - first)
    return np.concatenate([order.reshape(-1), sequence[steps * batch :]])


def shuffle_windows(items: Indices, window: int, rng: np.random.Generator) -> Indices:
    """Shuffles each of the windows of consecutive items."""
    keys = np.arange(len(items)) // window + rng.random(len(items))
    return items[np.argsort(keys)]
