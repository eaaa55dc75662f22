"""Any weights become a model: found, checked, renamed, fitted, and all of it reported."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import torch

from vitrail import files
from vitrail.data.config import MEANS, Preprocess
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.zoo.architecture import FREE, Found, recognise
from vitrail.zoo.assemble import Notes, assemble
from vitrail.zoo.beside import Beside
from vitrail.zoo.beside import preprocess as fitted
from vitrail.zoo.file import FORMAT, KEY, own_config
from vitrail.zoo.files.place import Place, locate, open_place
from vitrail.zoo.files.stored import Contents
from vitrail.zoo.layouts.layout import Parts, sort
from vitrail.zoo.weights import find

Means = Literal["half", "imagenet", "clip"]

ADAPTED = ("image", "patch", "channels", "classes", "depth", "head")
TRAINED = ("drop_path", "dropout")  # they change training, and no tensor
CROPS = {"half": 0.9, "imagenet": 0.875, "clip": 1.0}  # usual below 384 pixels; 1 from there on


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became of a file's tensors; nothing that happened to them is left unsaid."""

    source: str  # path or hub name, as it was given
    format: str  # vitrail, timm, huggingface, torchvision, google
    loaded: int  # tensors of the file that found their place
    resized: list[str]  # positions, patch kernel: from what to what
    adapted: list[str]  # classes, channels, depth, precision: from what to what
    left_out: list[str]  # tensors without a place here, and why
    told: list[str]  # what the file could not say, and who said it: a table or a flag


@dataclass(frozen=True, kw_only=True)
class Loaded:
    model: ViT  # in evaluation mode
    classes: tuple[str, ...] | None  # none: nobody says
    view: Preprocess | None  # none: neither config, table nor flag says
    facts: dict[str, Any]  # Vitrail's own metadata; of a foreign file none
    report: Report


def load(
    path: str | Path, *, vit: Mapping[str, Any] | None = None, preprocess: Means | None = None
) -> Loaded:
    """A run folder, a weight file or folder of any known layout, or "hf:owner/name".

    `vit` are settings that shall be (image, patch, channels, classes, depth, head), or that no
    tensor shows (heads, mlp, eps, positions). `preprocess` names the mean and deviation that the
    weights expect, if nobody else can tell.
    """
    flags, source = dict(vit or {}), str(path)
    place = whereabouts(path)
    contents = open_place(place)
    if KEY in contents.metadata:
        facts = read_facts(contents, source)
        parts = Parts(
            format="vitrail", pieces={name: {0: one} for name, one in contents.tensors.items()}
        )
        config = own_config(facts, numbers(contents), source)
        found = Found(vit=config, slots=config.readers)
        beside = own_words(facts)
    else:
        facts, beside = {}, place.beside
        parts = sort(contents, source, head=flags.get("head") != "none" and "classes" not in flags)
        row = find(*beside.names, *place.names)
        found = recognise(parts, beside, row, flags, source)
    wanted = change(found.vit, flags, source)
    model, notes = assemble(parts, found, wanted, source)
    if facts and (notes.resized or notes.adapted):  # measured on another model
        facts |= {"temperature": None, "metrics": {}}
    told = [*parts.told, *found.told, *beside.told]
    view = look(found, beside, wanted, preprocess, told)
    classes = names(found, beside, wanted, told, source)
    report = summary(source, parts, notes, told)
    return Loaded(model=model, classes=classes, view=view, facts=facts, report=report)


def whereabouts(path: str | Path) -> Place:
    text = str(path)
    if text.startswith("hf:"):
        from vitrail.zoo.hub import fetch

        name = text.removeprefix("hf:").partition("@")[0]
        return locate(fetch(text.removeprefix("hf:")), name)
    row = find(text)
    if row is not None and row.name == text and row.hub and not Path(path).exists():
        return whereabouts(f"hf:{row.hub}")
    return locate(files.expanded(path))


def read_facts(contents: Contents, source: str) -> dict[str, Any]:
    try:
        facts = json.loads(contents.metadata[KEY])
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} does not explain itself: {error}; fetch it again") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        found = facts.get("format") if isinstance(facts, dict) else facts
        raise UserError(
            f"{source} has format {found!r}, this version reads {FORMAT}; "
            f"use the version of vitrail that wrote it"
        )
    return facts


