"""Explanations of a toy problem with a known answer: `python -m book.finder`.

Every image is noise with one bright square of the size of a patch. The colour of the square is the
class, its position is random, so a model that predicts the colour must have found the square. How
often is it the patch with the highest relevance?
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail import ViT, ViTConfig
from vitrail.insight.explain import explain
from vitrail.insight.methods import METHODS

STEPS, IMAGES = 150, 64


def make_images(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images of 4 x 4 patches, the colour of the square in each, and the patch it covers."""
    colours, positions = torch.randint(3, (count,)), torch.randint(16, (count,))
    x = 0.3 * torch.randn(count, 3, 4, 8, 4, 8)
    x[range(count), colours, positions // 4, :, positions % 4] += 2
    return x.flatten(2, 3).flatten(3), colours, positions


def train_model() -> ViT:
    torch.manual_seed(0)
    model = ViT(ViTConfig(image=32, patch=8, classes=3, width=48, depth=2, heads=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(STEPS):
        x, colours, _ = make_images(IMAGES)
        loss = F.cross_entropy(model(x), colours)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def measure_hits() -> dict[str, float]:
    """The accuracy, and for each method the fraction of images with its peak on the square."""
    model = train_model()
    x, colours, positions = make_images(IMAGES)
    with torch.no_grad():
        hits = {"accuracy": (model(x).argmax(dim=1) == colours).float().mean().item()}
    for method in METHODS:
        peak = explain(model, x, method, colours).flatten(1).argmax(dim=1)
        hits[method] = (peak == positions).float().mean().item()
    return hits


def main() -> None:
    for name, fraction in measure_hits().items():
        print(f"{name:16} {fraction:.2f}")


if __name__ == "__main__":
    main()
