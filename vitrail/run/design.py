"""What `train` would do with a data set: the one place that composes its recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from vitrail.data.config import AUGMENT_PRESETS, Augment, Preprocess
from vitrail.data.open import resolve_data
from vitrail.data.source import Source, is_labelled
from vitrail.data.sources.catalogue import DATASETS
from vitrail.data.sources.shards import ShardSource
from vitrail.data.sources.store_cache import copy_limit
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.cost import count_macs
from vitrail.pretraining.config import JointConfig
from vitrail.run import auto, fine_tuning
from vitrail.run.build import check_recipe, load_for_fine_tuning
from vitrail.run.recipe import (
    Recipe,
    Tune,
    check_settings,
    flatten_settings,
    locate_weights,
    merge_settings,
    settings_from_dict,
    settings_to_dict,
)
from vitrail.run.request import AUTO, NONE, Request
from vitrail.run.semi_supervised import (
    choose_joint,
    labelled_fraction,
    plan_joint,
    step_cost,
    use_unlabelled,
)
from vitrail.run.speed import measure_speed, measure_training_speed
from vitrail.run.teacher import CALLABLE, sees_views
from vitrail.run.unlabelled import choose_pretraining
from vitrail.training.learner import training_dtype
from vitrail.zoo.load import LoadedModel
from vitrail.zoo.metadata import Metadata
from vitrail.zoo.suggest import FoundWeights, Unreachable, find_weights

PHOTO_SIDE = 96  # pixels on the short side from which images start from published weights
PHOTO_CHANNELS = (1, 3)
OWN_LR, OWN_LAYER_DECAY = 1 / 3, 0.75  # after a pretraining on the same images
PIXEL_CHANGES = tuple(name for name in settings_to_dict(Augment()) if name not in ("flip", "mixup"))
CHANGES_ANSWER = ("scale", "policy", "erase", "mixup", "cutmix")  # of the augmentation
SCRATCH_COST = "on photos, training from scratch usually costs 20 to 50 points of accuracy"


@dataclass(frozen=True, kw_only=True)
class Design:
    recipe: Recipe
    reasons: list[str]  # one line per choice; the first two describe the data and the device
    settings: dict[str, Any]  # what was chosen from the data, without the request's own settings
    measured: list[str]  # mean, std: to be computed from the training images once they are decoded


def design_recipe(
    source: Source,
    request: Request,
    device: torch.device,
    processes: int = 1,
    *,
    download: bool = True,
    images: int | None = None,
) -> Design:
    """The complete recipe: chosen from the data, changed by the request; and why.

    Raises the `UserError` that training would end with, if it cannot work. Without `download`,
    weights that are only on the hub stay there: the plan follows from the table that lists them.
    `images` is the number of training images if the source is only a sample of them.
    """
    check_settings(Recipe, request.settings)
    check_teacher_request(request)
    summary = auto.summarise(source)
    if images is not None:
        summary = replace(summary, images=images)
    requested = requested_settings(request)
    if request.method is not None:
        choice = design_pretraining(summary, request, requested, device, processes)
        if request.method == "teacher":
            keep_whole_images(choice, requested)
        return compose_design(source, request, requested, summary, choice, device, [], processes)
    if not is_labelled(source):
        raise UserError(f"{source.name} has no labels; `vitrail pretrain` learns without them")
    start, why = choose_start(summary, request, device, download)
    if start is None and requested_tune(request) not in (AUTO, "all"):
        raise UserError(
            f"`tune` {requested_tune(request)} changes a part of pretrained weights, and this run "
            f"starts from scratch; give `weights`, or omit `tune`"
        )
    if start is None:
        choice = design_from_scratch(source, summary, request, requested, device, processes)
    else:
        choice = design_fine_tuning(summary, request, requested, start, device, processes)
    frozen = requested["train"].get("frozen", choice.settings["train"].get("frozen", 0))
    if (teacher := request.asks_teacher) is not None:
        name = teacher if isinstance(teacher, str) else CALLABLE
        if not sees_views(name, device, frozen):
            keep_whole_images(choice, requested)
    if frozen:
        keep_cached_views(choice, requested)
    return compose_design(source, request, requested, summary, choice, device, why)


def check_teacher_request(request: Request) -> None:
    """Raises for settings of a teacher that is missing, or that exclude one."""
    settings = request.settings
    if request.asks_teacher is None:
        if "teacher" in settings:
            raise UserError("[teacher] names no teacher; set teacher.weights, or give `teacher`")
    elif settings.get("joint", {"ratio": 0}).get("ratio") != 0:
        raise UserError(
            "[joint] uses images without labels, which a training with a teacher does not; set "
            "`joint.ratio=0`, or omit `teacher`"
        )


def keep_whole_images(choice: auto.Choice, requested: Mapping[str, Any]) -> None:
    """Restricts the augmentation to what does not change the answer of a teacher.

    It is asked once about each whole image and its mirror image, so that crops, mixtures and other
    colours would get the answer to another image.
    """
    dropped = drop_augmentation(
        choice,
        requested,
        CHANGES_ANSWER,
        "changes images, and the cached predictions of the teacher are for whole ones; omit it, "
        "or omit `teacher`",
    )
    if dropped:
        chosen = choice.settings["data"]["augment"]
        chosen["shift"] = max(chosen["shift"], AUGMENT_PRESETS["light"].shift)
        choice.reasons.append(
            f"augmentation with a teacher: flips and shifts, without {', '.join(dropped)}, as its "
            f"predictions are for whole images"
        )


def keep_cached_views(choice: auto.Choice, requested: Mapping[str, Any]) -> None:
    """Restricts the augmentation to what can be applied to cached tokens: flips and mixup."""
    dropped = drop_augmentation(
        choice,
        requested,
        PIXEL_CHANGES,
        "changes pixels, and frozen blocks are computed once and cached; omit it, or learn all "
        "blocks with `tune` all and `train.frozen=0`",
    )
    if dropped:
        choice.reasons.append(
            f"augmentation of cached blocks: without {', '.join(dropped)}, which change pixels"
        )


def requested_augmentation(requested: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Those of these fields of the augmentation that a request sets."""
    plain = settings_to_dict(Augment())
    asked = requested.get("data", {}).get("augment", {})
    return [name for name in names if asked.get(name, plain[name]) != plain[name]]


