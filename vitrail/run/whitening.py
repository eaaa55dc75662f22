"""Initial weights from the data: a stem's first convolution starts as whitening filters."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.data.loader import Loader
from vitrail.model.stem import Stem
from vitrail.pretraining.objective import backbone_of
from vitrail.run.recipe import Recipe
from vitrail.run.transfer import at_training_size
from vitrail.training.learner import Learner

IMAGES = 512  # whose patches are whitened


def whiten_stem(recipe: Recipe, learner: Learner, loader: Loader) -> None:
    """Lets a fresh stem start from the whitening filters of the training images (Page, 2018).

    A function of the images, so that a run that is resumed before its first checkpoint computes
    it again. Weights that are already trained stay as they are, and so do those of sharded models.
    """
    stem = backbone_of(learner.model).patch_embed.backbone
    if not isinstance(stem, Stem) or recipe.weights or recipe.pretrain or learner.sharded:
        return
    batches = at_training_size(loader).evaluation("train", IMAGES, IMAGES)
    images = torch.cat([batch.images for batch in batches]).float()
    for model in {learner.model, learner.eval_model}:
        stem = backbone_of(model).patch_embed.backbone
        whiten(next(m.weight for m in stem.modules() if isinstance(m, nn.Conv2d)), images)


@torch.no_grad()
def whiten(kernel: Tensor, images: Tensor) -> None:
    """Replaces filters by the principal components of image patches, and by their negatives.

    The batch norm that follows scales them to equal variance. The norm of the kernel stays.
    """
    count, _, height, width = kernel.shape
    patches = F.unfold(images, (height, width)).transpose(0, 1).flatten(1)  # one per column
    _, vectors = torch.linalg.eigh(patches.cov())  # in ascending order of the variance
    filters = vectors.T.flip(0)[: count // 2]
    both = torch.cat([filters, -filters]).view(-1, *kernel.shape[1:])
    kernel[: len(both)] = both * (kernel[: len(both)].norm() / both.norm())
