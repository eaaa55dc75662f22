"""The recipe that a data set asks for, with a reason for every choice."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vitrail.data.config import AUGMENTS, Preprocess
from vitrail.data.image import load_image, usual
from vitrail.data.source import Source, indices, sample
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.cost import macs
from vitrail.run.recipe import plain
from vitrail.zoo.presets import preset

CPU_RATE, GPU_RATE = 1.5e10, 2e13  # multiply-adds a second in training, of one core and of a GPU
FEW = 8  # passes over the images, below which varying them slows the learning more than it helps
LONG = 2 * 3600  # seconds: a longer run that nobody asked for is announced


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What of a data set decides on its recipe."""

    images: int  # in the training split
    classes: int
    side: int  # median short side in pixels
    channels: int
    uneven: float  # images of the largest class over those of the smallest

    def __str__(self) -> str:
        kind = {1: "grey", 3: "colour"}.get(self.channels, f"{self.channels}-channel")
        return (
            f"{self.images:,} {kind} training images of {self.classes} classes, "
            f"{self.side} pixels on the short side"
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    settings: dict[str, Any]  # nested, as in a recipe
    reasons: list[str]  # one line for each choice


def look(source: Source) -> Facts:
    """Counts the training images, and decodes a few of them."""
    train = indices(source, "train")
    if not len(train):
        raise UserError(f"{source.name} has no training images; put some under train/")
    shapes = []
    chosen = sample(source).tolist()
    for index in chosen:
        try:
            shapes.append(load_image(source[index].content, channels=None).shape)
        except UserError:
            continue  # the loader tells all of these together
    if not shapes:
        raise UserError(f"none of {len(chosen)} images of {source.name} can be read")
    counts = np.bincount(source.labels[train], minlength=len(source.classes))
    return Facts(
        images=len(train),
        classes=len(source.classes),
        side=int(np.median([min(shape[:2]) for shape in shapes])),
        channels=usual(shape[2] for shape in shapes),
        uneven=float(counts.max() / max(1, counts.min())),
    )


def choose(
    facts: Facts,
    *,
    model: str | None = None,
    minutes: float | None = None,
    epochs: int | None = None,
    steps: int = 0,
    batch: int | None = None,
    device: str = "cpu",
    processes: int = 1,
) -> Choice:
    """The recipe for training from scratch; `steps`, of `batch` images, win over epochs."""
    rate = processes * (GPU_RATE if device != "cpu" else CPU_RATE * torch.get_num_threads())
    asked = steps * (batch or batch_size(facts)) / facts.images if steps else epochs
    reasons: list[str] = []
    if model is None:
        model, vit = fitting(facts, device, rate, minutes, asked)
    else:
        vit = named(facts, model)
    vit = replace(vit, channels=facts.channels, classes=facts.classes)
    passes = expected(facts, vit, rate, minutes, asked)
    told = f"{vit.patches} patches of {vit.patch} x {vit.patch}"
    reasons.append(f"image {vit.size[0]}: the pictures have {facts.side} pixels; {told}")
    told = f"width {vit.width}, {vit.depth} blocks"
    times = f"{passes:.0f}" if passes >= 10 else f"{passes:.1f}"
    reasons.append(f"model {model}: {told}; each image will be seen about {times} times")
    augment, why = augmentation(facts, passes)
    reasons.append(f"augmentation {augment}: {why}")
    train = training(facts, vit, passes, reasons)
    if minutes is None:
        train["epochs"] = max(1, math.ceil(passes))
    if minutes is None and not steps:
        why = "asked for" if epochs else f"{facts.images:,} images need so many to become good"
        reasons.append(f"epochs {train['epochs']}: {why}")
    return Choice(
        settings={
            "model": model,
            "vit": plain(vit),
            "train": train,
            "data": {"augment": plain(AUGMENTS[augment]), "balanced": facts.uneven > 10},
            "view": {"channels": facts.channels, "crop": crop(facts, vit)},
        },
        reasons=reasons,
    )


def fine_tune(
    facts: Facts,
    name: str,
    vit: ViTConfig,
    view: Preprocess | None,
    epochs: int | None,
    timed: bool = False,
) -> Choice:
    """The recipe for going on from weights that others trained, seen as those weights expect it.

    Without a `view`, the weights do not say what they expect, and whoever asked for them does.
    `timed`: minutes or steps say how long, not epochs.
    """
    batch = min(32, batch_size(facts))
    augment, varied = "light", "flips and shifts"
    if facts.channels == 1:
        augment, varied = "digits", "small moves and turns; flips would break digits"
    train: dict[str, Any] = {"batch": batch, "optimizer": "adamw", "lr": 5e-4}
    train |= {"weight_decay": 0.05, "warmup": 0.1, "layer_decay": 0.75, "smoothing": 0.1}
    seen = "as asked for, the weights do not say theirs"
    if view is not None:
        seen = "that of the weights, or they would not recognise what they see"
    reasons = [
        f"model {name}: that of the weights, with a new head for {facts.classes} classes",
        f"preprocessing: {seen}",
        f"augmentation {augment}: {varied}",
        f"batch {batch}: many small steps, as few passes are made",
        "optimizer adamw, rate 0.0005: low, and lower for early blocks, which know most already",
        *evening(facts),
    ]
    if not timed:
        train["epochs"] = epochs or int(min(50, max(5, 20_000 / facts.images)))
        why = "asked for" if epochs else "fine-tuning needs few"
        reasons.append(f"epochs {train['epochs']}: {why}")
    return Choice(
        settings={
            "model": name,
            "vit": plain(replace(vit, classes=facts.classes, head="linear")),
            "train": train | uneven(facts),
            "data": {"augment": plain(AUGMENTS[augment]), "balanced": facts.uneven > 10},
            "view": view.plain() if view else {"channels": vit.channels},
        },
        reasons=reasons,
    )


def picture(side: int, device: str) -> tuple[int, int]:
    """Pixels the model sees, and the side of a patch: about 64 patches, where that is possible."""
    if side <= 16:
        return max(8, side // 2 * 2), 2  # tiny ones enlarged, or there are too few patches
    if side <= 48:
        return round(side / 4) * 4, 4
    if side <= 96 or device == "cpu":
        return 64, 8
    return (128, 16) if side < 160 else (160, 16)


def fitting(
    facts: Facts, device: str, rate: float, minutes: float | None, asked: float | None
) -> tuple[str, ViTConfig]:
    """The largest small model that still sees every image often enough, within the time."""
    size, patch = picture(facts.side, device)
    for name, needed in (("Mini", 80), ("Micro", 30)):
        vit = small(name, size, patch)
        passes = expected(facts, vit, rate, minutes, asked)
        seconds = passes * facts.images * 3 * macs(vit) / rate
        if passes >= needed and (minutes or asked or seconds < LONG):
            return f"{name}/{patch}", vit
    name = "Pico" if patch == 2 else "Nano"
    return f"{name}/{patch}", small(name, size, patch)


def small(name: str, size: int, patch: int) -> ViTConfig:
    """Sine-cosine positions and average pooling learn sooner from little (Beyer et al., 2022)."""
    return preset(f"{name}/4", image=size, patch=patch, positions="sincos", pool="avg")


def named(facts: Facts, model: str) -> ViTConfig:
    """An architecture that was asked for, at the size of the pictures if they are smaller.

    Models that were published without a head get one.
    """
    vit = preset(model)
    if vit.head == "none":
        vit = replace(vit, head="linear")
    natural = max(1, round(facts.side / vit.patch)) * vit.patch
    return replace(vit, image=min(natural, *vit.size))


def expected(
    facts: Facts, vit: ViTConfig, rate: float, minutes: float | None, asked: float | None
) -> float:
    """How often every image will be seen; a training step costs three forwards."""
    if minutes is None:
        return asked or default_epochs(facts)
    return 60 * minutes * rate / (3 * macs(vit)) / facts.images


def default_epochs(facts: Facts) -> int:
    """Small sets need more passes to become as many steps."""
    return int(min(300, max(30, 2_000_000 / facts.images)))


def augmentation(facts: Facts, passes: float) -> tuple[str, str]:
    """How much pictures are varied follows from how often each is seen."""
    grey = facts.channels == 1
    if passes < (FEW if grey else 1.5):
        return "none", "each image is seen so seldom that variations only slow the learning"
    if passes < FEW:
        return "flips", "each image is seen so seldom that more would only slow the learning"
    if grey and facts.side <= 16:
        return "gentle digits", "moves of less than a pixel; more would blur so small pictures"
    if grey:
        told = "grey pictures may be digits, which flips would break"
        if passes < 40:
            return "gentle digits", f"very small moves and turns; {told}"
        return "digits", f"small moves and turns, for many passes; {told}"
    if passes < 40:
        return "light", "flips and shifts, for a moderate number of passes"
    if passes < 150:
        return "medium", "crops, flips, colours and erasing, for many passes"
    return "strong", "crops, colours, erasing, mixup and cutmix, for very many passes"


def training(facts: Facts, vit: ViTConfig, passes: float, reasons: list[str]) -> dict[str, Any]:
    """Optimizer, batch and schedule."""
    batch = batch_size(facts)
    train: dict[str, Any] = {"batch": batch, "optimizer": "muon", "lr": 1e-2, "schedule": "linear"}
    told = f"at least 16 steps in each pass over {facts.images:,} images"
    if 16 * batch > facts.images:
        told = f"there are only {facts.images} images"
    reasons.append(f"batch {batch}: {told}")
    reasons.append("optimizer muon, rate 0.01: it beat AdamW on CIFAR-10, each at its best rate")
    if vit.patches >= 36 and passes < 15:
        train |= {"drop_patches": 0.5, "drop_until": 0.7}
        reasons.append("half of the patches dropped at first: more steps in a short time")
    if passes >= 40:
        train |= {"smoothing": 0.1, "ema": averaging(facts.images * passes / batch)}
        reasons.append("label smoothing and averaged weights: many passes would learn by heart")
    reasons += evening(facts)
    return train | uneven(facts)


def averaging(steps: float) -> float:
    """Over the last hundredth of the steps or so, and over a hundred steps at least."""
    return 0.999 if steps > 3000 else 0.99


def uneven(facts: Facts) -> dict[str, Any]:
    return {"class_weights": 3 < facts.uneven <= 10}


def evening(facts: Facts) -> list[str]:
    """What is done about uneven classes, and why; nothing where they are about even."""
    if facts.uneven <= 3:
        return []
    how = "balanced sampling" if facts.uneven > 10 else "class weights"
    return [f"{how}: the largest class is {facts.uneven:.1f} times the smallest"]


def batch_size(facts: Facts) -> int:
    """A power of two up to 128 that leaves 16 steps in a pass; 4 if that fails, less for less."""
    most = math.floor(math.log2(facts.images))
    return 1 << min(7, most, max(2, most - 4))


def crop(facts: Facts, vit: ViTConfig) -> float:
    """Photographs are cut at the borders; small pictures are seen whole."""
    return 1.0 if facts.side <= 1.2 * min(vit.size) else 0.9
