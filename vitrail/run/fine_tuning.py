"""Chooses the settings for fine-tuning published weights, with a reason for each."""

from dataclasses import replace
from typing import Any

from vitrail.data.config import Preprocess
from vitrail.model.config import ViTConfig
from vitrail.run import auto
from vitrail.run.recipe import settings_to_dict


def choose_fine_tuning(
    summary: auto.DataSummary,
    name: str,
    vit: ViTConfig,
    preprocess: Preprocess | None,
    epochs: int | None,
    timed: bool = False,
) -> auto.Choice:
    """The settings for fine-tuning published weights, with their own preprocessing.

    `preprocess` is None if the weight file does not store it; the user then has to give it.
    `timed`: minutes or steps give the length of the training, not epochs.
    """
    batch = min(32, auto.batch_size(summary))
    augment, description = "light", "flips and shifts"
    if summary.channels == 1:
        augment, description = "digits", "small shifts and rotations; flips would change digits"
    train: dict[str, Any] = {"batch": batch, "optimizer": "adamw", "lr": 5e-4}
    train |= {"weight_decay": 0.05, "warmup": 0.1, "layer_decay": 0.75, "smoothing": 0.1}
    origin = "as requested; the weight file does not store its own"
    if preprocess is not None:
        origin = "that of the weights, which expect it"
    reasons = [
        f"model {name}: that of the weights, with a new head for {summary.classes} classes",
        f"preprocessing: {origin}",
        f"augmentation {augment}: {description}",
        f"batch {batch}: few epochs need small batches to become enough steps",
        "optimizer adamw, learning rate 0.0005: low, and lower for early blocks (layer decay)",
        *auto.explain_balancing(summary),
    ]
    if not timed:
        train["epochs"] = epochs or int(min(50, max(5, 20_000 / summary.images)))
        why = "requested" if epochs else "fine-tuning needs few"
        reasons.append(f"epochs {train['epochs']}: {why}")
    return auto.Choice(
        settings={
            "model": name,
            "vit": settings_to_dict(replace(vit, classes=summary.classes, head="linear")),
            "train": train | auto.choose_class_weights(summary),
            "data": auto.choose_data(summary, augment),
            "preprocess": preprocess.to_dict() if preprocess else {"channels": vit.channels},
        },
        reasons=reasons,
    )
