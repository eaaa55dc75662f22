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
DRAWS = 10  # random sets of patches for the control


@dataclass(frozen=True, kw_only=True)
class HighNormTokens:
    patches: list[int]  # high-norm in every photo
    photos_without_others: int  # photos in which no other patch has a high norm
    ratios: tuple[float, float]  # of the maximum to the median norm: minimum and maximum
    attention: dict[str, float]  # of [CLS] and of the average patch, in the last layer
    same_prediction: int  # photos with the same prediction without these patches
    change: float  # of the probability without them: mean absolute change
    photos_with_new: int  # photos in which another patch has a high norm without them
    control_same: float  # the same two numbers for random patches, mean over the draws
    control_change: float


@torch.no_grad()
def run_without(model: ViT, x: Tensor, patches: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits without these patches, and the norms of the others after `LAYER`."""
    others = [patch for patch in range(model.config.patches) if patch not in patches]
    z, rope = model.embed(x, torch.tensor(others).expand(len(x), -1))
    norms = torch.empty(0)
    for number, block in enumerate(model.blocks):
        z = block(z, rope)
        if number == LAYER:
            norms = z[:, model.config.prefix :].norm(dim=-1)  # (B, P')
    return model.classify(z), norms


@torch.no_grad()
def measure_high_norm_tokens(model: ViT, x: Tensor) -> HighNormTokens:
    norms = token_norms(model, x)[LAYER].flatten(1)  # (B, P)
    ratio = norms / norms.median(dim=1, keepdim=True).values
    high = [row.nonzero().flatten().tolist() for row in ratio > HIGH_NORM]
    common = sorted(set.intersection(*map(set, high)))
    columns = [model.config.prefix + patch for patch in common]
    attention = {}
    for rows in ("cls", "mean"):
        (last,) = vitrail.attention(model, x, layers=-1, rows=rows)
        attention[rows] = last[:, :, 0, columns].sum(dim=-1).mean().item()
    before = model(x).softmax(dim=1)  # (B, K)

    def compare(patches: Sequence[int]) -> tuple[int, float, Tensor]:
        logits, rest = run_without(model, x, patches)
        same = int((logits.argmax(dim=1) == before.argmax(dim=1)).sum())
        drop = (
            before.amax(dim=1)
            - logits.softmax(dim=1).gather(1, before.argmax(dim=1, keepdim=True)).flatten()
        )
        return same, drop.abs().mean().item(), rest

    same, change, rest = compare(common)
    new = (rest / rest.median(dim=1, keepdim=True).values > HIGH_NORM).any(dim=1)
    generator = torch.Generator().manual_seed(0)
    draws = [
        compare(torch.randperm(norms.shape[1], generator=generator)[: len(common)].tolist())
        for _ in range(DRAWS)
    ]
    return HighNormTokens(
        patches=common,
        photos_without_others=sum(patches == common for patches in high),
        ratios=(ratio.amax(dim=1).min().item(), ratio.amax(dim=1).max().item()),
        attention=attention,
        same_prediction=same,
        change=change,
        photos_with_new=int(new.sum()),
        control_same=sum(draw[0] for draw in draws) / DRAWS,
        control_change=sum(draw[1] for draw in draws) / DRAWS,
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
    print(f"same prediction without them: in {tokens.same_prediction} of {count} photos", end="")
    print(f"; its probability changes by {tokens.change:.3f}")
    print(f"the same for as many random patches: in {tokens.control_same:.1f} of {count}", end="")
    print(f"; by {tokens.control_change:.3f} (mean of {DRAWS} draws)")
    print(f"without them, another patch has a high norm: in {tokens.photos_with_new} of {count}")


if __name__ == "__main__":
    main()
