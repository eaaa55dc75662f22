"""Flags that several verbs share, and a flag for every setting of a recipe.

The comment beside a setting is its help text. None as a default means that the flag is not set.
"""

import ast
import inspect
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro

from vitrail.data.config import Columns, LabelKind
from vitrail.model.config import ViTConfig
from vitrail.zoo import weights

CHOSEN_SECTIONS = (
    "vit",
    "preprocess",
    "data.augment",
    "pretrain",
    "joint",
)  # no setting of these has a fixed default
CHOSEN_SETTINGS = {  # of the other sections; a test compares this with `run.auto`
    *("train.epochs", "train.batch", "train.optimizer", "train.lr", "train.weight_decay"),
    *("train.warmup", "train.schedule", "train.layer_decay", "train.smoothing", "train.ema"),
    *("train.drop_patches", "train.drop_until", "train.class_weights", "data.balanced"),
    *("train.probe", "train.frozen", "data.train_size"),
}
CHOSEN = "(default: chosen from the data)"
NO_HINT = ""  # instead of "(default: None)" or "(default: False)"


def section_flags(cls: type, section: str) -> Any:
    """The dataclass of a recipe's section with every field optional and explained."""
    kinds, texts = get_type_hints(cls), field_comments(cls)
    flags: list[tuple[str, Any, Any]] = []
    for entry in fields(cls):
        name, kind, text = f"{section}.{entry.name}", kinds[entry.name], texts[entry.name]
        if is_dataclass(kind) and isinstance(kind, type):
            inner = section_flags(kind, name)
            text = f"{text} {CHOSEN}" if name in CHOSEN_SECTIONS else text
            described = (inner, tyro.conf.arg(help=text))
            flags.append((entry.name, Annotated[described], field(default_factory=inner)))
            continue
        default = None if entry.default is MISSING else entry.default
        mark = tyro.conf.arg(
            help=text, help_behavior_hint=default_hint(name, default), metavar=metavar(kind)
        )
        flags.append((entry.name, Annotated[kind | None, mark], field(default=None)))
    return make_dataclass(cls.__name__, flags, frozen=True, kw_only=True)


def default_hint(name: str, default: object) -> str:
    if name in CHOSEN_SETTINGS:
        return CHOSEN
    if default is None or name.rpartition(".")[0] in CHOSEN_SECTIONS:
        return NO_HINT
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    return f"(default: {shown})"


def metavar(kind: Any) -> str | None:
    """INT, STR, INT [INT], FLOAT [FLOAT ...]; None for choices and switches."""
    if get_origin(kind) in (Union, UnionType):
        parts = [part for part in get_args(kind) if part is not NoneType]
        if parts == [int, tuple[int, int]]:
            return "INT [INT]"
        return metavar(parts[0]) if len(parts) == 1 else None
    if get_origin(kind) is tuple:
        name = get_args(kind)[0].__name__.upper()
        return f"{name} [{name} ...]"
    return kind.__name__.upper() if kind in (int, float, str, Path) else None


@cache
def field_comments(cls: type) -> dict[str, str]:
    """The comment of each field of a dataclass."""
    lines = inspect.getsource(cls).splitlines()
    tree = ast.parse("\n".join(lines)).body[0]
    assert isinstance(tree, ast.ClassDef)
    comments = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            comments[node.target.id] = text.partition("  # ")[2].split("\n")[0]
    return comments


def given_settings(flags: Any) -> dict[str, Any]:
    """The settings given on the command line, as nested dicts."""
    given: dict[str, Any] = {}
    for entry in fields(flags):
        value = getattr(flags, entry.name)
        if is_dataclass(value):
            if inner := given_settings(value):
                given[entry.name] = inner
        elif value is not None:
            given[entry.name] = value
    return given


def given_sections(**sections: Any) -> dict[str, dict[str, Any]]:
    """The settings given on the command line, by section of the recipe; empty ones left out."""
    return {name: given for name, flags in sections.items() if (given := given_settings(flags))}


def unset(**options: Any) -> Any:
    """The mark of a flag whose default is None: its help shows no default."""
    return tyro.conf.arg(help_behavior_hint=NO_HINT, **options)


# The simple kinds of flags.
Switch: TypeAlias = Annotated[bool, tyro.conf.FlagCreatePairsOff, unset()]
OptionalInt: TypeAlias = Annotated[int | None, unset(metavar="INT")]
OptionalFloat: TypeAlias = Annotated[float | None, unset(metavar="FLOAT")]
CalibrationData: TypeAlias = Annotated[str | None, unset(metavar="DATA")]
OptionalPath: TypeAlias = Annotated[Path | None, unset(metavar="PATH")]

