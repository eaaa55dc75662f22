"""What all objectives share: a backbone that is kept, and a part that is thrown away."""

import torch
from torch import Tensor, nn

from vitrail.model.vit import ViT


class Pretrainer(nn.Module):
    """A backbone in training without labels.

    In training mode `forward` returns the loss of each image, (B, 1). In evaluation mode it draws
    the same random numbers for every batch, so that losses can be compared.
    """

    def __init__(self, backbone: ViT):
        super().__init__()
        self.backbone = backbone

    def generator(self, device: torch.device) -> torch.Generator | None:
        """None, torch's own RNG, in training: it is seeded by the step."""
        return None if self.training else torch.Generator(device).manual_seed(0)


class PatchFeatures(nn.Module):
    """The mean of the patches after the last block and its norm, whatever the model's pool."""

    def __init__(self, backbone: ViT):
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone.features(images)[0].mean(dim=1)


def backbone_of(model: nn.Module) -> ViT:
    """The ViT in a model: the model itself, or the part of it that is kept."""
    backbone = getattr(model, "backbone", model)
    assert isinstance(backbone, ViT)
    return backbone


def sum_losses(
    losses: Tensor, targets: Tensor, smoothing: float, class_weights: Tensor | None
) -> Tensor:
    """The criterion of a `Pretrainer`, which has no targets."""
    return losses.sum()


def count_nothing(losses: Tensor, targets: Tensor) -> Tensor:
    """Without labels nothing is correct or wrong."""
    return losses.new_zeros(())
