"""Arguments of public functions, checked at the door: a wrong type names the argument."""

import builtins
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

PLAIN = (str, bytes, int, float, complex, bool, NoneType)  # values that are never of another class
CONTAINERS = (list, tuple, dict, set)  # nor are these, unless the hint is one of them

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


def check_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Raises TypeError if an argument does not have the type of its annotation.

    Checks plain values: numbers, strings, paths, booleans, choices, sequences and mappings. What
    an object of another class must be is left to the function itself.
    """
    described = signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, value in described.bind(*args, **kwargs).arguments.items():
            parameter = described.parameters[name]
            if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
                continue
            hint = resolve(parameter.annotation, function.__module__)
            if not suits(value, hint):
                raise TypeError(f"`{name}` is {describe(value)}; give {phrase(hint)}")
        return function(*args, **kwargs)

    return call


class Elsewhere:
    """Stands for a class that a module imports only for type checkers."""


class Names(dict[str, Any]):
    """The names of a module; a name that it lacks is a class from elsewhere."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Elsewhere)


@cache
def resolve(annotation: Any, module: str) -> Any:
    """An annotation as types."""
    if not isinstance(annotation, str):
        return annotation
    return eval(annotation, {}, Names(vars(sys.modules[module])))  # our own source, not input


def suits(value: object, hint: Any) -> bool:
    """Whether a value suits a hint; true for hints that say nothing about plain values."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(suits(value, part) for part in parts)
    if origin is Literal:
        return isinstance(value, type(parts[0]))  # the function names the choices
    if origin in (Mapping, dict):
        return isinstance(value, Mapping)
    if origin in (Sequence, list, tuple):
        return isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if hint in (str, bytes, bytearray, memoryview, bool, Path, NoneType):
        return isinstance(value, hint)
    if hint is Elsewhere and isinstance(value, str | bytes):  # perhaps one of several choices
        return True
    if hint in CONTAINERS or not isinstance(hint, type):
        return not isinstance(hint, type) or isinstance(value, hint)
    return not isinstance(value, PLAIN) and type(value) not in CONTAINERS


def phrase(hint: Any) -> str:
    """A hint in words."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        words = [phrase(part) for part in parts if part is not NoneType]
        return " or ".join(dict.fromkeys(words))
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin in (Mapping, dict):
        return "a mapping"
    if origin in (Sequence, list, tuple):
        return "a list"
    if hint is Elsewhere:
        return "an object"
    return WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def describe(value: object) -> str:
    """A value and its type, in a few characters."""
    try:
        shown = repr(value)
    except Exception:  # a class of the caller may raise anything
        shown = "a value"
    return f"{shown:.60} ({type(value).__name__})"