# Arguments that mean the same for every verb.
IMAGES_HELP = "image files, folders (searched recursively), or - for paths on stdin, one per line"
Data: TypeAlias = Annotated[
    str,
    tyro.conf.Positional,
    unset(
        metavar="DATA",
        help="folder of class folders or a zip of it, table of paths and labels, tar shards, "
        "a URL such as s3://bucket/photos of any of these, hf:owner/name, or a built-in name",
    ),
]
Model: TypeAlias = Annotated[
    str,
    tyro.conf.Positional,
    unset(metavar="MODEL", help="run folder, model file, or weights of another library"),
]
Images: TypeAlias = Annotated[
    tuple[str, ...], tyro.conf.Positional, unset(metavar="IMAGE ...", help=IMAGES_HELP)
]
OptionalImages: TypeAlias = Annotated[
    tuple[str, ...], tyro.conf.Positional, unset(metavar="[IMAGE ...]", help=IMAGES_HELP)
]
RunFolder: TypeAlias = Annotated[
    Path, tyro.conf.Positional, unset(metavar="RUN", help="run folder")
]
Architecture: TypeAlias = Annotated[
    str | None,
    unset(metavar="NAME", help="architecture, such as Nano/4 or S/16 (see `vitrail models`)"),
]
Weights: TypeAlias = Annotated[
    str,
    tyro.conf.arg(
        name="from",
        metavar="WEIGHTS",
        help="fine-tune from this run, weight file or folder, or hf:owner/name; auto: photos from "
        "published weights, small images from scratch; none: from scratch",
    ),
]
RecipeFile: TypeAlias = Annotated[
    Path | None, unset(metavar="FILE", help="TOML file with any of the settings below")
]
Device: TypeAlias = Annotated[
    str,
    tyro.conf.arg(
        metavar="DEVICE", help="auto, cpu, cuda, cuda:1, mps; auto uses a GPU if there is one"
    ),
]
Engine: TypeAlias = Annotated[
    Literal["auto", "torch", "onnxruntime", "openvino"] | None,
    unset(
        help="what computes the logits; auto measures once which is fastest here "
        "(default: torch, or that of an exported file)"
    ),
]
Timeout: TypeAlias = Annotated[
    float,
    tyro.conf.arg(
        metavar="SECONDS", help="how long processes started by torchrun wait for each other"
    ),
]
BatchSize: TypeAlias = Annotated[int, tyro.conf.arg(metavar="INT", help="batch size")]
SkipBroken: TypeAlias = Annotated[
    bool,
    tyro.conf.FlagCreatePairsOff,
    unset(name="data.skip-broken", help="skip images that cannot be read and report how many"),
]
HeadFile: TypeAlias = Annotated[
    Path | None,
    unset(metavar="FILE", help="head fitted by `vitrail head` for this model, or its folder"),
]
Normalisation: TypeAlias = Annotated[
    weights.Normalisation | None,
    unset(help="mean and std that foreign weights expect, if their file does not say"),
]
Labels: TypeAlias = Annotated[
    LabelKind | None,
    unset(
        name="data.labels",
        help="labels per image: single, or multi, any number of them (default: single)",
    ),
]
Views: TypeAlias = Annotated[
    int,
    tyro.conf.arg(
        metavar="INT",
        help="views of each image whose logits are averaged: 2 adds the mirror image, up to 10 "
        "add shifts",
    ),
]
Raw: TypeAlias = Annotated[
    bool,
    tyro.conf.FlagCreatePairsOff,
    unset(help="plain softmax probabilities instead of calibrated ones"),
]

Out: TypeAlias = Annotated[
    str, unset(metavar="PATH", help="folder or URL, such as s3://bucket/folder, for Parquet parts")
]
OptionalOut: TypeAlias = Annotated[
    str | None,
    unset(
        metavar="PATH",
        help="predict all images of one DATA into Parquet parts in this folder or URL; the same "
        "command again continues a job that was killed",
    ),
]
On: TypeAlias = Annotated[
    Literal["local", "ray"],
    tyro.conf.arg(
        help="ray: on the cluster of RAY_ADDRESS, else on all cores or GPUs of this machine"
    ),
]

_VitFlags = section_flags(ViTConfig, "vit")
_ColumnFlags = section_flags(Columns, "data.columns")
NO_VIT, NO_COLUMNS = _VitFlags(), _ColumnFlags()  # none of these flags given

if TYPE_CHECKING:
    Vit: TypeAlias = Any
    LoadedVit: TypeAlias = Any
    ColumnNames: TypeAlias = Any
else:
    Vit = Annotated[
        _VitFlags,
        tyro.conf.arg(help="architecture (default: that of --model, fitted to the data)"),
    ]
    LoadedVit = Annotated[
        _VitFlags,
        tyro.conf.arg(
            help="changes to the architecture, such as another image size (default: what the "
            "weights say)"
        ),
    ]
    ColumnNames = Annotated[
        _ColumnFlags, tyro.conf.arg(name="data.columns", help="column names of a table")
    ]
