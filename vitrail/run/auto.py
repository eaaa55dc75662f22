"""Chooses the settings for a data set, with a reason for each."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vitrail.data.config import AUGMENT_PRESETS, LabelKind, PixelType
from vitrail.data.image import load_image
from vitrail.data.pixels import majority_channels, widest_type
from vitrail.data.source import (
    Source,
    count_labels,
    label_kind,
    sample_indices,
    split_indices,
)
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.cost import count_macs
from vitrail.run.recipe import settings_from_dict, settings_to_dict
from vitrail.training.device import has_bfloat16_units
from vitrail.zoo.presets import preset

CPU_RATE = 1.5e10  # multiply-adds per second in training, of one core
BFLOAT16_SPEED = 1.5  # times this rate in training, of a CPU with bfloat16 units
CONV_SPEED = 1.7  # times this rate: wide convolutions reach more of a core than narrow matrices
GPU_RATES = {"cuda": 2e13, "mps": 1e12}  # the same of a GPU; for Apple's an estimate, not measured
AFFORDABLE = 2e7  # multiply-adds of a model that pays off from one epoch of CIFAR-10 on
CIFAR_IMAGES = 45_000  # training images, with which the number of epochs was measured
STEP_COST = 3  # a training step costs about three forward passes
LONG_RUN = 2 * 3600  # seconds; longer default runs are avoided, or announced
STEPS_PER_EPOCH = 16  # at least, where the data set is large enough
FEW_EPOCHS = 8  # below this, augmentation slows learning down more than it helps
MANY_EPOCHS = 40  # from here on, a small model overfits without regularisation
VERY_MANY_EPOCHS = 150  # from here on, mixup and cutmix pay off too
SHORT_TRAINING = 15  # epochs below which patch dropout buys more steps than it costs accuracy
LONG_SEQUENCE = 36  # patches from which half of them still show the image
SCRATCH: dict[str, Any] = {"optimizer": "muon", "lr": 1e-2, "schedule": "linear"}
STEM_BATCH = 64  # minimum batch size if there are twice as many images: batch norms need it
STEM_WEIGHT_DECAY = 0.5  # before batch norms, it keeps the relative size of updates
WEIGHTED_IMBALANCE = 3  # largest over smallest class, above which the loss is weighted
SAMPLED_IMBALANCE = 10  # above which rare classes are sampled more often instead


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """The properties of a data set that determine its recipe."""

    images: int  # in the training split
    classes: int
    side: int  # median short side in pixels
    channels: int
    pixels: PixelType = "uint8"
    imbalance: float  # images of the largest class over those of the smallest
    labels: LabelKind = "single"

    def __str__(self) -> str:
        kind = {1: "grey", 3: "colour"}.get(self.channels, f"{self.channels}-channel")
        kind = {"uint8": "", "uint16": "16-bit ", "float32": "float "}[self.pixels] + kind
        classes = {
            "single": f" of {self.classes} classes",
            "partial": f" of {self.classes} classes, some without a label",
            "multi": f" of {self.classes} classes, any number per image",
            "none": "",
        }[self.labels]
        side = f"{self.side} pixels on the short side"
        return f"{self.images:,} {kind} training images{classes}, {side}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    settings: dict[str, Any]  # nested, as in a recipe
    reasons: list[str]  # one line per choice


def summarise(source: Source) -> DataSummary:
    """Counts the training images and decodes a sample of them."""
    train = split_indices(source, "train")
    if not len(train):
        raise UserError(f"{source.name} has no training images; put some into train/")
    images = []
    sample = sample_indices(source).tolist()
    for index in sample:
        try:
            images.append(load_image(source[index].content, None, None))
        except UserError:
            continue  # the loader reports all broken images at once
    if not images:
        raise UserError(
            f"none of {len(sample)} sampled images of {source.name} can be read; "
            f"`vitrail check` says why"
        )
    counts = count_labels(source, train)
    return DataSummary(
        images=len(train),
        classes=len(source.classes),
        side=int(np.median([min(image.shape[:2]) for image in images])),
        channels=majority_channels(image.shape[2] for image in images),
        pixels=widest_type(str(image.dtype) for image in images),
        imbalance=float(counts.max() / max(1, counts.min())),
        labels=label_kind(source),
    )


def choose_from_scratch(
    summary: DataSummary,
    *,
    model: str | None = None,
    vit: ViTConfig | None = None,
    requested: Mapping[str, Any] | None = None,
    minutes: float | None = None,
    epochs: int | None = None,
    steps: int = 0,
    batch: int | None = None,
    device: str = "cpu",
    processes: int = 1,
) -> Choice:
    """The settings for training from scratch; `steps`, of `batch` images, win over epochs.

    `vit` is the architecture called `model`, if it is not a preset. The choice suits it with the
    changes that are `requested`, but does not contain them.
    """
    rate = training_rate(device, processes)
    wanted = steps * (batch or batch_size(summary)) / summary.images if steps else epochs
    if model is None:
        model, vit = choose_model(summary, device, rate, minutes, wanted)
    elif vit is None:
        vit = named_vit(summary, model)
    chosen = settings_to_dict(replace(vit, channels=summary.channels, classes=summary.classes))
    vit = settings_from_dict(ViTConfig, {**chosen, **(requested or {})}, "vit.")
    expected = expected_epochs(summary, vit, rate, minutes, wanted)
    number = f"{expected:.0f}" if expected >= 10 else f"{expected:.1f}"
    augment, why = choose_augmentation(summary, expected, vit.small_stem)
    reasons = [
        f"image {vit.size[0]}: the short side has {summary.side} pixels; "
        f"{vit.patches} patches of {vit.patch} x {vit.patch}",
        f"model {model}: {explain_model(vit)}; about {number} epochs expected",
        f"augmentation {augment}: {why}",
    ]
    reasons.append("normalisation: mean and std of the training images")
    train = choose_training(summary, vit, expected, reasons, timed=minutes is not None)
    if vit.small_stem:
        reasons.append("stem: starts from whitening filters of the training images (Page, 2018)")
    if minutes is None:
        train["epochs"] = max(1, math.ceil(expected))
    if minutes is None and not steps:
        why = "requested" if epochs else f"the default for {summary.images:,} images"
        reasons.append(f"epochs {train['epochs']}: {why}")
    return Choice(
        settings={
            "model": model,
            "vit": chosen,
            "train": train,
            "data": choose_data(summary, augment),
            "preprocess": {
                "channels": summary.channels,
                "crop": choose_crop(summary, vit),
                "pixels": summary.pixels,
            },
        },
        reasons=reasons,
    )


def device_rate(device: str) -> float:
    """Multiply-adds per second, in float32 on a CPU."""
    if device == "cpu":
        return CPU_RATE * torch.get_num_threads()
    return GPU_RATES.get(device, GPU_RATES["cuda"])


def training_rate(device: str, processes: int) -> float:
    """Multiply-adds per second in training, of all processes."""
    faster = device == "cpu" and has_bfloat16_units()
    return processes * device_rate(device) * (BFLOAT16_SPEED if faster else 1)


def input_size(side: int, device: str) -> tuple[int, int]:
    """Image size and patch size of the model: 16 to 100 patches."""
    if side <= 16:
        return max(8, side // 2 * 2), 2  # smaller images are enlarged, for enough patches
    if side <= 48:
        patch = 4 if side < 30 else 8
        return round(side / patch) * patch, patch
    if side <= 96 or device == "cpu":
        return 64, 8
    return (128, 16) if side < 160 else (160, 16)


def choose_model(
    summary: DataSummary, device: str, rate: float, minutes: float | None, wanted: float | None
) -> tuple[str, ViTConfig]:
    """The largest of the small models that gets enough epochs within the time.

    With a stem, twice the multiply-adds need four times the epochs; plain ViTs need more. Within
    given minutes, these are epochs of CIFAR-10, so that the number of images changes nothing: the
    epochs of a small data set are many, but have few steps, and those of a large one are few, but
    of as many images.
    """
    size, patch = input_size(summary.side, device)
    stem = "R9+" if patch in (4, 8) else ""
    for name, plain in (("Mini", 80), ("Micro", 30)):
        vit = small_vit(stem + name, size, patch)
        epochs = expected_epochs(summary, vit, rate, minutes, wanted)
        seconds = epochs * summary.images / images_per_second(vit, rate)
        needed = (count_macs(vit) / AFFORDABLE) ** 2 if stem else plain
        counted = epochs
        if stem and minutes is not None:
            counted *= summary.images / CIFAR_IMAGES
        if counted >= needed and (minutes or wanted or seconds < LONG_RUN):
            return f"{stem}{name}/{patch}", vit
    name = "Pico" if patch == 2 else f"{stem}Nano"
    return f"{name}/{patch}", small_vit(name, size, patch)


def small_vit(name: str, size: int, patch: int) -> ViTConfig:
    """Sine-cosine positions and average pooling train better from scratch (Beyer et al., 2022)."""
    return preset(f"{name}/4", image=size, patch=patch, positions="sincos", pool="avg")


def explain_model(vit: ViTConfig) -> str:
    stem = "the first stages of a ResNet-9, then " if vit.stem == "r9" else ""
    return f"{stem}{vit.depth} blocks of width {vit.width}"


def named_vit(summary: DataSummary, model: str) -> ViTConfig:
    """A named architecture, at the size of the images if that is smaller than its own.

    Models that were published without a head get one.
    """
    vit = preset(model)
    if vit.head == "none":
        vit = replace(vit, head="linear")
    natural = max(1, round(summary.side / vit.patch)) * vit.patch
    return replace(vit, image=min(natural, *vit.size))


def expected_epochs(
    summary: DataSummary, vit: ViTConfig, rate: float, minutes: float | None, wanted: float | None
) -> float:
    """The epochs that fit into the minutes; without minutes those wanted, or the default."""
    if minutes is None:
        return wanted or default_epochs(summary)
    return 60 * minutes * images_per_second(vit, rate) / summary.images


def images_per_second(vit: ViTConfig, rate: float) -> float:
    """In training, on a device of this rate of multiply-adds."""
    return rate * (CONV_SPEED if vit.small_stem else 1) / (STEP_COST * count_macs(vit))


def default_epochs(summary: DataSummary) -> int:
    """From 30 to 300: the smaller the data set, the more epochs for the same number of steps."""
    return int(min(300, max(30, 2_000_000 / summary.images)))


def choose_augmentation(summary: DataSummary, epochs: float, stem: bool) -> tuple[str, str]:
    """The name of an augmentation preset, and why: stronger for more epochs.

    Mixup and cutmix regularise the small models with a `stem` too strongly.
    """
    grey = summary.channels == 1
    if epochs < (FEW_EPOCHS if grey else 1.5):
        return "none", "with so few epochs augmentation only slows learning down"
    if epochs < FEW_EPOCHS:
        return "flips", "with so few epochs more augmentation only slows learning down"
    if grey and summary.side <= 16:
        return "gentle digits", "shifts of less than a pixel; more would blur such small images"
    if grey:
        caution = "grey images may be digits, which flips would change"
        if epochs < MANY_EPOCHS:
            return "gentle digits", f"very small shifts and rotations; {caution}"
        return "digits", f"small shifts and rotations, for many epochs; {caution}"
    if epochs < MANY_EPOCHS:
        return "light", "flips and shifts, for a moderate number of epochs"
    if stem or epochs < VERY_MANY_EPOCHS:
        return "medium", "crops, flips, colour jitter and random erasing, for many epochs"
    return "strong", "crops, colour jitter, erasing, mixup and cutmix, for very many epochs"


def choose_training(
    summary: DataSummary, vit: ViTConfig, epochs: float, reasons: list[str], *, timed: bool
) -> dict[str, Any]:
    """Optimizer, batch size, schedule and regularisation; appends to `reasons`."""
    batch = batch_size(summary)
    why = f"at least {STEPS_PER_EPOCH} steps per epoch of {summary.images:,} images"
    if STEPS_PER_EPOCH * batch > summary.images:
        why = f"there are only {summary.images} images"
    least = min(STEM_BATCH, largest_batch(summary) // 2)
    if vit.small_stem and timed and batch < least:  # the time limits the steps, not the images
        batch, why = least, "batch norms would be noisy with fewer images"
    train = {"batch": batch, **SCRATCH}
    reasons.append(f"batch {batch}: {why}")
    reasons.append("optimizer muon, learning rate 0.01: better than AdamW on CIFAR-10, both tuned")
    if vit.small_stem:
        train |= choose_weight_decay(reasons)
    if vit.stem == "patch" and vit.patches >= LONG_SEQUENCE and epochs < SHORT_TRAINING:
        train |= {"drop_patches": 0.5, "drop_until": 0.7}
        reasons.append("patch dropout 0.5 at first: cheaper steps, so more of them in short time")
    if epochs >= MANY_EPOCHS:
        train |= {"smoothing": 0.1, "ema": choose_ema_decay(summary.images * epochs / batch)}
        reasons.append("label smoothing and EMA weights: they reduce overfitting in many epochs")
    reasons += explain_balancing(summary)
    return train | choose_class_weights(summary)


def choose_weight_decay(reasons: list[str]) -> dict[str, Any]:
    """That of a model with a stem; appends to `reasons`."""
    reasons.append(f"weight decay {STEM_WEIGHT_DECAY}: better with convolutions on CIFAR-10")
    return {"weight_decay": STEM_WEIGHT_DECAY}


def choose_ema_decay(steps: float) -> float:
    """An EMA horizon, 1 / (1 - decay), of 1,000 steps; of 100 in runs of up to 3,000 steps."""
    return 0.999 if steps > 3000 else 0.99


def choose_data(summary: DataSummary, augment: str) -> dict[str, Any]:
    chosen: dict[str, Any] = {"augment": settings_to_dict(AUGMENT_PRESETS[augment])}
    if summary.labels == "multi":
        return {**chosen, "labels": "multi"}
    return {**chosen, "balanced": summary.imbalance > SAMPLED_IMBALANCE}


def choose_class_weights(summary: DataSummary) -> dict[str, Any]:
    limit = math.inf if summary.labels == "multi" else SAMPLED_IMBALANCE
    return {"class_weights": WEIGHTED_IMBALANCE < summary.imbalance <= limit}


def explain_balancing(summary: DataSummary) -> list[str]:
    """What is done about imbalanced classes; empty if they are roughly balanced."""
    if summary.imbalance <= WEIGHTED_IMBALANCE:
        return []
    how = "balanced sampling" if summary.imbalance > SAMPLED_IMBALANCE else "class weights"
    if summary.labels == "multi":
        how = "positive weights"
    return [f"{how}: the largest class is {summary.imbalance:.1f} times the smallest"]


def batch_size(summary: DataSummary) -> int:
    """A power of two up to 128 that leaves at least 16 steps per epoch.

    Sets of fewer than 64 images get 4 all the same, or the largest power of two in the set.
    """
    most = largest_batch(summary)
    return min(128, most, max(4, most // STEPS_PER_EPOCH))


def largest_batch(summary: DataSummary) -> int:
    """The largest power of two in the set."""
    return 1 << math.floor(math.log2(summary.images))


def choose_crop(summary: DataSummary, vit: ViTConfig) -> float:
    """Large photographs are cropped at the borders; small images are used whole."""
    return 1.0 if summary.side <= 1.2 * min(vit.size) else 0.9
