"""Flags for every setting of a recipe, explained by the comment that stands beside it."""

import ast
import inspect
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_type_hints

import tyro

from vitrail.data.config import Columns
from vitrail.model.config import ViTConfig


def optional(cls: type) -> Any:
    """The dataclass with every field optional: None means that nobody asked for a change."""
    hints, told = get_type_hints(cls), comments(cls)
    made: list[tuple[str, Any, Any]] = []
    for entry in fields(cls):
        kind = hints[entry.name]
        if is_dataclass(kind) and isinstance(kind, type):
            inner = optional(kind)
            made.append((entry.name, inner, field(default_factory=inner)))
            continue
        default = entry.default if entry.default is not MISSING else None
        metavar = kind.__name__.upper() if kind in (int, float, str) else None
        words = tyro.conf.arg(
            help=told[entry.name], help_behavior_hint=hint(default), metavar=metavar
        )
        marks = (words, tyro.conf.DisallowNone) if kind is bool else (words,)  # --x and --no-x
        made.append((entry.name, Annotated[(kind | None, *marks)], field(default=None)))
    return make_dataclass(cls.__name__, made, frozen=True, kw_only=True)


def hint(default: object) -> str:
    return "(chosen)" if default is None else f"(chosen, or {default})"


@cache
def comments(cls: type) -> dict[str, str]:
    """The comment behind each field, also where it stands on a line of its own."""
    lines = inspect.getsource(cls).splitlines()
    tree = ast.parse("\n".join(lines)).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            found[node.target.id] = own.partition("  # ")[2].split("\n")[0]
    return found


def changes(flags: Any) -> dict[str, Any]:
    """What was asked for, as nested dicts."""
    asked: dict[str, Any] = {}
    for entry in fields(flags):
        value = getattr(flags, entry.name)
        if is_dataclass(value):
            if inner := changes(value):
                asked[entry.name] = inner
        elif value is not None:
            asked[entry.name] = value
    return asked


def sections(**flags: Any) -> dict[str, dict[str, Any]]:
    """What was asked for of each section of a recipe, without those that stay as they are."""
    return {name: asked for name, own in flags.items() if (asked := changes(own))}


if TYPE_CHECKING:  # what several verbs ask for
    Vit: TypeAlias = Any
    Names: TypeAlias = Any
else:
    Vit, Names = optional(ViTConfig), optional(Columns)
# as `train` calls them
COLUMNS = tyro.conf.arg(name="data.columns")
SkipBroken: TypeAlias = Annotated[
    bool, tyro.conf.arg(name="data.skip-broken"), tyro.conf.FlagCreatePairsOff
]
