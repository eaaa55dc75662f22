"""Tokens far longer than the rest: `python -m book.corners WEIGHTS PHOTOS [--every 30]`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vitrail
from book.faithfulness import EVERY, some
from vitrail import ViT
from vitrail.insight.learned import token_norms

LAYER = 7  # after which they are there
LONG = 5  # times the median length


@torch.no_grad()
def measured(model: ViT, x: Tensor) -> dict[str, Any]:
    """Which patches are long, how long, how much they are looked at, and whether they matter."""
    lengths = token_norms(model, x)[LAYER].flatten(1)  # (B, P)
    ratio = lengths / lengths.median(dim=1, keepdim=True).values
    long = [row.nonzero().flatten().tolist() for row in ratio > LONG]
    everywhere = sorted(set.intersection(*map(set, long)))
    rest = [patch for patch in range(lengths.shape[1]) if patch not in everywhere]
    keep = torch.tensor(rest).expand(len(x), -1)
    columns = [model.config.prefix + patch for patch in everywhere]
    shares = {}
    for rows in ("cls", "mean"):
        (last,) = vitrail.attention(model, x, layers=-1, rows=rows)
        shares[rows] = last[:, :, 0, columns].sum(dim=-1).mean().item()
    return {
        "patches": everywhere,
        "photos with no other": sum(found == everywhere for found in long),
        "times": (ratio.amax(dim=1).min().item(), ratio.amax(dim=1).max().item()),
        "shares": shares,
        "same answer": int((model(x).argmax(dim=1) == model(x, keep=keep).argmax(dim=1)).sum()),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", help="any model with [CLS] that vitrail loads")
    parser.add_argument("photos", type=Path, help="folder of photos")
    parser.add_argument("--every", type=int, default=EVERY, help="take each so-many-th photo")
    choice = parser.parse_args(arguments)
    classifier = vitrail.load(choice.weights)
    paths = some(choice.photos, choice.every)
    found = measured(classifier.model, torch.stack([classifier.tensor(path) for path in paths]))
    low, high = found["times"]
    print(f"long after layer {LAYER}: patches {found['patches']} in all of {len(paths)} photos")
    print(f"no other is, in {found['photos with no other']}")
    print(f"the longest: {low:.0f} to {high:.0f} times the median")
    print(f"last layer's attention to them: [CLS] {found['shares']['cls']:.2f}, ", end="")
    print(f"average patch {found['shares']['mean']:.2f}")
    print(f"same answer without them: {found['same answer']}")


if __name__ == "__main__":
    main()
