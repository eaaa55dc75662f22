"""Chooses the settings for pretraining on images without labels, with a reason for each."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitrail.data.config import AUGMENT_PRESETS, Augment, Columns, LabelKind, Preprocess
from vitrail.data.open import open_data
from vitrail.data.source import Source
from vitrail.data.sources.folder import BESIDE_TRAINING, NO_CLASS, find_split_class
from vitrail.data.sources.table import MissingLabel
from vitrail.data.split import SPLIT_ALIASES
from vitrail.display.text import format_count
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.pretraining.config import RANGES, Method, PretrainConfig
from vitrail.run import auto
from vitrail.run.dataset import open_on_all_ranks
from vitrail.run.recipe import settings_from_dict, settings_to_dict
from vitrail.training.distributed import World

log = logging.getLogger(__name__)

LARGE_PATCH = 16  # pixels from which the targets are normalised in each patch (He et al., 2022)
FEW_PATCHES = 36  # with fewer, three quarters hide nearly everything
LONG_SEQUENCE = 64  # patches up to which the decoder has one block
SMALL_IMAGE = 64  # pixels up to which all views have the full size
TINY_IMAGE = 16  # pixels up to which crops stay large
HOG = 0.9  # weight of oriented gradients: linear probes on CIFAR-10 gain 3 to 5 points


def open_images(
    data: str, columns: Columns, labels: LabelKind | None, world: World
) -> tuple[Source, str]:
    """Opens images with the labels that they have, or without; and says which."""

    def find_labels(kind: LabelKind | None) -> tuple[LabelKind | None, str]:
        try:
            source = open_data(data, columns=columns, labels=kind, progress=world.is_leader)
        except MissingLabel:
            return find_labels("partial")
        except UserError as error:
            open_data(data, columns=columns, labels="none", progress=world.is_leader)
            return "none", f"labels: none ({error})"
        check_split_names(source)
        if NO_CLASS in source.ignored.values():
            return "none", "labels: none, as some images are not in a class folder"
        return kind, "labels: only measure the features; training does not see them"

    kind, why = world.on_leader(lambda: (labels, "") if labels else find_labels(None))
    source = open_on_all_ranks(data, columns, kind, world, pretraining=True)
    if world.is_leader:
        warn_of_ignored(source)
    return source, why


def check_split_names(source: Source) -> None:
    """Raises if a class folder may be a split, whose images would be used against its name."""
    if (name := find_split_class(source)) is None:
        return
    advice = "move the training images into a folder train"
    if SPLIT_ALIASES[name.casefold()] == "train":
        advice = f"`data.labels='none'` to use the images of {name} alone"
    raise UserError(
        f"{name} of {source.path} may be a class or a split; set `data.labels='single'` if each "
        f"folder is a class, or {advice}"
    )


def warn_of_ignored(source: Source) -> None:
    """Says which images a pretraining does not use, though it needs no labels."""
    unused = [name for name, why in source.ignored.items() if why == BESIDE_TRAINING]
    if unused:
        log.warning(
            f"ignored {format_count(len(unused), 'image')} beside the split folders, such as "
            f"{unused[0]}; move them into train/ to learn from them"
        )


def choose_pretraining(
    summary: auto.DataSummary,
    method: Method,
    *,
    model: str | None = None,
    requested: Mapping[str, Any] | None = None,
    start: tuple[str, ViTConfig, Preprocess] | None = None,
    minutes: float | None = None,
    epochs: int | None = None,
    steps: int = 0,
    batch: int | None = None,
    device: str = "cpu",
    processes: int = 1,
) -> auto.Choice:
    """The settings for learning without labels; `start` names the weights to start from.

    The choice suits the architecture with the changes that are `requested`, but does not contain
    them.
    """
    rate = auto.training_rate(device, processes)
    wanted = steps * (batch or auto.batch_size(summary)) / summary.images if steps else epochs
    if start is not None:
        model, vit = start[0], start[1]
    elif model is not None:
        vit = auto.named_vit(summary, model)
    else:
        model, vit = auto.choose_model(summary, device, rate, minutes, wanted)
    channels = vit.channels if start is not None else summary.channels
    if vit.distilled:
        raise UserError(f"{model} has a distillation token, which needs labels; choose another")
    vit = replace(vit, channels=channels, classes=summary.classes, head="none")
    chosen = settings_to_dict(vit)
    vit = settings_from_dict(ViTConfig, {**chosen, **(requested or {})}, "vit.")
    pretrain, why = choose_method(summary, vit, method)
    expected = auto.expected_epochs(summary, vit, rate, minutes, wanted)
    if method == "views" and minutes is not None:
        expected /= pretrain["views"]
    augment = choose_augment(summary, method)
    reasons = [
        f"image {vit.size[0]}: {vit.patches} patches of {vit.patch} x {vit.patch}",
        f"model {model}: {auto.explain_model(vit)}; about {expected:.3g} epochs expected",
        *why,
        f"augmentation: {describe_augment(augment, method)}",
        *([] if start else ["normalisation: mean and std of the training images"]),
    ]
    decay = vit.small_stem and method == "masked"
    train = choose_optimizer(summary, expected, start is not None, decay, reasons)
    if minutes is None:
        train["epochs"] = max(1, round(expected))
        reasons.append(f"epochs {train['epochs']}: {'requested' if wanted else 'the default'}")
    settings = {
        "model": model,
        "vit": chosen,
        "train": train,
        "data": {"augment": settings_to_dict(augment), **label_settings(summary)},
        "preprocess": choose_preprocess(summary, vit, start and start[2]),
        "pretrain": pretrain,
    }
    return auto.Choice(settings=settings, reasons=reasons)


def label_settings(summary: auto.DataSummary) -> dict[str, Any]:
    """How a resume opens the data: as it was found, unless each image has one label."""
    return {} if summary.labels == "single" else {"labels": summary.labels}


def choose_preprocess(
    summary: auto.DataSummary, vit: ViTConfig, expected: Preprocess | None
) -> dict[str, Any]:
    """What the weights expect; without weights, mean and std are measured later."""
    if expected is not None:
        return expected.to_dict()
    crop = auto.choose_crop(summary, vit)
    return {"channels": vit.channels, "pixels": summary.pixels, "crop": crop}


def choose_method(
    summary: auto.DataSummary, vit: ViTConfig, method: Method
) -> tuple[dict[str, Any], list[str]]:
    """The settings of the method, and why."""
    if method == "views":
        return choose_views(summary, vit)
    if method == "teacher":
        return {"method": "teacher"}, [
            "method teacher: its features are distilled through a projection"
        ]
    half = 32 * max(1, round(vit.width / 64))  # of the backbone's width, about
    width = min(half, RANGES["decoder_width"][1])
    chosen = PretrainConfig(
        mask=0.75 if vit.patches >= FEW_PATCHES else 0.6,
        decoder_depth=1 if vit.patches <= LONG_SEQUENCE else 3,
        decoder_width=width if vit.patches <= LONG_SEQUENCE else max(width, 128),
        normalise=vit.patch >= LARGE_PATCH,
        hog=HOG,
    )
    stem = "" if vit.stem == "patch" else " (all but a rectangle, as the stem has convolutions)"
    target = " normalised" if chosen.normalise else ""
    why = [
        f"method masked: {chosen.mask:.0%} of the patches are masked{stem}; their{target} "
        f"pixels (MAE) and their oriented gradients (MaskFeat) are predicted",
        f"decoder: {chosen.decoder_depth} block{'s' * (chosen.decoder_depth > 1)} of width "
        f"{chosen.decoder_width}, discarded at the end",
    ]
    return settings_to_dict(chosen), why


def choose_views(summary: auto.DataSummary, vit: ViTConfig) -> tuple[dict[str, Any], list[str]]:
    """Crops of one size for small images; two large and six small ones for others."""
    small = max(vit.size) <= SMALL_IMAGE
    photos = summary.channels == 3 and summary.pixels == "uint8"
    chosen = PretrainConfig(
        method="views",
        views=4 if small else 2,
        local_views=0 if small else 6,
        crop=0.5 if max(vit.size) <= TINY_IMAGE else 0.2,
        flip=0.0 if summary.channels == 1 else 0.5,
        colour=0.4 if photos else 0.0,
    )
    many = f"{chosen.views} crops" + (f" and {chosen.local_views} small ones" if not small else "")
    why = (
        f"method views: {many} of an image have equal features, and all follow a Gaussian (LeJEPA)"
    )
    return settings_to_dict(chosen), [why]


def choose_augment(summary: auto.DataSummary, method: Method) -> Augment:
    """Crops and flips where they do not change what an image is; views draw their own."""
    if method == "views":
        return Augment()
    if summary.channels == 1:
        return AUGMENT_PRESETS["gentle digits"]
    if method == "teacher":
        return AUGMENT_PRESETS["light"]
    return Augment(flip=0.5, scale=0.5)


def describe_augment(augment: Augment, method: Method) -> str:
    if method == "views":
        return "that of the views"
    if augment.scale < 1:
        return "flips, crops of 50% of the area and more"
    if augment.flip:
        return "flips and shifts"
    return "very small shifts and rotations; grey images may be digits, which flips would change"


def choose_optimizer(
    summary: auto.DataSummary,
    epochs: float,
    pretrained: bool,
    decay: bool,
    reasons: list[str],
) -> dict[str, Any]:
    """Optimizer and averaging; appends to `reasons`."""
    batch = auto.batch_size(summary)
    lr = 1e-3 if pretrained else 5e-3
    steps = epochs * summary.images / batch
    reasons.append(f"optimizer muon, learning rate {lr:g}, batch {batch}; EMA weights")
    train = {"batch": batch, "optimizer": "muon", "lr": lr, "schedule": "cosine"}
    if decay:
        train |= auto.choose_weight_decay(reasons)
    return train | {"ema": auto.choose_ema_decay(steps)}