def numbers(contents: Contents) -> int:
    return sum(torch.Size(one.shape).numel() for one in contents.tensors.values())


def own_words(facts: Mapping[str, Any]) -> Beside:
    """What a file of ours says of itself, in the words in which others say it."""
    view = facts.get("preprocess")
    classes = facts.get("classes")
    return Beside(
        classes=tuple(classes) if classes else None,
        view=Preprocess.from_plain(view).plain() if view else None,
    )


def change(old: ViTConfig, flags: Mapping[str, Any], source: str) -> ViTConfig:
    """The settings that were asked for, if weights can be fitted to them."""
    known = [field.name for field in fields(ViTConfig)]
    changes = {}
    for name, value in flags.items():
        if name not in known:
            near = ", ".join(get_close_matches(name, known, n=3, cutoff=0.4)) or "image, classes"
            raise UserError(f"a model has no setting {name!r}; the nearest are {near}")
        if name in ADAPTED or name in TRAINED:
            changes[name] = value
        elif getattr(old, name) != value:
            how = "say it only where the file cannot" if name in FREE else "weights cannot follow"
            raise UserError(
                f"{source} has {name} {getattr(old, name)}, not {value}; {how}, leave it out"
            )
    if changes.get("depth", old.depth) > old.depth:
        raise UserError(
            f"{source} has {old.depth} blocks, too few for depth {changes['depth']}; ask for less"
        )
    if old.stem != "patch" and changes.get("patch", old.patch) != old.patch:
        raise UserError(f"{source} has a ResNet before its patches of {old.patch}; leave patch out")
    if "classes" in changes and "head" not in changes:
        same = old.head != "none" and changes["classes"] == old.classes
        changes["head"] = old.head if same else "linear"
    if changes.get("head", old.head) not in (old.head, "none", "linear"):
        raise UserError(f'{source} has no hidden layer for head "mlp"; ask for head "linear"')
    return replace(old, **changes)


def look(
    found: Found, beside: Beside, wanted: ViTConfig, means: Means | None, told: list[str]
) -> Preprocess | None:
    """How images become the tensors these weights expect."""
    view = beside.view
    if means is not None:
        mean, std = MEANS[means]
        crop = CROPS[means] if min(wanted.size) < 384 else 1.0
        view = {"crop": crop, "interpolation": "bicubic", **(view or {}), "mean": mean, "std": std}
        told.append(f"preprocessing {means}, crop {view['crop']:.3g}: said by a flag")
    elif view is None and found.row is not None:
        view = found.row.view
        told.append(
            f"preprocessing {found.row.means}, crop {found.row.crop:.3g}, "
            f"{found.row.interpolation}: from the table of weights, {found.row.name}"
        )
    if view is None:
        told.append("preprocessing: nobody says")
        return None
    if wanted.size == found.vit.size and "size" in view:  # a file of ours
        height, width = Preprocess(size=view["size"]).height, Preprocess(size=view["size"]).width
        return fitted(view, (height, width), wanted.channels)
    return fitted(view, wanted.size, wanted.channels)


def names(
    found: Found, beside: Beside, wanted: ViTConfig, told: list[str], source: str
) -> tuple[str, ...] | None:
    """What the outputs mean, unless the head is new."""
    old = found.vit
    if wanted.head == "none" or (wanted.head, wanted.classes) != (old.head, old.classes):
        return None
    if beside.classes is not None:
        if len(beside.classes) != old.classes:
            raise UserError(
                f"{source} has {old.classes} classes, but {len(beside.classes)} names for them"
            )
        return beside.classes
    if found.row is not None and found.row.classes and len(found.row.classes) == old.classes:
        told.append(f"names of classes: ImageNet's, from the table of weights, {found.row.name}")
        return found.row.classes
    return None


def summary(source: str, parts: Parts, notes: Notes, told: list[str]) -> Report:
    return Report(
        source=source,
        format=parts.format,
        loaded=notes.loaded,
        resized=notes.resized,
        adapted=notes.adapted,
        left_out=[*parts.left_out, *notes.left_out],
        told=told,
    )
