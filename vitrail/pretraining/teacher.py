"""Learning from a teacher: its softened answers, or its features and how similar its tokens are."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.vit import ViT

HARD_SHARE = 0.5  # of the loss that the labels have; the teacher's answers have the rest
SHARPNESS = 10.0  # factor on cosines before a softmax: the most similar regions count most
HIDDEN = -1e4  # logit of a region that is not compared; unlike -inf, a row of them stays finite
# outputs, targets, label smoothing and class weights in; the loss summed over the images out
Criterion = Callable[[Tensor, Tensor, float, Tensor | None], Tensor]


class FeatureStudent(nn.Module):
    """A classifier whose features are also projected to those of a teacher.

    `forward` returns the logits, or without a head the features, and behind them the projected
    ones; then, with `regions`, the similarities of the projected tokens. The projection is thrown
    away at the end.
    """

    def __init__(self, backbone: ViT, width: int, regions: int = 0):
        super().__init__()
        self.backbone, self.regions = backbone, regions
        self.projection = nn.Linear(backbone.config.feature_width, width)

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        tokens = self.backbone.encode(images, keep)
        outputs = [self.backbone.classify(tokens), self.projection(self.backbone.pool(tokens))]
        if self.regions:
            patches = self.backbone.norm(tokens[:, self.backbone.config.prefix :])
            grid = self.backbone.grid(images)
            weight = self.projection.weight[
                :, -patches.shape[-1] :
            ]  # pool cls_avg: of the mean patch
            x = F.linear(patches, weight, self.projection.bias)
            outputs.append(region_similarities(x, grid, self.regions, keep))
        return torch.cat(outputs, dim=1)


def region_similarities(
    patches: Tensor, grid: tuple[int, int], regions: int, keep: Tensor | None = None
) -> Tensor:
    """Cosines of the mean patches of `regions` x `regions` parts of an image: (B, regions^4).

    The same regions have any number of patches, so that models with other patches compare. A
    region without patches, of a coarse grid or with `keep`, has similarity 0, even to itself.
    """
    row, column = (torch.arange(side, device=patches.device) * regions // side for side in grid)
    region = (row[:, None] * regions + column).flatten()  # of each patch
    member = F.one_hot(region if keep is None else region[keep], regions**2)
    x = F.normalize(member.mT.to(patches.dtype) @ patches, dim=-1)  # of sums, as of means
    return (x @ x.mT).flatten(1)


def distillation(classes: int, temperature: float) -> Criterion:
    """0.5 cross-entropy + 0.5 T^2 KL to the answers at temperature T (Hinton et al., 2015).

    The targets are the class probabilities of the labels, then the logits of the teacher.
    """
    return partial(answer_loss, classes=classes, temperature=temperature)


def feature_distillation(classes: int, features: int) -> Criterion:
    """Cross-entropy, and the distance of projected and teacher's features."""
    return partial(feature_loss, classes=classes, features=features)


def feature_copying(classes: int, width: int, features: int) -> Criterion:
    """The distance of features alone.

    The targets are class probabilities, which are ignored, then what the teacher says.
    """
    return partial(copy_loss, classes=classes, width=width, features=features)


def copy_loss(
    outputs: Tensor,
    targets: Tensor,
    smoothing: float,
    class_weights: Tensor | None,
    *,
    classes: int,
    width: int,
    features: int,
) -> Tensor:
    return teacher_distance(outputs[:, width:], targets[:, classes:], features).sum()


def teacher_distance(ours: Tensor, theirs: Tensor, features: int) -> Tensor:
    """The distance of each image's features, and of the similarities behind them, if any."""
    distance = cosine_distance(ours[:, :features], theirs[:, :features])
    if ours.shape[1] > features:
        distance = distance + similarity_distance(ours[:, features:], theirs[:, features:])
    return distance


def similarity_distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """How differently the regions of each image resemble each other, (B,).

    The KL divergence between the similarities of a region to all others, as distributions; regions
    that one of the models has no patches of are left out.
    """
    side = math.isqrt(ours.shape[1])
    mine, other = (x.float().unflatten(1, (side, side)) for x in (ours, theirs))
    seen = (mine.diagonal(dim1=1, dim2=2) > 0) & (other.diagonal(dim1=1, dim2=2) > 0)
    itself = torch.eye(side, dtype=torch.bool, device=ours.device)
    hidden = itself | ~(seen[:, :, None] & seen[:, None, :])
    logs = [(SHARPNESS * x).masked_fill(hidden, HIDDEN).log_softmax(dim=-1) for x in (mine, other)]
    divergence = F.kl_div(logs[0], logs[1], reduction="none", log_target=True).sum(dim=(1, 2))
    distance: Tensor = divergence / seen.sum(dim=1).clamp(min=1)
    return distance


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
    features: int,
) -> Tensor:
    hard = label_loss(outputs[:, :classes], targets[:, :classes], smoothing, class_weights)
    return hard + teacher_distance(outputs[:, classes:], targets[:, classes:], features).sum()


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
