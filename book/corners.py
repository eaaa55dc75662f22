"""Measures high-norm tokens: `python -m book.corners WEIGHTS PHOTOS [--every 30]`."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import vitrail
from book.faithfulness import EVERY, choose_photos
from vitrail import ViT
from vitrail.inference.torch_predictor import load_input
from vitrail.insight.learned import token_norms

LAYER = 7  # the first layer with high-norm tokens
HIGH_NORM = 5  # times the median norm


@dataclass(frozen=True, kw_only=True)
class HighNormTokens:
    patches: list[int]  # high-norm in every photo
    photos_without_others: int  # photos in which no other patch has a high norm
    ratios: tuple[float, float]  # of the maximum to the median norm: minimum and maximum
    attention: dict[str, float]  # of [CLS] and of the average patch, in the last layer
    same_prediction: int  # photos with the same prediction without these patches


@torch.no_grad()
def measure_high_norm_tokens(model: ViT, x: Tensor) -> HighNormTokens:
    norms = token_norms(model, x)[LAYER].flatten(1)  # (B, P)
    ratio = norms / norms.median(dim=1, keepdim=True).values
    high = [row.nonzero().flatten().tolist() for row in ratio > HIGH_NORM]
    common = sorted(set.intersection(*map(set, high)))
    others = [patch for patch in range(norms.shape[1]) if patch not in common]
    keep = torch.tensor(others).expand(len(x), -1)
    columns = [model.config.prefix + patch for patch in common]
    attention = {}
    for rows in ("cls", "mean"):
        (last,) = vitrail.attention(model, x, layers=-1, rows=rows)
        attention[rows] = last[:, :, 0, columns].sum(dim=-1).mean().item()
    same = model(x).argmax(dim=1) == model(x, keep=keep).argmax(dim=1)
    return HighNormTokens(
        patches=common,
        photos_without_others=sum(patches == common for patches in high),
        ratios=(ratio.amax(dim=1).min().item(), ratio.amax(dim=1).max().item()),
        attention=attention,
        same_prediction=int(same.sum()),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", help="any model with [CLS] that Vitrail loads")
    parser.add_argument("photos", type=Path, help="folder of photos")
    parser.add_argument("--every", type=int, default=EVERY, help="use every Nth photo", metavar="N")
    options = parser.parse_args(arguments)
    classifier = vitrail.load(options.weights)
    paths = choose_photos(options.photos, options.every)
    x = torch.stack([load_input(path, classifier.preprocess) for path in paths])
    tokens = measure_high_norm_tokens(classifier.model, x)
    low, high = tokens.ratios
    count = len(paths)
    print(f"high-norm patches after layer {LAYER}: {tokens.patches}, in {count} of {count} photos")
    print(f"no other high-norm patch: in {tokens.photos_without_others} of {count} photos")
    print(f"maximum norm / median norm: {low:.0f} to {high:.0f}")
    print(f"attention to them in the last layer: [CLS] {tokens.attention['cls']:.2f}, ", end="")
    print(f"average patch {tokens.attention['mean']:.2f}")
    print(f"same prediction without them: in {tokens.same_prediction} of {count} photos")


if __name__ == "__main__":
    main()
