"""Arguments of public functions, checked at the door: a wrong type names the argument."""

import builtins
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache, wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from vitrail.errors import UserError

MAX_NAME = 255  # bytes of a name in a path, on all file systems
PLAIN = (str, bytes, int, float, bool, NoneType)

P = ParamSpec("P")
T = TypeVar("T")

WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    Path: "a path",
    NoneType: "None",
}
PLURALS = {int: "whole numbers", float: "numbers", str: "strings"}


def check_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Raises TypeError if an argument does not have the type of its annotation.

    Numbers of NumPy become Python's. A string that no path can contain, such as one with a NUL
    character, raises `UserError`. The meaning of a value is left to the function itself.
    """
    described = signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        given = described.bind(*args, **kwargs)
        for name, value in given.arguments.items():
            parameter = described.parameters[name]
            hint = resolve(parameter.annotation, function.__module__)
            if parameter.kind is Parameter.VAR_POSITIONAL:
                given.arguments[name] = tuple(accept(f"`{name}`", one, hint) for one in value)
            elif hint is not Parameter.empty:
                given.arguments[name] = accept(f"`{name}`", value, hint)
        return function(*given.args, **given.kwargs)

    return call


def check_fields(config: Any) -> None:
    """The same for the fields of a frozen dataclass, as a `UserError`, at its construction."""
    for field in fields(config):
        hint: Any = resolve(field.type, type(config).__module__)  # type: ignore[arg-type]
        try:
            value = accept(field.name, getattr(config, field.name), hint)
        except TypeError as error:  # a recipe or a model file may hold it
            raise UserError(str(error)) from error
        object.__setattr__(config, field.name, value)


def accept(name: str, value: Any, hint: Any) -> Any:
    """The value of an argument with Python's numbers; raises if it does not suit its hint."""
    if not suits(value, hint) and getattr(value, "ndim", None) == 1:
        value = value.tolist()  # an array of numbers, where a list is wanted
    if not suits(value, hint):
        raise TypeError(f"{name} is {describe(value)}; give {phrase(hint)}")
    if isinstance(value, str | Path):
        check_characters(name, str(value), is_path=suits(Path(), hint))
    return to_plain(value)


def check_characters(name: str, value: str, is_path: bool) -> None:
    """Raises for strings that no file system and no encoding accepts."""
    try:
        encoded = os.fsencode(value)
    except UnicodeEncodeError as error:
        raise UserError(f"{name} is {value!r:.60}, which contains half a character") from error
    if b"\0" in encoded:
        raise UserError(f"{name} is {value!r:.60}, which contains a NUL character")
    if is_path and max(map(len, encoded.split(b"/"))) > MAX_NAME:
        raise UserError(f"{name} is {value!r:.60}..., whose name is too long; shorten it")


def to_plain(value: Any) -> Any:
    """Numbers of NumPy and the like as Python's, also in lists and tuples."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if type(value) in (list, tuple) and any(isinstance(one, Real) for one in value):
        return type(value)(to_plain(one) for one in value)
    return value


class Unresolved(type):
    """The type of `Elsewhere`: `torch.device` is such a class too, if `torch` is one."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Unresolved(name, (Elsewhere,), {})


class Elsewhere(metaclass=Unresolved):
    """Stands for a class that a module imports only for type checkers."""


class Names(dict[str, Any]):
    """The names of a module; a name that it lacks is a class from elsewhere."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, None) or Unresolved(name, (Elsewhere,), {})


@cache
def resolve(annotation: Any, module: str) -> Any:
    """An annotation as types."""
    if not isinstance(annotation, str):
        return annotation
    return eval(annotation, {}, Names(vars(sys.modules[module])))  # our own source, not input


def suits(value: Any, hint: Any) -> bool:
    """Whether a value suits a hint; true for hints that say nothing about a value."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(suits(value, part) for part in parts)
    if origin is Literal:
        return isinstance(value, type(parts[0]))  # the function names the choices
    if origin in (Mapping, dict):
        key, item = parts
        return isinstance(value, Mapping) and all(
            suits(one, key) and suits(other, item) for one, other in value.items()
        )
    if origin in (Sequence, list, tuple, Iterable):
        kind = Sequence if origin is not Iterable else Iterable
        pair = origin is tuple and ... not in parts
        return is_series(value, kind, parts[0]) and (not pair or len(value) == len(parts))
    if origin is Callable:
        return callable(value)
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if isinstance(hint, type) and issubclass(hint, Elsewhere):
        types = type(getattr(value, "_orig_mod", value)).__mro__  # torch.compile wraps a module
        return hint.__name__ in [one.__name__ for one in types]
    if hint is Any or not isinstance(hint, type):
        return True
    if getattr(hint, "_is_protocol", False):
        return all(hasattr(value, name) for name in vars(hint) if not name.startswith("_"))
    return isinstance(getattr(value, "_orig_mod", value), hint)


def is_series(value: Any, kind: Any, part: Any) -> bool:
    """Whether this is a series of such parts; of several types, the function checks the parts."""
    if not isinstance(value, kind) or isinstance(value, str | bytes | bytearray | Mapping):
        return False
    return part not in (int, float, str) or all(suits(one, part) for one in value)


def phrase(hint: Any) -> str:
    """A hint in words."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        words = [phrase(part) for part in parts if part is not NoneType]
        return " or ".join(dict.fromkeys(words))
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin in (Mapping, dict):
        return "a mapping from strings"
    if origin in (Sequence, list, tuple, Iterable):
        count = f"{len(parts)} " if origin is tuple and ... not in parts else ""
        return f"a list of {count}{PLURALS.get(parts[0], 'them')}"
    if origin is Callable:
        return "a function"
    return WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def describe(value: object) -> str:
    """A value and its type, in a few characters."""
    try:
        shown = repr(value)
    except Exception:  # a class of the caller may raise anything
        shown = "a value"
    return f"{shown:.60} ({type(value).__name__})"
