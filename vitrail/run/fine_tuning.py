"""Chooses the settings for fine-tuning published weights, with a reason for each."""

from dataclasses import dataclass, replace
from typing import Any

from vitrail.data.config import AUGMENT_PRESETS, Augment, Preprocess
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.cost import count_macs, count_parameters
from vitrail.run import auto
from vitrail.run.recipe import settings_to_dict

SCALES = (1.0, 6 / 7, 5 / 7, 4 / 7)  # of the resolution in training: 224, 192, 160, 128 pixels
TEST_SCALE = 1.25  # resolution of evaluation over that of training (Touvron et al., 2019, FixRes)
ENOUGH_EPOCHS = 2.5  # with fewer, a lower resolution buys more
MANY_EPOCHS = 8  # from here on, stronger crops and label smoothing pay off
LEAST_EPOCHS = 0.3  # with fewer, only the head learns
FEW_IMAGES = 30  # per class; with fewer, changing the features overfits
LARGE_MODEL = 150e6  # parameters from which LoRA saves memory that a machine may not have
FEW_FOR_RANK = 1000  # images below which factors of rank 4 are enough
START_SECONDS = 8.0  # to start, open the data and write the results
EVALUATED = 0.35  # images of validation and test over those of training, roughly
HEAD_EPOCHS = 30  # on cached features
MAX_PROBE = 20_000  # images of the linear probe


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The time of a fine-tuning, and what it buys."""

    seconds: float | None  # None: as long as the epochs take
    speed: float  # images per second of a forward pass at the full resolution

    def epochs(self, images: int, vit: ViTConfig, size: int) -> float:
        """Epochs at this training size that fit, after the probe and the evaluations."""
        assert self.seconds is not None
        test = evaluation_size(vit, size)
        forward = images / self.speed
        fixed = START_SECONDS + forward * (
            relative_cost(vit, size) + EVALUATED * relative_cost(vit, test)
        )
        return (self.seconds - fixed) / (auto.STEP_COST * forward * relative_cost(vit, size))


def choose_fine_tuning(
    summary: auto.DataSummary,
    name: str,
    vit: ViTConfig,
    preprocess: Preprocess | None,
    epochs: int | None,
    timed: bool = False,
    tune: str = "auto",
    budget: Budget | None = None,
) -> auto.Choice:
    """The settings for fine-tuning published weights, with their own preprocessing.

    `preprocess` is None if the weight file does not store it; the user then has to give it.
    `timed`: minutes or steps give the length of the training, not epochs.
    """
    vit = replace(vit, classes=summary.classes, head="linear")
    budget = budget or Budget(seconds=None, speed=auto.CPU_RATE / count_macs(vit))
    size, expected = choose_size(summary, vit, budget, epochs)
    tune, why = choose_tune(summary, vit, tune, expected)
    if tune == "head":
        size, expected = vit.size[0], float(HEAD_EPOCHS)
    reasons = [
        f"model {name}: that of the weights, with a new head for {summary.classes} classes",
        f"tune {tune}: {why}",
        f"preprocessing: {explain_preprocess(preprocess)}",
    ]
    train = choose_schedule(summary, vit, tune, expected, budget, reasons)
    data = auto.choose_data(summary, "none") | choose_crops(summary, tune, expected, reasons)
    test = evaluation_size(vit, size)
    if size != test:
        data["train_size"] = size
        vit = replace(vit, image=test)
        reasons.append(
            f"image {size} in training, {test} in evaluation: about {expected:.1f} epochs fit"
        )
    if tune == "head" or not timed:
        train["epochs"] = epochs or max(1, round(expected))
    if not timed:
        why = "requested" if epochs else "fine-tuning needs few"
        reasons.append(f"epochs {train['epochs']}: {why}")
    settings = {
        "model": name,
        "tune": tune,
        "vit": settings_to_dict(vit),
        "train": train | auto.choose_class_weights(summary),
        "data": data,
        "preprocess": preprocess.to_dict() if preprocess else {"channels": vit.channels},
    }
    reasons += auto.explain_balancing(summary)
    return auto.Choice(settings=settings, reasons=reasons)


def explain_preprocess(preprocess: Preprocess | None) -> str:
    if preprocess is None:
        return "as requested; the weight file does not store its own"
    return "that of the weights, which expect it"


def choose_size(
    summary: auto.DataSummary, vit: ViTConfig, budget: Budget, epochs: int | None
) -> tuple[int, float]:
    """The training resolution, and the epochs that are expected: the highest with enough of them.

    Images of other proportions than square, or of a time without limit, keep the resolution of
    the weights.
    """
    full = vit.size[0]
    if budget.seconds is None or vit.size[0] != vit.size[1] or vit.positions == "none":
        return full, epochs or int(min(30, max(5, 10_000 / summary.images)))
    size = full
    for scale in SCALES:
        size = max(1, round(scale * full / vit.patch)) * vit.patch
        if budget.epochs(summary.images, vit, size) >= ENOUGH_EPOCHS:
            break
    return size, max(0.0, budget.epochs(summary.images, vit, size))


def evaluation_size(vit: ViTConfig, size: int) -> int:
    """A somewhat higher resolution than in training, at most that of the weights.

    Random crops show objects larger than they are in evaluation; more pixels make up for it.
    """
    return min(vit.size[0], round(TEST_SCALE * size / vit.patch) * vit.patch)


def relative_cost(vit: ViTConfig, size: int) -> float:
    """Multiply-adds at this resolution over those at the resolution of the weights."""
    return count_macs(replace(vit, image=size)) / count_macs(vit)


def choose_tune(
    summary: auto.DataSummary, vit: ViTConfig, tune: str, expected: float
) -> tuple[str, str]:
    """What learns, and why."""
    if tune != "auto":
        return tune, "requested"
    if summary.images < FEW_IMAGES * summary.classes:
        return "head", f"fewer than {FEW_IMAGES} images per class; cached features, no overfitting"
    if expected < LEAST_EPOCHS:
        return "head", "the time is too short for more; the features are computed once"
    if count_parameters(vit) > LARGE_MODEL:
        return (
            "lora",
            f"{count_parameters(vit) / 1e6:.0f} million parameters; low rank saves memory",
        )
    return "all", "enough images and time to change the features too"


def choose_schedule(
    summary: auto.DataSummary,
    vit: ViTConfig,
    tune: str,
    expected: float,
    budget: Budget,
    reasons: list[str],
) -> dict[str, Any]:
    """Batch size, learning rate and averaging; appends to `reasons`."""
    batch = min(32, auto.batch_size(summary))
    steps = max(1.0, expected * summary.images / batch)
    lr = {"all": 2e-4, "head": 5e-4, "proj": 5e-4, "lora": 1e-3}[tune]
    train: dict[str, Any] = {"batch": batch, "optimizer": "adamw", "lr": lr, "warmup": 0.1}
    train |= {"schedule": "linear", "weight_decay": 0.05, "probe": probe_images(summary, budget)}
    reasons.append(f"batch {batch}: few epochs need small batches to become enough steps")
    if train["probe"]:
        reasons.append(
            f"head: starts from a linear probe on the features of {train['probe']:,} images, "
            f"not from zeros (Kumar et al., 2022)"
        )
    if tune == "head":
        reasons.append(f"optimizer adamw, learning rate {lr:g}, on cached features")
        return train | {"frozen": vit.depth, "weight_decay": 0.0}
    train |= {"layer_decay": 0.75, "ema": round(min(0.999, max(0.8, 1 - 10 / steps)), 3)}
    if expected >= MANY_EPOCHS:
        train["smoothing"] = 0.1
    if tune == "lora":
        train["rank"] = 4 if summary.images < FEW_FOR_RANK else 8
    reasons.append(
        f"optimizer adamw, learning rate {lr:g}: low, and lower for early blocks (layer decay); "
        f"EMA weights"
    )
    return train


def probe_images(summary: auto.DataSummary, budget: Budget) -> int:
    """As many as the time allows; none if images have several labels, which softmax cannot fit."""
    if summary.labels == "multi":
        return 0
    if budget.seconds is None:
        return min(MAX_PROBE, summary.images)
    return min(MAX_PROBE, summary.images, max(64, int(budget.seconds * budget.speed)))


def choose_crops(
    summary: auto.DataSummary, tune: str, expected: float, reasons: list[str]
) -> dict[str, Any]:
    """Crops and flips: stronger crops for more epochs."""
    if tune == "head" and summary.channels == 1:
        reasons.append("augmentation none: the features are cached; flips would change digits")
        return {"augment": settings_to_dict(Augment())}
    if tune == "head":
        reasons.append("augmentation: flips only, as the features are cached")
        return {"augment": settings_to_dict(Augment(flip=0.5))}
    if summary.channels == 1:
        reasons.append("augmentation digits: small shifts and rotations; flips would change digits")
        return {"augment": settings_to_dict(AUGMENT_PRESETS["digits"])}
    scale = 0.35 if expected >= MANY_EPOCHS else 0.5
    reasons.append(f"augmentation: flips, crops of {scale:.0%} of the area and more")
    return {"augment": settings_to_dict(Augment(flip=0.5, scale=scale))}


def check_channels(vit: ViTConfig, summary: auto.DataSummary, weights: str) -> None:
    """Raises for weights of special sensors, unless the images come from such."""
    if vit.channels not in (1, 3, summary.channels):
        raise UserError(
            f"{weights} is for {vit.channels} channels, the images have {summary.channels}; "
            f"set `vit.channels={summary.channels}` to adapt its first layer, or use other weights"
        )