def drop_augmentation(
    choice: auto.Choice, requested: Mapping[str, Any], names: Sequence[str], why: str
) -> list[str]:
    """Resets these fields of the augmentation; returns those that were chosen, refuses requested
    ones.
    """
    plain = settings_to_dict(Augment())
    if wrong := requested_augmentation(requested, names):
        raise UserError(f"data.augment.{wrong[0]} {why}")
    chosen = choice.settings["data"]["augment"]
    dropped = [name for name in names if chosen[name] != plain[name]]
    chosen.update({name: plain[name] for name in dropped})
    return dropped


def compose_design(
    source: Source,
    request: Request,
    requested: Mapping[str, Any],
    summary: auto.DataSummary,
    choice: auto.Choice,
    device: torch.device,
    why: list[str],
    processes: int = 1,
) -> Design:
    """The chosen settings, changed by those requested, and checked."""
    adapt_to_store(choice, source, requested)
    settings = merge_settings(choice.settings, requested)
    precision = settings["train"].get("precision", AUTO)
    reasons = [f"{source.name}: {summary}", explain_device(device, request.device, precision), *why]
    reasons += choice.reasons
    if changed := list_changes(choice.settings, requested):
        reasons.append(f"requested: {', '.join(changed)}")
    measured = [name for name in ("mean", "std") if name not in settings["preprocess"]]
    settings["source"] = locate_source(source, request.data)
    if "size" not in request.settings.get("preprocess", {}):
        size = {"size": settings["vit"]["image"]}
        settings["preprocess"] = merge_settings(settings["preprocess"], size)
    recipe = settings_from_dict(Recipe, settings)
    if request.method is None and request.has_unlabelled and not recipe.uses_unlabelled:
        explain_unused(reasons, request, recipe)
    check_recipe(recipe, summary, processes)
    return Design(recipe=recipe, reasons=reasons, settings=choice.settings, measured=measured)


