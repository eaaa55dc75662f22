"""Explanations where the answer is known, a toy: `python -m book.finder`.

Noise holds one bright square, a patch large. Its colour is the class, its place is not, so a model
that names the colour has found the square. Which methods point at it?
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail import ViT, ViTConfig
from vitrail.insight.explain import explain
from vitrail.insight.methods import METHODS

STEPS, IMAGES = 150, 64


def squares(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images of 4 x 4 patches, the colour of the square in each, and the patch where it lies."""
    colours, places = torch.randint(3, (count,)), torch.randint(16, (count,))
    x = 0.3 * torch.randn(count, 3, 4, 8, 4, 8)
    x[range(count), colours, places // 4, :, places % 4] += 2
    return x.flatten(2, 3).flatten(3), colours, places


def trained() -> ViT:
    torch.manual_seed(0)
    model = ViT(ViTConfig(image=32, patch=8, classes=3, width=48, depth=2, heads=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(STEPS):
        x, colours, _ = squares(IMAGES)
        loss = F.cross_entropy(model(x), colours)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def found() -> dict[str, float]:
    """For each method the share of images in which its hottest patch is the square."""
    model = trained()
    x, colours, places = squares(IMAGES)
    with torch.no_grad():
        shares = {"answer": (model(x).argmax(dim=1) == colours).float().mean().item()}
    for method in METHODS:
        hottest = explain(model, x, method, colours).flatten(1).argmax(dim=1)
        shares[method] = (hottest == places).float().mean().item()
    return shares


def main() -> None:
    for name, share in found().items():
        print(f"{name:16} {share:.2f}")


if __name__ == "__main__":
    main()
