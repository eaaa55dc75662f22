"""Learning from a teacher: its softened answers, or its features through a projection."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.vit import ViT

HARD_SHARE = 0.5  # of the loss that the labels have; the teacher's answers have the rest
# outputs, targets, label smoothing and class weights in; the loss summed over the images out
Criterion = Callable[[Tensor, Tensor, float, Tensor | None], Tensor]


class FeatureStudent(nn.Module):
    """A classifier whose features are also projected to those of a teacher.

    `forward` returns the logits, or without a head the features, and behind them the projected
    ones. The projection is thrown away at the end.
    """

    def __init__(self, backbone: ViT, width: int):
        super().__init__()
        self.backbone = backbone
        self.projection = nn.Linear(backbone.config.feature_width, width)

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        tokens = self.backbone.encode(images, keep)
        features = self.projection(self.backbone.pool(tokens))
        return torch.cat([self.backbone.classify(tokens), features], dim=1)


def distillation(classes: int, temperature: float) -> Criterion:
    """0.5 cross-entropy + 0.5 T^2 KL to the answers at temperature T (Hinton et al., 2015).

    The targets are the class probabilities of the labels, then the logits of the teacher.
    """
    return partial(answer_loss, classes=classes, temperature=temperature)


def feature_distillation(classes: int) -> Criterion:
    """Cross-entropy, and one minus the cosine of projected and teacher's features."""
    return partial(feature_loss, classes=classes)


def feature_copying(classes: int, width: int) -> Criterion:
    """The loss of features alone: one minus their cosine.

    The targets are class probabilities, which are ignored, then the features of the teacher.
    """
    return partial(copy_loss, classes=classes, width=width)


def copy_loss(
    outputs: Tensor,
    targets: Tensor,
    smoothing: float,
    class_weights: Tensor | None,
    *,
    classes: int,
    width: int,
) -> Tensor:
    return cosine_distance(outputs[:, width:], targets[:, classes:]).sum()


def cosine_distance(projected: Tensor, features: Tensor) -> Tensor:
    """One minus the cosine of each row with its row in `features`."""
    return 1 - F.cosine_similarity(projected.float(), features, dim=1)


def answer_loss(
    outputs: Tensor,
    targets: Tensor,
    smoothing: float,
    class_weights: Tensor | None,
    *,
    classes: int,
    temperature: float,
) -> Tensor:
    logits, answers = outputs.float() / temperature, targets[:, classes:] / temperature
    soft = F.kl_div(
        logits.log_softmax(dim=1), answers.log_softmax(dim=1), reduction="sum", log_target=True
    )
    hard = label_loss(outputs, targets[:, :classes], smoothing, class_weights)
    return HARD_SHARE * hard + (1 - HARD_SHARE) * temperature**2 * soft


def feature_loss(
    outputs: Tensor,
    targets: Tensor,
    smoothing: float,
    class_weights: Tensor | None,
    *,
    classes: int,
) -> Tensor:
    hard = label_loss(outputs[:, :classes], targets[:, :classes], smoothing, class_weights)
    return hard + cosine_distance(outputs[:, classes:], targets[:, classes:]).sum()


def label_loss(
    logits: Tensor, probabilities: Tensor, smoothing: float, class_weights: Tensor | None
) -> Tensor:
    """The cross-entropy of the images that have a label; the others have no probabilities."""
    labelled = probabilities.sum(dim=1) > 0
    weight = None if class_weights is None else class_weights.to(logits)
    return F.cross_entropy(
        logits[labelled].float(),
        probabilities[labelled],
        weight=weight,
        reduction="sum",
        label_smoothing=smoothing,
    )


def count_taught(outputs: Tensor, targets: Tensor, *, classes: int) -> Tensor:
    """Images whose top class is the label."""
    labelled = targets[:, :classes].sum(dim=1) > 0
    correct = outputs[:, :classes].argmax(dim=1) == targets[:, :classes].argmax(dim=1)
    return (correct & labelled).sum()