def explain_unused(reasons: list[str], request: Request, recipe: Recipe) -> None:
    """Says that images without labels are not used, unless a reason says so."""
    if any(reason.startswith("few labels") for reason in reasons):
        return
    why = "a training from scratch uses them only with joint.ratio above 0"
    if request.asks_teacher is not None:
        why = "a teacher teaches labelled images alone"
    elif recipe.weights:
        why = "a training from weights learns from labelled images alone"
    reasons.append(f"few labels: images without labels are not used: {why}")


def adapt_to_store(choice: auto.Choice, source: Source, requested: Mapping[str, Any]) -> None:
    """Shuffles windows of shards that are in a store and exceed the local copy."""
    if not isinstance(source, ShardSource) or isinstance(source.path, Path):
        return
    size, limit = int(source.sizes.sum()), copy_limit()
    if size <= limit or "shuffle" in requested.get("data", {}):
        return
    data = choice.settings.setdefault("data", {})
    data["shuffle"] = "windows"
    how = ""
    if data.get("balanced"):
        data["balanced"] = False
        choice.settings["train"]["class_weights"] = True
        how = " and class weights instead of balanced sampling"
    choice.reasons.append(
        f"order: windows of shards{how}, as {size / 1e9:.1f} GB exceed the {limit / 1e9:.1f} GB "
        f"of the local copy (VITRAIL_STORE_GB)"
    )


def design_pretraining(
    summary: auto.DataSummary,
    request: Request,
    requested: Mapping[str, Any],
    device: torch.device,
    processes: int,
) -> auto.Choice:
    """The choice for a run that learns without labels, from scratch unless weights are given."""
    assert request.method is not None
    start, train = None, requested["train"]
    if request.start_from not in (AUTO, NONE):
        weights = locate_start(request)
        vit = {"head": "none", **request.settings.get("vit", {})}
        loaded = load_for_fine_tuning(summary, weights, {**request.settings, "vit": vit})
        assert loaded.preprocess is not None
        name = loaded.metadata.name or Path(weights).name
        fine_tuning.check_channels(loaded.model.config, summary, weights)
        start = name, loaded.model.config, loaded.preprocess
    choice = choose_pretraining(
        summary,
        request.method,
        model=request.model or request.settings.get("model"),
        requested=request.settings.get("vit"),
        start=start,
        minutes=request.minutes,
        epochs=train.get("epochs"),
        steps=train.get("steps", 0),
        batch=train.get("batch"),
        device=device.type,
        processes=processes,
    )
    if start is not None:
        choice.settings["weights"] = weights
        adopt_pixels(choice, summary, loaded.report.adapted)
    return choice


def locate_start(request: Request) -> str:
    """The weights that the caller names, as an absolute path if they are on this machine."""
    start = request.start_from
    if request.model:
        raise UserError(
            f"`model` {request.model} and `weights` {start} both name a model; give one of them"
        )
    return locate_weights(start)


def locate_source(source: Source, data: str) -> str:
    """The path or built-in name that opens the data again; images in memory have neither."""
    if source.path is None and source.name not in DATASETS:
        return f"{source.name} (in memory)"
    return resolve_data(data)


def requested_settings(request: Request) -> dict[str, Any]:
    """The settings of the request, with its seed and epochs among them, without its weights."""
    train = dict(request.settings.get("train", {}))
    if request.seed is not None:
        train["seed"] = request.seed
    if request.epochs is not None:
        train["epochs"] = request.epochs
    requested = {**request.settings, "train": train}
    for name in ("weights", "tune"):
        requested.pop(name, None)
    if request.method is None and "pretrain" in requested:
        raise UserError("the recipe is that of a pretraining; repeat it with `vitrail pretrain`")
    return requested


