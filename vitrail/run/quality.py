"""How good a backbone is that learned without labels: held-out loss, rank, neighbours, a probe."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitrail.data.loader import Loader, limit_threads
from vitrail.data.source import (
    NO_LABEL,
    count_labels,
    is_labelled,
    is_multi_label,
    split_indices,
)
from vitrail.display.text import format_count
from vitrail.evaluation.features import effective_rank, neighbour_accuracy, relative_spread
from vitrail.evaluation.metrics import wilson_interval
from vitrail.heads.knn import NearestNeighbours
from vitrail.heads.logistic import fit_logistic
from vitrail.model.stem import BatchNorm
from vitrail.model.vit import ViT
from vitrail.pretraining.objective import PatchFeatures, backbone_of
from vitrail.pretraining.teacher import teacher_distance
from vitrail.run.fractions import FRACTIONS, choose_fraction
from vitrail.run.recipe import Recipe
from vitrail.run.storage.predictions import predict_split, predict_split_distributed
from vitrail.run.teacher import TeacherAnswers
from vitrail.training.distributed import World
from vitrail.training.learner import Learner

PROBE_IMAGES = 10_000  # training images of the probe, at most
PROBE_PASSES = 2  # forward passes over them: trained and random weights
NEIGHBOURS = 10
SEARCHED = 1000  # validation images among which the report finds neighbours, at most
RANKED_IMAGES = 10  # from which on the rank says something; that of two images is always 1
COLLAPSED_RANK = 0.5  # of the effective rank of random weights; healthy runs had 0.69 and more
COLLAPSED_SPREAD = 1e-3  # relative standard deviation of the features
NORM_BATCHES = 8  # whole images for the batch norms of a stem that has seen parts of them


@dataclass(frozen=True, kw_only=True)
class Features:
    """Features of the images of a split, and their labels."""

    x: Tensor
    labels: Tensor


def evaluate_pretraining(
    recipe: Recipe, learner: Learner, backbone: ViT, loader: Loader, world: World
) -> dict[str, Any]:
    """Held-out loss, effective rank and, with labels, k-NN accuracy of the EMA weights.

    `backbone` is the one that `adapt_backbone` returns for them.
    """
    assert recipe.pretrain is not None
    model, width = learner.eval_model, recipe.vit.width
    teacher = recipe.teacher if recipe.pretrain.method == "teacher" else None
    own = recipe.vit.feature_width  # of the student, in front of its projected features
    columns = 1 if teacher is None else own + teacher.features + teacher.regions**4
    losses = predict_split_distributed(model, loader, "val", learner.dtype, world, columns)
    extractor = PatchFeatures(backbone)
    found = predict_split_distributed(extractor, loader, "val", learner.dtype, world, width)

    def score() -> dict[str, Any]:
        assert losses is not None and found is not None  # the leader has them
        x, loss = found.logits, losses.logits
        if teacher is not None:
            assert isinstance(loader.annotate, TeacherAnswers)
            answers = loader.annotate.validation(losses.items)
            loss = teacher_distance(loss[:, own:], answers, teacher.features)
        scores = {"val_loss": float(loss.mean()), "val_rank": effective_rank(x)}
        scores["val_spread"] = relative_spread(x)
        chosen = found.labels != NO_LABEL
        if can_probe(loader) and chosen.sum() > NEIGHBOURS:
            scores["val_knn"] = neighbour_accuracy(x[chosen], found.labels[chosen], NEIGHBOURS)
        return scores

    return world.on_leader(score)


def measure_random_rank(recipe: Recipe, learner: Learner, loader: Loader, world: World) -> float:
    """The effective rank of the features of random weights on the validation images."""
    extractor = PatchFeatures(make_random_backbone(recipe, loader))
    width = recipe.vit.width
    found = predict_split_distributed(extractor, loader, "val", learner.dtype, world, width)

    def rank() -> float:
        assert found is not None  # the leader has them
        return effective_rank(found.logits)

    return world.on_leader(rank)


def describe_collapse(
    scores: dict[str, Any], method: str, images: int, random_rank: float
) -> str | None:
    """A warning with a remedy if the features have collapsed, otherwise None.

    `random_rank` is the effective rank of random weights.
    """
    rank, spread = scores["val_rank"], scores["val_spread"]
    enough = images < RANKED_IMAGES or rank >= COLLAPSED_RANK * random_rank
    if images < 2 or (enough and spread >= COLLAPSED_SPREAD):
        return None
    remedy = {
        "masked": "lower train.lr, or raise pretrain.mask",
        "views": "lower train.lr, or raise train.batch",
        "teacher": "lower train.lr, or choose another teacher",
    }[method]
    return (
        f"the features have collapsed: effective rank {rank:.1f} (random weights: "
        f"{random_rank:.1f}), relative spread {spread:.1g}; {remedy}"
    )


def describe_few_images(images: int) -> str | None:
    """What the effective rank of so few validation images cannot tell; None if it can."""
    if images >= RANKED_IMAGES:
        return None
    return (
        f"{format_count(images, 'validation image')}: too few to tell from the effective rank "
        f"whether the features have collapsed; give {RANKED_IMAGES} or more"
    )


def can_probe(loader: Loader) -> bool:
    """Whether images have one label each, so that a classifier can measure the features."""
    source = loader.source
    if not is_labelled(source) or is_multi_label(source):
        return False
    return all(count_labels(source, split_indices(source, s)).any() for s in ("train", "val"))


def adapt_backbone(learner: Learner, loader: Loader) -> ViT:
    """The backbone of the EMA weights, for whole images: what is measured and saved.

    The batch norms of a convolutional stem have seen parts of images, so a copy gets their
    statistics of whole ones; the training itself is not changed.
    """
    backbone = backbone_of(learner.eval_model)
    if backbone.config.small_stem:
        backbone = copy.deepcopy(backbone)
        adapt_norms(backbone, loader)
    return backbone


@torch.no_grad()
def adapt_norms(backbone: ViT, loader: Loader) -> None:
    """Computes the statistics of batch norms again, from whole training images.

    Each batch has images of the whole split: neighbours in a folder may be of one class, and vary
    less than all images do.
    """
    norms = [module for module in backbone.modules() if isinstance(module, BatchNorm)]
    if not norms:
        return
    momentum, training = [norm.momentum for norm in norms], backbone.training
    backbone.train()
    whole = loader.as_single_process()
    limit = NORM_BATCHES * whole.batch
    images = torch.cat([batch.images for batch in whole.evaluation("train", limit=limit)])
    batches = math.ceil(len(images) / whole.batch)
    for number in range(batches):
        for norm in norms:
            norm.momentum = 1 / (number + 1)  # the mean of all batches
        backbone.patch_embed(images[number::batches])
    for norm, before in zip(norms, momentum, strict=True):
        norm.momentum = before
    backbone.train(training)


def make_random_backbone(recipe: Recipe, loader: Loader) -> ViT:
    """The same architecture with random weights, the baseline."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.train.seed)
        random = ViT(recipe.vit).to(loader.device)
    adapt_norms(random, loader)
    return random


