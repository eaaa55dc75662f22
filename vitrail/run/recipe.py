"""All settings of a run: as dataclasses, as nested dicts, and as TOML."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from vitrail import files
from vitrail.data.config import Augment, Columns, DataConfig, Preprocess
from vitrail.decoding import describe_type, has_type, read_toml
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.pretraining.config import JointConfig, PretrainConfig, TeacherConfig
from vitrail.training.config import TrainConfig

FORMAT = 1  # version of recipe.toml

Tune = Literal["all", "head", "proj", "lora"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    source: str = ""  # folder, table, tar shards, or the name of a built-in data set
    model: str = ""  # name of the architecture; its settings are in the section vit
    weights: str = ""  # run, file or folder to fine-tune from; empty: train from scratch
    tune: Tune = "all"  # what fine-tuning changes: all, head, proj (attention outputs) or lora
    vit: ViTConfig = field(default_factory=ViTConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    preprocess: Preprocess = field(default_factory=Preprocess)
    pretrain: PretrainConfig | None = None  # of a run that learns without labels
    joint: JointConfig | None = None  # of a training that also uses images without labels
    teacher: TeacherConfig | None = None  # whose answers or features are learned too

    def __post_init__(self) -> None:
        for path in (self.source, self.weights):
            files.check_utf8_name(path)
        if self.tune not in get_args(Tune):
            known = ", ".join(get_args(Tune))
            raise UserError(f"tune {self.tune!r} is unknown; choose one of {known}")

    @property
    def patches(self) -> int:
        """Patches of an image after preprocessing; `vit.patches` is their number at `vit.image`."""
        height, width = self.preprocess.height, self.preprocess.width
        if self.data.train_size is not None:
            height = width = self.data.train_size
        return (height // self.vit.patch) * (width // self.vit.patch)

    @property
    def uses_unlabelled(self) -> bool:
        """Whether some steps also learn from images without labels."""
        return self.joint is not None and self.joint.ratio > 0

    @property
    def first_joint_step(self) -> int:
        """The first step with images without labels, if the run uses any."""
        start = 1.0 if self.joint is None else self.joint.start
        return math.floor(start * self.train.steps)


SECTIONS: dict[str, type] = {
    "vit": ViTConfig,
    "train": TrainConfig,
    "data": DataConfig,
    "preprocess": Preprocess,
    "pretrain": PretrainConfig,
    "joint": JointConfig,
    "teacher": TeacherConfig,
    "data.augment": Augment,
    "data.columns": Columns,
}


def settings_to_dict(settings: Any) -> dict[str, Any]:
    """A dataclass as nested dicts, without fields that are None, which TOML cannot express."""
    table = {}
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        if value is not None:
            table[entry.name] = settings_to_dict(value) if is_dataclass(value) else value
    return table


def settings_from_dict(cls: type[T], table: Mapping[str, Any], prefix: str = "") -> T:
    """A dataclass from nested dicts; an unknown key is an error that names the nearest one."""
    check_settings(cls, table, prefix)
    arguments: dict[str, Any] = {}
    for key, value in table.items():
        section = SECTIONS.get(f"{prefix}{key}")
        if section is not None:
            arguments[key] = settings_from_dict(section, value, f"{prefix}{key}.")
        else:
            arguments[key] = tuple(value) if isinstance(value, list) else value
    try:
        return cls(**arguments)
    except TypeError as error:  # a string where a number was expected
        section_name = prefix.removesuffix(".") or "the recipe"
        raise UserError(f"a setting of {section_name} has the wrong type: {error}") from error


def merge_settings(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts with the entries of `changes` replaced."""
    merged = dict(base)
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge_settings(merged[key], value)
        else:
            merged[key] = value
    return merged


def flatten_settings(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted keys, such as "train.lr"."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten_settings(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = tuple(value) if isinstance(value, list) else value
    return flat


def data_settings(table: Mapping[str, Any]) -> DataConfig:
    """The settings with which data is opened, needed before the others can be chosen."""
    wanted = {
        name: value
        for name, value in table.get("data", {}).items()
        if name in ("columns", "labels", "labelled")
    }
    return settings_from_dict(Recipe, {"data": wanted}).data


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The settings of a recipe file, checked key by key; any of them may be missing."""
    try:
        table = read_toml(path)
    except (OSError, UserError) as error:
        raise UserError(f"cannot read the recipe {path}: {error}") from error
    version = table.pop("format", FORMAT)
    if version != FORMAT:
        raise UserError(
            f"the recipe {path} has format {version}, this version reads {FORMAT}; "
            f"use the version of vitrail that wrote it"
        )
    try:
        check_settings(Recipe, table)
    except UserError as error:
        raise UserError(f"in the recipe {path}: {error}") from error
    return table


def check_settings(cls: type, table: Mapping[str, Any], prefix: str = "") -> None:
    """Raises for an unknown key or a value of the wrong type."""
    known = cached_type_hints(cls)
    for key, value in table.items():
        if key not in known:
            near = get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0)
            raise UserError(
                f"unknown setting {prefix}{key}; the nearest known one is {prefix}{near[0]}"
            )
        section = SECTIONS.get(f"{prefix}{key}")
        if section is None:
            if not has_type(value, known[key]):
                raise UserError(f"{prefix}{key} is {value!r}; give {describe_type(known[key])}")
        elif isinstance(value, Mapping):
            check_settings(section, value, f"{prefix}{key}.")
        else:
            raise UserError(f"{prefix}{key} is {value!r}; give a section [{prefix}{key}]")


@cache
def cached_type_hints(cls: type) -> dict[str, Any]:
    """The types of the fields; many runs in one process read many recipes."""
    return get_type_hints(cls)


def recipe_to_toml(recipe: Recipe) -> str:
    """The complete recipe as TOML; reading it gives an equal recipe."""
    lines = [f"format = {FORMAT}"]
    _append_tables(settings_to_dict(recipe), "", lines)
    return "\n".join(lines) + "\n"


def _append_tables(table: Mapping[str, Any], prefix: str, lines: list[str]) -> None:
    for key, value in table.items():
        if not isinstance(value, Mapping):
            lines.append(f"{key} = {toml_value(value)}")
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines.extend(["", f"[{prefix}{key}]"])
            _append_tables(value, f"{prefix}{key}.", lines)


def toml_value(value: Any) -> str:
    """One value as TOML; strings may contain any character that a path may."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(part) for part in value)}]"
    escaped = "".join(
        f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else f"\\{c}" if c in '"\\' else c
        for c in str(value)
    )
    return f'"{escaped}"'


def locate_weights(name: str) -> str:
    """The absolute path of weights on this machine, valid from any folder; other names as given."""
    path = files.expand_user(name)
    return str(path.resolve()) if path.exists() else name


def recipe_digest(recipe: Recipe) -> str:
    """A short hash that identifies exactly these settings."""
    return hashlib.sha256(recipe_to_toml(recipe).encode()).hexdigest()[:16]