def choose_start(
    summary: auto.DataSummary, request: Request, device: torch.device, download: bool
) -> tuple[FoundWeights | None, list[str]]:
    """The weights to start from, None for training from scratch; and why."""
    start = request.start_from
    if start == NONE:
        why = "from scratch: requested"
        return None, [why] if request.weights == NONE else []
    if start != AUTO:
        return FoundWeights(weights=locate_start(request), published=None, reason=""), []
    if summary.channels not in PHOTO_CHANNELS:
        why = f"published weights are for photos, not for {summary.channels} channels"
        return None, [f"from scratch: {why}"]
    if summary.side < PHOTO_SIDE:
        why = f"published weights need photos, of {PHOTO_SIDE} pixels on the short side or more"
        return None, [f"from scratch: {why}"]
    try:
        found = find_weights(device.type, request.minutes, download=download)
    except Unreachable as error:
        return None, [f"from scratch: {error}; {SCRATCH_COST}"]
    return found, [found.reason]


def starts_from_published(summary: auto.DataSummary) -> bool:
    """Whether images of this kind start from published weights."""
    return summary.channels in PHOTO_CHANNELS and summary.side >= PHOTO_SIDE


def design_from_scratch(
    source: Source,
    summary: auto.DataSummary,
    request: Request,
    requested: Mapping[str, Any],
    device: torch.device,
    processes: int,
) -> auto.Choice:
    train, minutes, joint, why = requested["train"], request.minutes, None, ""
    model, vit = request.model or request.settings.get("model"), None
    if request.lacks_labels and request.asks_teacher is None:
        labelled = labelled_fraction(source, request)
        joint = request_joint(summary, labelled, requested)
        if joint.ratio:
            everything = replace(summary, images=round(summary.images / labelled))
            joint, name, shape = design_joint(
                joint, everything, summary, request, model, device.type, processes
            )
            if joint.ratio:
                model, vit = name, shape
            else:
                why = (
                    "few labels: images without labels are not used: so short a run learns more "
                    "from labelled ones; set joint.ratio to 3 to use them"
                )
        minutes = None if minutes is None else minutes / step_cost(joint)
    choice = auto.choose_from_scratch(
        summary,
        model=model,
        vit=vit,
        requested=request.settings.get("vit"),
        minutes=minutes,
        epochs=train.get("epochs"),
        steps=train.get("steps", 0),
        batch=train.get("batch"),
        device=device.type,
        processes=processes,
    )
    if joint is not None and joint.ratio:
        use_unlabelled(choice, joint, summary.images)
    else:
        if why:
            choice.reasons.append(why)
        choice.reasons.append(f"expect: {recorded_results(summary)}")
    return choice


def design_joint(
    joint: JointConfig,
    everything: auto.DataSummary,
    summary: auto.DataSummary,
    request: Request,
    model: str | None,
    device: str,
    processes: int,
) -> tuple[JointConfig, str, ViTConfig]:
    """The joint loss, its `ratio` 0 if the time is too short for it, and a model with its name.

    `summary` describes the labelled images, `everything` all of them.
    """
    minutes, rate = request.minutes, auto.training_rate(device, processes)
    if model is not None:
        name, vit = model, auto.named_vit(summary, model)
    else:
        name, vit = auto.choose_model(everything, device, rate, minutes, None)
    if minutes is not None:
        if device == "cpu":
            speed = processes * measure_training_speed(replace(vit, channels=summary.channels))
        else:
            speed = auto.images_per_second(vit, rate)
        if vit.small_stem:  # a smaller one needs no less time
            speed *= min(1.0, count_macs(vit) / auto.AFFORDABLE)
        wanted = request.settings.get("joint", {})
        joint = plan_joint(joint, summary.images, 60 * minutes * speed, wanted)
    return joint, name, vit


