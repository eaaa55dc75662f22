"""Every setting of a run, as TOML, as dataclasses and as command line flags."""

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from vitrail import files
from vitrail.data.config import Augment, Columns, DataConfig, Preprocess
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.training.config import TrainConfig

FORMAT = 1  # of recipe.toml
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    source: str = ""  # folder, table, tar shards, or the name of a built-in set
    model: str = ""  # what the architecture is called; its numbers stand under vit
    weights: str = ""  # run, file or folder that the training starts from; empty: from scratch
    vit: ViTConfig = field(default_factory=ViTConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    view: Preprocess = field(default_factory=Preprocess)

    def __post_init__(self) -> None:
        for path in (self.source, self.weights):
            files.check_text(path)

    @property
    def patches(self) -> int:
        """How many the model is shown of an image; `vit.patches` are those of `vit.image`."""
        return (self.view.height // self.vit.patch) * (self.view.width // self.vit.patch)


SECTIONS: dict[str, type] = {
    "vit": ViTConfig,
    "train": TrainConfig,
    "data": DataConfig,
    "view": Preprocess,
    "data.augment": Augment,
    "data.columns": Columns,
}


def plain(settings: Any) -> dict[str, Any]:
    """A dataclass as nested dicts, leaving out what is None: TOML has no word for it."""
    found = {}
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        if value is not None:
            found[entry.name] = plain(value) if is_dataclass(value) else value
    return found


def build(cls: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """A dataclass from nested dicts; an unknown key is an error that names the nearest one."""
    check(cls, table, where)
    given: dict[str, Any] = {}
    for key, value in table.items():
        section = SECTIONS.get(f"{where}{key}")
        if section is not None:
            given[key] = build(section, value, f"{where}{key}.")
        else:
            given[key] = tuple(value) if isinstance(value, list) else value
    try:
        return cls(**given)
    except TypeError as error:  # a word where a number was wanted
        raise UserError(
            f"a setting of {where or 'the recipe'} has a wrong type: {error}"
        ) from error


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts with some entries replaced."""
    merged = dict(base)
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def columns_of(table: Mapping[str, Any]) -> Columns:
    """How a table's columns are called, which must be known before the rest can be chosen."""
    return build(Recipe, {"data": table.get("data", {})}).data.columns


def read_recipe(path: str | Path) -> dict[str, Any]:
    """What a recipe file sets, checked key by key; sections and keys may be missing."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the recipe {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the recipe {path} is no TOML: {error}") from error
    version = table.pop("format", FORMAT)
    if version != FORMAT:
        raise UserError(
            f"the recipe {path} has format {version}, this version reads {FORMAT}; "
            f"use the version of vitrail that wrote it"
        )
    try:
        check(Recipe, table)
    except UserError as error:
        raise UserError(f"in the recipe {path}: {error}") from error
    return table


def check(cls: type, table: Mapping[str, Any], where: str = "") -> None:
    """Stops at a key that no setting has or a value of another kind, before anything is chosen."""
    known = get_type_hints(cls)
    for key, value in table.items():
        if key not in known:
            near = get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0)
            raise UserError(f"there is no setting {where}{key}; the nearest is {where}{near[0]}")
        section = SECTIONS.get(f"{where}{key}")
        if section is None:
            if not fits(value, known[key]):
                raise UserError(f"{where}{key} is {value!r}; give {wanted(known[key])}")
        elif isinstance(value, Mapping):
            check(section, value, f"{where}{key}.")
        else:
            raise UserError(f"{where}{key} is {value!r}; give a section [{where}{key}]")


def fits(value: object, kind: Any) -> bool:
    """Whether a setting of this kind may have this value; a list stands for a tuple."""
    if get_origin(kind) in (Union, UnionType):
        return any(fits(value, one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        part = get_args(kind)[0]
        return isinstance(value, list | tuple) and all(fits(one, part) for one in value)
    if get_origin(kind) is Literal:
        return isinstance(value, str)  # the setting itself says which
    if kind in (int, float):
        whole = int if kind is int else int | float
        return isinstance(value, whole) and not isinstance(value, bool)
    return isinstance(value, kind)


def wanted(kind: Any) -> str:
    """A kind in words."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(wanted(one) for one in get_args(kind) if one is not NoneType)
    if get_origin(kind) is tuple:
        return "a list of numbers"
    return KINDS.get(kind, "a text")


def write_toml(recipe: Recipe) -> str:
    """The whole recipe as TOML; reading it back gives an equal one."""
    lines = [f"format = {FORMAT}"]
    _write(plain(recipe), "", lines)
    return "\n".join(lines) + "\n"


def _write(table: Mapping[str, Any], where: str, lines: list[str]) -> None:
    for key, value in table.items():
        if not isinstance(value, Mapping):
            lines.append(f"{key} = {toml(value)}")
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines.extend(["", f"[{where}{key}]"])
            _write(value, f"{where}{key}.", lines)


def toml(value: Any) -> str:
    """One value; strings with whatever a path may hold."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml(part) for part in value)}]"
    escaped = "".join(
        f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else f"\\{c}" if c in '"\\' else c
        for c in str(value)
    )
    return f'"{escaped}"'


def digest(recipe: Recipe) -> str:
    """A short name for exactly these settings."""
    return hashlib.sha256(write_toml(recipe).encode()).hexdigest()[:16]
