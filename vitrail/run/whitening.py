"""Initial weights from the data: a stem's first convolution starts as whitening filters."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.data.loader import Loader
from vitrail.model.stem import Stem
from vitrail.pretraining.objective import backbone_of
from vitrail.run.recipe import Recipe
from vitrail.run.transfer import at_training_size
from vitrail.training.learner import Learner

IMAGES, BATCH = 512, 16  # whose patches are whitened; at once, for large images
KERNEL = 3  # side of the first convolution


def whiten_stem(recipe: Recipe, learner: Learner, loader: Loader) -> None:
    """Lets a fresh stem start from the whitening filters of the training images (Page, 2018).

    A function of the images, so that a run that is resumed before its first checkpoint computes
    it again. Weights that are already trained stay as they are, and so do those of sharded models.
    """
    stem = backbone_of(learner.model).patch_embed.backbone
    if not isinstance(stem, Stem) or recipe.weights or recipe.pretrain or learner.sharded:
        return
    batches = at_training_size(loader).evaluation("train", BATCH, IMAGES)
    covariance = patch_covariance(batch.images for batch in batches)
    for model in {learner.model, learner.eval_model}:
        stem = backbone_of(model).patch_embed.backbone
        whiten(next(m.weight for m in stem.modules() if isinstance(m, nn.Conv2d)), covariance)


def patch_covariance(batches: Iterable[Tensor]) -> Tensor:
    """The covariance of the pixels in all patches of the size of a kernel."""
    count, total, squares = 0, torch.tensor(0.0), torch.tensor(0.0)
    for images in batches:
        patches = F.unfold(images.double(), KERNEL).transpose(0, 1).flatten(1)  # one per column
        count += patches.shape[1]
        total, squares = total + patches.sum(dim=1), squares + patches @ patches.T
    mean = total / count
    return squares / count - mean[:, None] * mean


@torch.no_grad()
def whiten(kernel: Tensor, covariance: Tensor) -> None:
    """Replaces filters by the principal components of image patches, and by their negatives.

    The batch norm that follows scales them to equal variance. The norm of the kernel stays.
    """
    _, vectors = torch.linalg.eigh(covariance)  # in ascending order of the variance
    filters = vectors.T.flip(0)[: len(kernel) // 2]
    both = torch.cat([filters, -filters]).view(-1, *kernel.shape[1:]).to(kernel)
    kernel[: len(both)] = both * (kernel[: len(both)].norm() / both.norm())