def request_joint(
    summary: auto.DataSummary, labelled: float, requested: Mapping[str, Any]
) -> JointConfig:
    """How images without labels are used: chosen from the data, changed by the request."""
    batch = requested["train"].get("batch")
    chosen = settings_to_dict(choose_joint(summary, labelled, batch))
    return settings_from_dict(JointConfig, {**chosen, **requested.get("joint", {})}, "joint.")


def recorded_results(summary: auto.DataSummary) -> str:
    """The accuracies of recorded runs on data of this kind; a band, not a promise."""
    if summary.side >= PHOTO_SIDE:
        return "from scratch, 46 % in 5 minutes was recorded on 3,068 photos of 10 kinds of clothes"
    if summary.channels == 1:
        return (
            "from scratch, 92.5 % was recorded on the 54,000 training images of Fashion-MNIST in 5 "
            "minutes, 99.5 % on MNIST"
        )
    return (
        "from scratch, 87.6 % was recorded on the 45,000 training images of CIFAR-10 in 5 minutes, "
        "90.0 % in 30"
    )


def requested_tune(request: Request) -> str:
    """What learns, as requested; "auto" if nothing was."""
    if request.tune == AUTO:
        return str(request.settings.get("tune", AUTO))
    if request.tune not in get_args(Tune):
        known = ", ".join(get_args(Tune))
        raise UserError(f"`tune` {request.tune!r} is unknown; choose auto or one of {known}")
    return request.tune


def estimate_speed(vit: ViTConfig, device: torch.device) -> float:
    """Images per second of a forward pass, from the typical speed of such a device."""
    return auto.device_rate(device.type) / count_macs(vit)


def design_fine_tuning(
    summary: auto.DataSummary,
    request: Request,
    requested: Mapping[str, Any],
    start: FoundWeights,
    device: torch.device,
    processes: int,
) -> auto.Choice:
    train = requested["train"]
    adapted: list[str] = []
    if start.size and start.published is not None:  # still on the hub
        name, vit = start.published.name, start.published.vit
        preprocess: Preprocess | None = Preprocess(size=vit.image, **start.published.preprocess)
        speed = estimate_speed(vit, device)
    else:
        loaded = load_for_fine_tuning(summary, start.weights, request.settings)
        if loaded.metadata.pretraining is not None:
            return design_from_own(
                summary, request, requested, loaded, start.weights, device, processes
            )
        name = loaded.metadata.name or Path(start.weights).name
        vit, preprocess = loaded.model.config, loaded.preprocess
        adapted = loaded.report.adapted
        speed = estimate_speed(vit, device)
        if device.type == "cpu" and request.minutes is not None:
            speed = measure_speed(loaded.model)
    fine_tuning.check_channels(vit, summary, start.weights)
    timed = request.minutes is not None or train.get("steps", 0) > 0
    seconds = None if request.minutes is None else 60 * request.minutes
    tune = requested_tune(request)
    if tune == AUTO and requested_augmentation(requested, PIXEL_CHANGES):
        tune = "all"  # cached features would not show them
    choice = fine_tuning.choose_fine_tuning(
        summary,
        name,
        vit,
        preprocess,
        train.get("epochs"),
        timed,
        tune=tune,
        budget=fine_tuning.Budget(seconds=seconds, speed=speed),
    )
    choice.settings["weights"] = start.weights
    adopt_pixels(choice, summary, adapted)
    return choice


