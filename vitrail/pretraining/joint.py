"""A joint loss: the cross-entropy of labelled images, and the consistency of others without labels.

Unsupervised data augmentation (Xie et al., 2020) with a mean teacher (Tarvainen and Valpola, 2017):
what the model with EMA weights predicts for an image without label, sharpened, is the target of a
distorted view of it. Distribution alignment (Berthelot et al., 2020) keeps the predicted classes as
frequent as the labels. Half of the labelled images are distorted, too.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.vit import ViT
from vitrail.pretraining.config import JointConfig
from vitrail.pretraining.teacher import Criterion
from vitrail.pretraining.views import Draws, crop_views, jitter_colours

TEMPERATURE = 0.5  # sharpens predictions: below 1, classes separate
MOMENTUM = 0.99  # of the running class distributions
LEAST = 0.1  # added to them, over the number of classes: bounds the ratio for rare classes
HOLE = 3 / 8  # side of the blank square, as a fraction of the image's


class JointClassifier(nn.Module):
    """A classifier that in training also sees images without labels.

    Images are (B, 1 + ratio, C, H, W): the first of each row has a label, the others have none.
    Returns the logits of the first, and behind them the mean loss of the others, (B, K + 1). Images
    of (B, C, H, W) all have labels, so that this loss is 0.
    """

    mean: Tensor
    std: Tensor
    label_distribution: Tensor
    prediction_distribution: Tensor

    def __init__(self, backbone: ViT, config: JointConfig, mean: Tensor, std: Tensor):
        super().__init__()
        self.backbone, self.config = backbone, config
        self.teacher: tuple[ViT, ...] = ()  # in a tuple: its weights are not part of this module
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)
        even = torch.full((backbone.config.classes,), 1 / backbone.config.classes)
        self.register_buffer("label_distribution", even)
        self.register_buffer("prediction_distribution", even.clone())  # of the teacher

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        labelled = self.distort_half(images if images.ndim == 4 else images[:, 0])
        if images.ndim == 4:
            logits = self.backbone(labelled, keep)
            return torch.cat([logits, logits.new_zeros(len(logits), 1)], dim=1)
        others = images[:, 1:].flatten(0, 1)
        with torch.no_grad():
            teacher = self.teacher[0] if self.teacher else self.backbone
            predictions = teacher(others).float().softmax(dim=1)
            views = self.distort(others)
        if keep is None:  # one batch, so that batch norms see both kinds of images
            logits = self.backbone(torch.cat([labelled, views]))
            ours, theirs = logits[: len(labelled)], logits[len(labelled) :]
        else:
            ours, theirs = self.backbone(labelled, keep), self.backbone(views)
        targets = self.align(predictions, ours)
        losses = F.cross_entropy(theirs.float(), targets, reduction="none")
        mean = losses.view(len(ours), -1).mean(dim=1, keepdim=True)
        return torch.cat([ours, mean.to(ours.dtype)], dim=1)

    @torch.no_grad()
    def align(self, predictions: Tensor, logits: Tensor) -> Tensor:
        """Aligned and sharpened predictions: classes that are predicted too often lose weight.

        `logits` are those of the labelled images. As the model soon fits these, their mean
        prediction stands for the distribution of the labels.
        """
        labels, teacher = self.label_distribution, self.prediction_distribution
        if self.training:
            labels.lerp_(logits.float().softmax(dim=1).mean(dim=0), 1 - MOMENTUM)
            teacher.lerp_(predictions.mean(dim=0), 1 - MOMENTUM)
        least = LEAST / len(labels)
        aligned = predictions * (labels + least) / (teacher + least)
        return (aligned.log() / TEMPERATURE).softmax(dim=1)

    def distort_half(self, images: Tensor) -> Tensor:
        """In training, every second image is distorted: all of them would hide what is usual."""
        if not self.training or len(images) < 2:
            return images
        half = images.clone()
        half[1::2] = self.distort(images[1::2])
        return half

    @torch.no_grad()
    def distort(self, images: Tensor) -> Tensor:
        """A random crop of each image, with other colours and a blank square."""
        config, draws = self.config, Draws(len(images), images.device, None)
        height, width = images.shape[-2:]
        x = crop_views(images, (height, width), (config.crop, 1.0), config.flip, draws)
        if config.colour:
            x = jitter_colours(x * self.std + self.mean, config.colour, draws)
            x = (x - self.mean) / self.std
        return blank_square(x, draws)


def blank_square(images: Tensor, draws: Draws) -> Tensor:
    """Sets a random square of each image to 0, the mean pixel (DeVries and Taylor, 2017)."""
    inside: list[Tensor] = []
    for side in images.shape[-2:]:
        centre = side * draws.uniform()[:, :, 0]  # (B, 1, 1)
        places = torch.arange(side, device=images.device) + 0.5
        inside.append((places - centre).abs() < side * HOLE / 2)  # (B, 1, side)
    return images.masked_fill(inside[0][..., None] & inside[1][:, :, None], 0.0)


def joint_loss(classes: int, labelled: Criterion) -> Criterion:
    """The loss `labelled` of the logits, plus that of the images without labels."""
    return partial(sum_both, classes=classes, labelled=labelled)


def sum_both(
    outputs: Tensor,
    targets: Tensor,
    smoothing: float,
    class_weights: Tensor | None,
    *,
    classes: int,
    labelled: Criterion,
) -> Tensor:
    own = labelled(outputs[:, :classes], targets, smoothing, class_weights)
    return own + outputs[:, classes:].float().sum()
