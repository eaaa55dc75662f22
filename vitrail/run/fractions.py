"""Accuracy from a part of the labels: a backbone and random weights, trained for the same steps."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.loader import Loader, limit_threads
from vitrail.evaluation.metrics import accuracy, wilson_interval
from vitrail.model.vit import ViT
from vitrail.run.auto import SCRATCH
from vitrail.run.build import make_learner
from vitrail.run.design import OWN_LAYER_DECAY, OWN_LR
from vitrail.run.fine_tuning import MAX_PROBE
from vitrail.run.recipe import Recipe
from vitrail.run.storage.predictions import predict_split
from vitrail.run.transfer import start_from_features
from vitrail.training import loop
from vitrail.training.config import TrainConfig

FRACTIONS = (0.01, 0.1, 1.0)  # of the labels
TRAININGS = 2 * len(FRACTIONS)  # from the backbone and from random weights
MIN_STEPS = 10  # of each training
MEASURED = 10_000  # validation images, at most


def compare_with_scratch(recipe: Recipe, backbone: ViT, loader: Loader) -> list[dict[str, Any]]:
    """For each fraction, the validation accuracy of two short training runs of all weights.

    Both have the same images, steps and augmentation, and each the learning rates and the start
    of the head that `train` would choose: a linear probe, or zeros from scratch.
    """
    steps, rows = count_labelled_steps(recipe, loader.world_size), []
    for fraction in FRACTIONS if steps else ():
        items = choose_items(loader, fraction)
        labelled = loader.restrict(items)
        learned, scratch = (
            train_briefly(recipe, start, labelled, steps) for start in (backbone, None)
        )
        rows.append(
            {
                "fraction": fraction,
                "labels": len(items),
                "accuracy": learned,
                "interval": list(wilson_interval(learned, measured_images(loader))),
                "scratch": scratch,
                "scratch_interval": list(wilson_interval(scratch, measured_images(loader))),
            }
        )
    return rows


def count_labelled_steps(recipe: Recipe, processes: int) -> int:
    """Steps of each training, a function of the recipe, so that a resume has the same results.

    They run on one of the `processes`, which computes whole batches there.
    """
    assert recipe.pretrain is not None
    share = recipe.pretrain.comparison / processes
    steps = recipe.train.steps * share * step_cost_ratio(recipe) / TRAININGS
    return max(MIN_STEPS, round(steps)) if share else 0


def step_cost_ratio(recipe: Recipe) -> float:
    """About the cost of a step without labels over that of one with labels."""
    pretrain = recipe.pretrain
    assert pretrain is not None
    if pretrain.method == "views":
        return pretrain.views + pretrain.local_views / 4  # a local view has a quarter of the pixels
    return 1 - pretrain.mask if pretrain.method == "masked" else 1.0


def train_briefly(recipe: Recipe, backbone: ViT | None, loader: Loader, steps: int) -> float:
    """The validation accuracy after training from `backbone`, or from random weights."""
    own = {"lr": SCRATCH["lr"] * OWN_LR, "layer_decay": OWN_LAYER_DECAY, "probe": MAX_PROBE}
    start = own if backbone is not None else {}
    config = TrainConfig(
        **{**SCRATCH, **start}, steps=steps, batch=loader.batch, seed=recipe.train.seed
    )
    vit = replace(recipe.vit, head="linear")
    plain = replace(recipe, vit=vit, weights="", pretrain=None, teacher=None, train=config)
    learner = make_learner(plain, loader.device)
    if backbone is not None:
        learner.model.load_state_dict(learner.model.state_dict() | backbone.state_dict())
        with limit_threads(1):  # the fit has small matrices, for which threads only cost time
            start_from_features(plain, learner, loader)
    batches = ((batch.images, batch.targets) for batch in loader.training(0, steps))
    with suppress(loop.Diverged):  # then the weights before that step are measured
        for _ in loop.train_steps(learner, batches, config, steps, patches=recipe.patches):
            pass
    found = predict_split(learner.eval_model, loader, "val", learner.dtype, MEASURED)
    return accuracy(found.logits, found.labels)


def measured_images(loader: Loader) -> int:
    return len(loader.rank_items("val", MEASURED))


def choose_items(loader: Loader, fraction: float) -> NDArray[np.int64]:
    """Training images of this fraction of the labels."""
    items = loader.rank_items("train")
    labels = torch.from_numpy(loader.source.labels[items])
    chosen: NDArray[np.int64] = items[choose_fraction(labels, fraction).numpy()]
    return chosen


def choose_fraction(labels: Tensor, fraction: float) -> Tensor:
    """Rows of this fraction of every class, at least one of each, spread over the data."""
    chosen = []
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero()[:, 0]
        wanted = max(1, round(fraction * len(rows)))
        chosen.append(rows[torch.linspace(0, len(rows) - 1, wanted).round().long()])
    return torch.cat(chosen).sort().values