def design_from_own(
    summary: auto.DataSummary,
    request: Request,
    requested: Mapping[str, Any],
    loaded: LoadedModel,
    weights: str,
    device: torch.device,
    processes: int,
) -> auto.Choice:
    """The choice for weights of a pretraining: that from scratch, with lower rates."""
    if requested_tune(request) == AUTO or requested_tune(request) == "all":
        train = requested["train"]
        choice = auto.choose_from_scratch(
            summary,
            model=loaded.metadata.name,
            vit=loaded.model.config,
            minutes=request.minutes,
            epochs=train.get("epochs"),
            steps=train.get("steps", 0),
            batch=train.get("batch"),
            device=device.type,
            processes=processes,
        )
        assert loaded.preprocess is not None
        adapt_to_own_weights(choice, loaded.metadata, loaded.preprocess)
        adopt_pixels(choice, summary, loaded.report.adapted)
        start_from_probe(choice, summary, loaded.model.config, request.minutes, device)
        choice.settings["weights"] = weights
        return choice
    raise UserError(
        f"{weights} was pretrained without labels, so all its weights must be trained; omit "
        f"`tune`, or fit a classifier on its features with `vitrail head`"
    )


def adapt_to_own_weights(choice: auto.Choice, metadata: Metadata, preprocess: Preprocess) -> None:
    """Lowers the rates of a choice from scratch, which the pretrained blocks would not survive."""
    train = choice.settings["train"]
    train["lr"] = round(train["lr"] * OWN_LR, 5)
    train["layer_decay"] = OWN_LAYER_DECAY
    choice.settings["preprocess"] = preprocess.to_dict()
    choice.settings["vit"]["channels"] = preprocess.channels
    choice.reasons[:] = [
        line
        for line in choice.reasons
        if not line.startswith(("normalisation", "optimizer", "stem", "expect"))
    ]
    choice.reasons.append(
        f"weights: pretrained on {metadata.data.name}, method {metadata.pretraining}; the recipe "
        f"from scratch with learning rate {train['lr']:g} and layer decay {OWN_LAYER_DECAY}"
    )
    choice.reasons.append("preprocessing: that of the pretraining")


def start_from_probe(
    choice: auto.Choice,
    summary: auto.DataSummary,
    vit: ViTConfig,
    minutes: float | None,
    device: torch.device,
) -> None:
    """Lets the head start from a linear probe; from zeros it is slow on features so alike."""
    seconds = None if minutes is None else 60 * minutes
    budget = fine_tuning.Budget(seconds=seconds, speed=estimate_speed(vit, device))
    if images := fine_tuning.probe_images(summary, budget):
        choice.settings["train"]["probe"] = images
        choice.reasons.append(
            f"head: starts from a linear probe on the features of {images:,} images, not from "
            f"zeros (Kumar et al., 2022)"
        )


def adopt_pixels(choice: auto.Choice, summary: auto.DataSummary, adapted: list[str]) -> None:
    """Drops the normalisation of the weights if the data has other channels or pixel types."""
    chosen = choice.settings["preprocess"]
    new_channels = any("channels" in change for change in adapted) and chosen["channels"] > 3
    if chosen.get("pixels", "uint8") == summary.pixels and not new_channels:
        return
    chosen["pixels"] = summary.pixels
    for name in ("mean", "std"):
        chosen.pop(name, None)
    choice.reasons.append(
        "normalisation: mean and std of the training images, as their pixels differ from those "
        "that the weights were trained on"
    )


def explain_device(device: torch.device, requested: str, precision: str) -> str:
    why = "requested"
    if requested == "auto":
        why = "no GPU is available" if device.type == "cpu" else "a GPU is available"
    if precision == AUTO and training_dtype(precision, device) == torch.bfloat16:
        why += "; it trains in bfloat16, for which it has units"
    return f"device {device.type}: {why}"


def list_changes(chosen: Mapping[str, Any], requested: Mapping[str, Any]) -> list[str]:
    """Settings in which a request differs from what was chosen, such as "train.batch 64"."""
    ours = flatten_settings(settings_to_dict(Recipe())) | flatten_settings(chosen)
    theirs = flatten_settings(requested)
    theirs.pop("source", None)
    return [f"{key} {value}" for key, value in theirs.items() if ours.get(key) != value]
