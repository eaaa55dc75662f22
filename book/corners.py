"""Measures high-norm tokens: `python -m book.corners WEIGHTS PHOTOS [--every 30] [--draw FILE]`."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import vitrail
from book.faithfulness import EVERY, choose_photos
from book.figures import save_figure
from vitrail import ViT
from vitrail.data.image import load_image
from vitrail.data.preprocess import resize_and_crop
from vitrail.inference.torch_predictor import load_input
from vitrail.insight.canvas import MAGNITUDE, Canvas
from vitrail.insight.learned import token_norms

LAYER = 7  # the first layer with high-norm tokens
HIGH_NORM = 5  # times the median norm
DRAWS = 10  # random sets of patches for the control
TOP = 4  # most attended patches
GAIN = 0.05  # attention that a patch gains, beyond its proportional share, to be named
DRAWN = 6  # photos
WIDTH, LABEL, GAP = 9.0, 0.75, 0.05  # inches; 9 become 1800 pixels


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
    redistribution: "Redistribution"


@dataclass(frozen=True, kw_only=True)
class Redistribution:
    """The last-layer attention of [CLS] with and without some patches, mean over the photos."""

    itself: tuple[float, float]  # to [CLS]: with and without them
    top: tuple[float, float]  # to the `TOP` patches most attended without them
    in_proportion: float  # the part that is where it would be if it grew by one factor everywhere
    same_first: int  # photos in which the most attended of the other patches stays the same
    gains: list["Gain"]  # patches that get more than `GAIN` above their proportional share


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A patch that takes the place of the removed ones."""

    photo: int
    patch: int
    attention: tuple[float, float]  # of [CLS] with and without the removed patches
    norm: float  # without them, over the median norm


@dataclass(frozen=True, kw_only=True, eq=False)
class Ablation:
    """A forward pass without some patches."""

    logits: Tensor  # (B, K)
    norms: Tensor  # (B, P), over their median after `LAYER`; 0 where removed
    attention: Tensor  # (B, N), of [CLS] in the last layer, mean of the heads; 0 where removed


@torch.no_grad()
def run_without(model: ViT, x: Tensor, patches: Sequence[int]) -> Ablation:
    prefix, tokens = model.config.prefix, model.config.tokens
    others = [patch for patch in range(model.config.patches) if patch not in patches]
    z, rope = model.embed(x, torch.tensor(others).expand(len(x), -1))
    norms, attention = torch.zeros(len(x), tokens - prefix), torch.zeros(len(x), tokens)
    for number, block in enumerate(model.blocks):
        if number == len(model.blocks) - 1:
            row = block.attn.weights(block.norm1(z), rows=[0], rope=rope)[:, :, 0]  # (B, h, N')
            attention[:, [*range(prefix), *(prefix + patch for patch in others)]] = row.mean(dim=1)
        z = block(z, rope)
        if number == LAYER:
            present = z[:, prefix:].norm(dim=-1)  # (B, P')
            norms[:, others] = present / present.median(dim=1, keepdim=True).values
    return Ablation(logits=model.classify(z), norms=norms, attention=attention)


