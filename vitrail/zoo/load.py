"""Loads weights of any known layout into a model, and reports what was changed or assumed."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from vitrail.data.config import NORMALISATIONS, Preprocess
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.zoo.adapters import ADAPTER_KEY, apply_adapter, read_adapter
from vitrail.zoo.architecture import HIDDEN_SETTINGS, Architecture, infer_architecture
from vitrail.zoo.file import check_architecture, read_metadata, read_tensors
from vitrail.zoo.files.lazy import FileContents
from vitrail.zoo.files.open import open_weights
from vitrail.zoo.layouts.layout import CheckpointConfig, MappedStateDict
from vitrail.zoo.layouts.mapping import map_tensors
from vitrail.zoo.locate import CheckpointFiles, locate_checkpoint
from vitrail.zoo.metadata import Metadata
from vitrail.zoo.state_dict import build_model
from vitrail.zoo.weights import Normalisation, find_published

log = logging.getLogger(__name__)

# Entries of the metadata that hold only for the weights that they were computed with.
MEASURED = ("temperature", "metrics", "reference", "calibration", "checksums")
ADAPTED = ("image", "channels", "classes", "head")  # what an adapter may change of its base
ADAPTABLE = ("image", "patch", "channels", "classes", "depth", "head")
TRAINING_ONLY = ("drop_path", "dropout", "attention_dropout")  # no tensor depends on them
DEFAULT_CROPS = {"half": 0.9, "imagenet": 0.875, "clip": 1.0}  # of most published weights
FULL_CROP_SIZE = 384  # pixels: published weights of at least this image size use no crop


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What happened to the tensors of a file."""

    source: str  # path or hub name as given
    format: str  # vitrail, timm, huggingface, torchvision, google
    loaded: int  # tensors of the file that became parameters
    resized: list[str]  # position embedding and patch kernel: old and new size
    adapted: list[str]  # classes, channels, depth, dtype: old and new value
    left_out: list[str]  # tensors that were not used, and why
    assumed: list[str]  # settings that the file does not state, and where they come from


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with everything that is known about using it."""

    model: ViT  # in evaluation mode
    classes: tuple[str, ...] | None  # None: unknown
    preprocess: Preprocess | None  # None: unknown
    metadata: Metadata  # of a Vitrail model file; empty for foreign files
    report: LoadReport


def load_weights(
    path: str | Path,
    *,
    vit: Mapping[str, Any] | None = None,
    preprocess: Normalisation | None = None,
) -> LoadedModel:
    """Loads a run folder, a weight file or folder of any known layout, or "hf:owner/name".

    `vit` holds settings of `ViTConfig` by name: those to which the weights are adapted (image,
    patch, channels, classes, depth, head), and those that no tensor shows, if the file does not
    state them (heads, mlp, eps, positions). `preprocess` names the mean and standard deviation
    that the weights expect, if neither config files nor the table of published weights do.
    """
    requested, source = dict(vit or {}), str(path)
    checkpoint = locate_checkpoint(path)
    contents = open_weights(checkpoint.weights)
    if ADAPTER_KEY in contents.metadata:
        return load_adapted(contents, requested, source)
    metadata = read_metadata(contents, source)
    if metadata is not None:
        mapped, architecture, config = read_own_file(contents, metadata, source)
    else:
        metadata = Metadata()
        mapped, architecture = read_foreign_file(contents, checkpoint, requested, source)
        config = checkpoint.config
    wanted = apply_settings(architecture.vit, requested, source)
    model, changes = build_model(mapped, architecture, wanted, source)
    if changes.resized or changes.adapted:  # they were measured on another model
        metadata = metadata.drop(*MEASURED)
    assumed = [*mapped.assumed, *architecture.assumed, *config.assumed]
    return LoadedModel(
        model=model,
        preprocess=find_preprocess(architecture, config, wanted, preprocess, assumed),
        classes=find_class_names(architecture, config, wanted, assumed, source),
        metadata=metadata,
        report=LoadReport(
            source=source,
            format=mapped.format,
            loaded=changes.loaded,
            resized=changes.resized,
            adapted=changes.adapted,
            left_out=[*mapped.left_out, *changes.left_out],
            assumed=assumed,
        ),
    )


def load_adapted(contents: FileContents, requested: Mapping[str, Any], source: str) -> LoadedModel:
    """The base weights of an adapter, found where its training found them, with its changes."""
    document = read_adapter(contents, source)
    vit = {name: getattr(document.vit, name) for name in ADAPTED}
    base = load_weights(document.base, vit={**vit, **requested})
    tensors = {name: tensor.read() for name, tensor in contents.tensors.items()}
    model = apply_adapter(base.model, tensors, document.base_checksum, source)
    return LoadedModel(
        model=model,
        classes=document.classes,
        preprocess=document.preprocess,
        metadata=Metadata(name=document.name),
        report=replace(base.report, source=source, loaded=len(tensors)),
    )


def read_own_file(
    contents: FileContents, metadata: Metadata, source: str
) -> tuple[MappedStateDict, Architecture, CheckpointConfig]:
    """A Vitrail model file, whose metadata states everything."""
    elements = sum(torch.Size(tensor.shape).numel() for tensor in contents.tensors.values())
    vit = check_architecture(metadata, elements, source)
    return (
        MappedStateDict(
            format="vitrail",
            chunks={name: {0: x} for name, x in read_tensors(contents, metadata).items()},
        ),
        Architecture(vit=vit, embedded_tokens=vit.class_tokens),
        CheckpointConfig(
            classes=metadata.classes or None,
            preprocess=metadata.preprocess.to_dict() if metadata.preprocess else None,
        ),
    )


def read_foreign_file(
    contents: FileContents, checkpoint: CheckpointFiles, requested: Mapping[str, Any], source: str
) -> tuple[MappedStateDict, Architecture]:
    mapped = map_tensors(contents, source)
    published = find_published(*checkpoint.config.names, *checkpoint.names)
    return mapped, infer_architecture(mapped, checkpoint.config, published, requested, source)


def apply_settings(old: ViTConfig, requested: Mapping[str, Any], source: str) -> ViTConfig:
    """The requested architecture, if the weights can be adapted to it."""
    names = [field.name for field in fields(ViTConfig)]
    changes = {}
    for name, value in requested.items():
        if name not in names:
            near = ", ".join(get_close_matches(name, names, n=3, cutoff=0.4)) or "image, classes"
            raise UserError(f"unknown model setting {name!r}; the nearest are {near}")
        if name in ADAPTABLE or name in TRAINING_ONLY:
            changes[name] = value
        elif getattr(old, name) != value:
            reason = (
                "set it only where the file does not state it"
                if name in HIDDEN_SETTINGS
                else "weights cannot be adapted to it"
            )
            raise UserError(
                f"{source} has {name} {getattr(old, name)}, not {value}; {reason}: "
                f"remove `vit.{name}`"
            )
    if changes.get("depth", old.depth) > old.depth:
        raise UserError(
            f"{source} has {old.depth} blocks, too few for depth {changes['depth']}; "
            f"lower `vit.depth`"
        )
    if old.stem != "patch" and changes.get("patch", old.patch) != old.patch:
        raise UserError(f"{source} has stem {old.stem} with patch {old.patch}; remove `vit.patch`")
    if "classes" in changes and "head" not in changes:
        keeps_head = old.head != "none" and changes["classes"] == old.classes
        changes["head"] = old.head if keeps_head else "linear"
    if old.distilled and changes.get("head") == "none":
        raise UserError(
            f"{source} has a distillation token, which only its two heads read; give weights "
            f"without one"
        )
    if changes.get("head", old.head) not in (old.head, "none", "linear"):
        raise UserError(f"{source} has no hidden layer before its head; use `vit.head='linear'`")
    return replace(old, **changes)


def find_preprocess(
    architecture: Architecture,
    config: CheckpointConfig,
    wanted: ViTConfig,
    requested: Normalisation | None,
    assumed: list[str],
) -> Preprocess | None:
    """The preprocessing that the weights expect: as requested, configured or published."""
    settings, published = config.preprocess, architecture.published
    if requested is not None:
        if requested not in NORMALISATIONS:
            choices = ", ".join(NORMALISATIONS)
            raise UserError(f"preprocess {requested!r} is unknown; choose one of {choices}")
        mean, std = NORMALISATIONS[requested]
        crop = DEFAULT_CROPS[requested] if min(wanted.size) < FULL_CROP_SIZE else 1.0
        defaults = {"crop": crop, "interpolation": "bicubic"}
        settings = {**defaults, **(settings or {}), "mean": mean, "std": std}
        assumed.append(f"preprocessing {requested}, crop {settings['crop']:.3g}: as requested")
    elif settings is None and published is not None:
        settings = published.preprocess
        assumed.append(
            f"preprocessing {published.normalisation}, crop {published.crop:.3g}, "
            f"{published.interpolation}: from the table of weights, {published.name}"
        )
    if settings is None:
        assumed.append("preprocessing: unknown")
        return None
    size = wanted.size
    if wanted.size == architecture.vit.size and "size" in settings:  # of a Vitrail model file
        stored = Preprocess(size=settings["size"])
        size = stored.height, stored.width
    return build_preprocess(settings, size, wanted.channels)


def build_preprocess(
    settings: Mapping[str, Any], size: tuple[int, int], channels: int
) -> Preprocess:
    """The settings for this image size, with mean and std repeated over the channels."""
    mean, std = (repeat_channels(tuple(settings[name]), channels) for name in ("mean", "std"))
    square = size[0] if size[0] == size[1] else size
    return Preprocess(
        **{**settings, "size": square, "mean": mean, "std": std, "channels": channels}
    )


def repeat_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if len(values) in (1, channels):
        return values
    if channels == 1:
        return (values[0] if len(set(values)) == 1 else sum(values) / len(values),)
    return (values * channels)[:channels]


def find_class_names(
    architecture: Architecture,
    config: CheckpointConfig,
    wanted: ViTConfig,
    assumed: list[str],
    source: str,
) -> tuple[str, ...] | None:
    """The names of the outputs; None if they are unknown or the head is new."""
    old, published = architecture.vit, architecture.published
    if wanted.head == "none" or (wanted.head, wanted.classes) != (old.head, old.classes):
        return None
    if config.classes is not None:
        if len(config.classes) != old.classes:
            raise UserError(
                f"{source} has {old.classes} classes, but {len(config.classes)} class names; "
                f"correct its config"
            )
        return config.classes
    if published is not None and published.classes and len(published.classes) == old.classes:
        assumed.append(f"class names: ImageNet's, from the table of weights, {published.name}")
        return published.classes
    return None


def log_weight_changes(loaded: LoadedModel) -> LoadedModel:
    """Logs what was resized, adapted, left out or assumed when foreign weights were loaded."""
    report = loaded.report
    for kind in ("resized", "adapted", "left_out", "assumed"):
        for change in getattr(report, kind):
            log.info(f"{Path(report.source).name}: {kind.replace('_', ' ')}: {change}")
    return loaded


def missing_preprocess(path: str | Path) -> UserError:
    names = " or ".join(f"`preprocess={name!r}`" for name in NORMALISATIONS)
    return UserError(f"{path} does not say how its images were normalised; give {names}")