def probe_backbone(recipe: Recipe, backbone: ViT, loader: Loader) -> dict[str, Any] | None:
    """k-NN and linear probe on mean patches, for the backbone and for random weights.

    The heads are fitted on training images and measured on validation images. None without labels.
    """
    if not can_probe(loader):
        return None
    random = make_random_backbone(recipe, loader)
    labelled = loader.with_labels()
    trained = probe_features(backbone, labelled)
    return {**trained, "random": probe_features(random, labelled)}


def probe_features(backbone: ViT, loader: Loader) -> dict[str, Any]:
    """The accuracies of k-NN and of linear probes on 1, 10 and 100 % of the labels."""
    train, val = (extract_features(backbone, loader, split) for split in ("train", "val"))
    count = len(loader.source.classes)
    k = min(NEIGHBOURS, len(train.labels))
    voting = NearestNeighbours(k, "cosine").fit(train.x.numpy(), train.labels.numpy())
    knn = float((voting.predict(val.x.numpy()) == val.labels.numpy()).mean())
    rows = []
    for fraction in FRACTIONS:
        chosen = choose_fraction(train.labels, fraction)
        with limit_threads(1):  # small matrices, for which threads only cost time
            fit = fit_logistic(train.x[chosen], train.labels[chosen], count)
        correct = (val.x @ fit.weight.T + fit.bias).argmax(dim=1) == val.labels
        rate = float(correct.double().mean())
        interval = list(wilson_interval(rate, len(val.labels)))
        labels = {"fraction": fraction, "labels": len(chosen)}
        rows.append({**labels, "accuracy": rate, "interval": interval})
    linear = rows[-1]
    return {
        "knn": knn,
        "knn_interval": list(wilson_interval(knn, len(val.labels))),
        "linear": linear["accuracy"],
        "interval": linear["interval"],
        "images": len(val.labels),
        "fractions": rows,
    }


def extract_features(backbone: ViT, loader: Loader, split: Any) -> Features:
    """Mean patches of up to `PROBE_IMAGES` images of a split, without augmentation."""
    found = predict_split(PatchFeatures(backbone), loader, split, torch.float32, PROBE_IMAGES)
    return Features(x=found.logits, labels=found.labels)