def compare_attention(model: ViT, before: Tensor, without: Ablation) -> Redistribution:  # (B, N)
    """Where the attention of [CLS] goes if patches are removed."""
    prefix, after = model.config.prefix, without.attention
    shared = before.where(after > 0, 0.0)
    shared = shared / shared.sum(dim=1, keepdim=True)
    top = prefix + after[:, prefix:].topk(TOP, dim=1).indices  # (B, TOP)

    def attention_to_top(row: Tensor) -> float:
        return row.gather(1, top).sum(dim=1).mean().item()

    first = prefix + shared[:, prefix:].argmax(dim=1)  # (B)
    gains = [
        Gain(
            photo=photo,
            patch=patch,
            attention=(before[photo, prefix + patch].item(), after[photo, prefix + patch].item()),
            norm=without.norms[photo, patch].item(),
        )
        for photo, patch in ((after - shared)[:, prefix:] > GAIN).nonzero().tolist()
    ]
    return Redistribution(
        itself=(before[:, 0].mean().item(), after[:, 0].mean().item()),
        top=(attention_to_top(before), attention_to_top(after)),
        in_proportion=torch.minimum(shared, after).sum(dim=1).mean().item(),
        same_first=int((first == top[:, 0]).sum()),
        gains=gains,
    )


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

    def compare(patches: Sequence[int]) -> tuple[int, float, Ablation]:
        without = run_without(model, x, patches)
        logits = without.logits
        same = int((logits.argmax(dim=1) == before.argmax(dim=1)).sum())
        drop = (
            before.amax(dim=1)
            - logits.softmax(dim=1).gather(1, before.argmax(dim=1, keepdim=True)).flatten()
        )
        return same, drop.abs().mean().item(), without

    same, change, without = compare(common)
    new = (without.norms > HIGH_NORM).any(dim=1)
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
        redistribution=compare_attention(model, run_without(model, x, []).attention, without),
    )


def draw_attention_without(
    model: ViT, x: Tensor, pixels: Sequence[Any], patches: Sequence[int]
) -> Figure:
    """Photos, and the last-layer attention of [CLS] with and without these patches.

    Each photo has its own scale, the same for both maps, up to the 97.5th percentile.
    """
    cell = (WIDTH - LABEL - 0.1) / len(x) - GAP
    canvas = Canvas(WIDTH, 3 * (cell + GAP) + 0.15)
    grids = [
        run_without(model, x, removed)
        .attention[:, model.config.prefix :]
        .unflatten(1, model.grid(x))
        for removed in ([], patches)
    ]
    high = torch.stack(grids).flatten(2).quantile(0.975, dim=2).amax(dim=0)  # (B)
    for number, picture in enumerate(pixels):
        left = LABEL + number * (cell + GAP)
        canvas.add_image(picture, left, 0.1, cell, cell, interpolation="lanczos")
        for row, grid in enumerate(grids, 1):
            shown = (grid[number] / high[number]).clamp(max=1).numpy()
            canvas.add_image(shown, left, 0.1 + row * (cell + GAP), cell, cell, cmap=MAGNITUDE)
    for row, title in enumerate(("photo", "all patches", "without\ncorners")):
        middle = 0.1 + row * (cell + GAP) + cell / 2
        canvas.add_text(LABEL - 0.08, middle, title, 8, ha="right", va="center")
    return canvas.figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", help="any model with [CLS] that Vitrail loads")
    parser.add_argument("photos", type=Path, help="folder of photos")
    parser.add_argument("--every", type=int, default=EVERY, help="use every Nth photo", metavar="N")
    parser.add_argument("--draw", type=Path, help="draw the attention of [CLS]", metavar="FILE")
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
    moved = tokens.redistribution
    print("attention of [CLS] in the last layer, with and without them:")
    print(f"  to itself: {moved.itself[0]:.3f}, {moved.itself[1]:.3f}")
    print(
        f"  to the {TOP} patches most attended without them: {moved.top[0]:.2f}, {moved.top[1]:.2f}"
    )
    print(f"  shared out in proportion: {moved.in_proportion:.0%} of it")
    print(f"  same most attended patch among the others: in {moved.same_first} of {count} photos")
    for gain in moved.gains:
        numbers = f"{gain.attention[1]:.2f} instead of {gain.attention[0]:.2f}"
        print(f"  in photo {gain.photo}, patch {gain.patch} gets {numbers}; ", end="")
        print(f"its norm is {gain.norm:.1f} times the median")
    if options.draw:
        pixels = [
            resize_and_crop(classifier.preprocess, load_image(path, 3)) for path in paths[:DRAWN]
        ]
        figure = draw_attention_without(classifier.model, x[:DRAWN], pixels, tokens.patches)
        print(save_figure(figure, options.draw))


if __name__ == "__main__":
    main()
