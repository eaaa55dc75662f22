"""Training with few labels: how images without labels are used, and how they join the batches."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from vitrail.data.config import AUGMENT_PRESETS, Augment, Columns, LabelKind
from vitrail.data.loader import Loader
from vitrail.data.open import open_data
from vitrail.data.source import Source, split_indices
from vitrail.data.split import use_as_training
from vitrail.errors import UserError
from vitrail.pretraining.config import JointConfig
from vitrail.run import auto
from vitrail.run.recipe import Recipe, settings_to_dict
from vitrail.run.request import Request
from vitrail.training.distributed import World

SHIFT = 0.1  # of an image without label whose class is predicted, as a fraction of the side
TINY_IMAGE = 16  # pixels up to which crops stay large
JOINT_EMA = 0.999  # EMA decay: the average of many steps is the better teacher
JOINT_LR = 1 / 2  # factor on the usual learning rate: the teacher is better early on
USUAL_RATIO = 3  # images without labels for each labelled one
LABELLED_FIRST = 100_000  # labelled samples, over all epochs, before images without labels join
LABELLED_EPOCHS = 200  # the same for few labelled images, if these are fewer samples
FORWARD_COST = 1 / 3  # of a prediction, against a training step on the same images


def choose_joint(
    summary: auto.DataSummary, labelled: float, batch: int | None = None
) -> JointConfig:
    """How many images without labels, and which changes of them keep their class.

    `labelled` is the fraction of the images that have a label, `batch` the requested batch size.
    The images without labels of one batch differ from each other.
    """
    photos = summary.channels == 3 and summary.pixels == "uint8"
    others = round(summary.images / labelled) - summary.images
    most = others // (batch or labelled_batch(summary.images))
    return JointConfig(
        ratio=min(math.ceil(others / summary.images), most, USUAL_RATIO),
        crop=0.5 if summary.side <= TINY_IMAGE else 0.35,
        flip=0.0 if summary.channels == 1 else 0.5,
        colour=0.4 if photos else 0.0,
    )


def plan_joint(
    config: JointConfig, images: int, affordable: float, requested: Mapping[str, Any]
) -> JointConfig:
    """The step at which images without labels join, unless it is requested; ratio 0: never.

    `affordable` is the number of labelled samples for which the time suffices, over all epochs of
    the `images`. Labelled images are alone in half of the steps at most.
    """
    alone = min(LABELLED_FIRST, LABELLED_EPOCHS * images)
    accompanied = (affordable - alone) / (1 + unlabelled_cost(config))
    if accompanied < alone and "ratio" not in requested:
        return replace(config, ratio=0)
    share = alone / (alone + max(alone, accompanied))
    start = config.start if "start" in requested else max(JointConfig.start, round(share, 2))
    return replace(config, start=start)


def step_cost(config: JointConfig) -> float:
    """The mean cost of a step, over that of one with labelled images alone."""
    return 1 + (1 - config.start) * unlabelled_cost(config)


def unlabelled_cost(config: JointConfig) -> float:
    """What the images without labels of a step cost, over its labelled ones."""
    return config.ratio * (1 + FORWARD_COST)


def work_until(recipe: Recipe, step: int) -> float:
    """What the steps up to `step` cost, in steps with labelled images alone."""
    if recipe.joint is None:
        return step
    return step + max(0, step - recipe.first_joint_step) * unlabelled_cost(recipe.joint)


def use_unlabelled(choice: auto.Choice, config: JointConfig, images: int) -> None:
    """Adds the joint loss to a choice from scratch, and what suits it."""
    choice.settings["joint"] = settings_to_dict(config)
    train, augment = choice.settings["train"], choice.settings["data"]["augment"]
    train["batch"] = labelled_batch(images)
    train["smoothing"] = 0.0  # with it, few predictions would be confident
    train["ema"] = JOINT_EMA
    train["lr"] *= JOINT_LR
    replaced = (
        "batch",
        "label smoothing",
        "optimizer",
        *(["augmentation"] if augment["scale"] < 1 else []),
    )
    choice.reasons[:] = [line for line in choice.reasons if not line.startswith(replaced)]
    if augment["scale"] < 1:  # crops, colours and blank squares are the joint loss's own
        augment |= settings_to_dict(AUGMENT_PRESETS["light"])
        choice.reasons.append("augmentation light: flips and shifts; the joint loss distorts more")
    many = f"{config.ratio} image{'s' * (config.ratio > 1)}"
    choice.reasons.append(
        f"few labels: after {config.start:.0%} of the steps, {many} without labels beside each "
        f"labelled one; the sharpened prediction of the EMA weights for an image is the target for "
        f"a distorted view of it (Xie et al., 2020)"
    )
    choice.reasons.append(
        f"optimizer muon, learning rate {train['lr']:g}: with half of the usual rate, the EMA "
        f"weights are a better teacher"
    )
    choice.reasons.append(
        "EMA weights; no label smoothing or mixup, which would lower the confidence"
    )


def labelled_batch(labelled: int) -> int:
    """Labelled images of a batch: a power of two, up to 64 and up to half of them."""
    return 1 << min(6, max(0, int(math.log2(labelled)) - 1))


def labelled_fraction(source: Source, request: Request) -> float:
    """The fraction of all training images whose label is used."""
    if request.labels != "partial":
        return request.labelled
    everything = open_without_labels(request.data, request.columns, "partial", source, False)
    return len(split_indices(source, "train")) / len(split_indices(everything, "train"))


def attach_unlabelled(recipe: Recipe, loader: Loader, world: World) -> None:
    """Lets the loader add images without labels to its training batches, if the recipe uses any."""
    if recipe.joint is None or not recipe.uses_unlabelled:
        return
    if recipe.train.batch % world.size:
        raise UserError(
            f"a batch of {recipe.train.batch} cannot be divided by {world.size} processes, as "
            f"images without labels need; set `train.batch` to a multiple of {world.size}"
        )
    data = recipe.data
    source = world.leader_first(
        lambda: open_without_labels(
            recipe.source, data.columns, data.labels, loader.source, world.is_leader
        )
    )
    check_enough(recipe.joint.ratio, recipe.train.batch, len(split_indices(source, "train")))
    augment = Augment(flip=recipe.joint.flip, shift=SHIFT)
    config = replace(data, augment=augment, balanced=False)
    loader.unlabelled = Loader(
        source,
        loader.preprocess,
        config,
        batch=recipe.joint.ratio * recipe.train.batch,
        seed=recipe.train.seed,
        rank=world.rank,
        world_size=world.size,
        device=loader.device,
        progress=world.is_leader,
    )
    loader.unlabelled.prepare("train")


def check_enough(ratio: int, batch: int, images: int) -> None:
    """Raises if the images do not fill one batch."""
    if ratio * batch > images:
        raise UserError(
            f"joint.ratio {ratio} and train.batch {batch} need {ratio * batch:,} training images "
            f"in a batch, and there are {images:,}; set `joint.ratio={images // batch}` or lower"
        )


def open_without_labels(
    data: str, columns: Columns, labels: LabelKind | None, labelled: Source, progress: bool
) -> Source:
    """All training images, with or without label; those held out for evaluation are left out."""
    if labels != "partial":
        return use_as_training(labelled)
    source = open_data(data, columns=columns, labels="none", progress=progress)
    held_out = np.flatnonzero(np.isin(labelled.splits, ("val", "test"))).tolist()
    return use_as_training(source, {labelled.ids[item] for item in held_out})
