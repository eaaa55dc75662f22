"""Checked decoding: JSON within limits, and dataclasses whose values have the declared types.

Files come from other people and from broken disks. A value of the wrong type is an error that
names it here, where it is read, and not a traceback wherever it is first used.
"""

import json
import math
import tomllib
from collections.abc import Container, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from vitrail import files
from vitrail.errors import UserError

MAX_DEPTH = 64  # of nested lists and objects
TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    NoneType: "null",
}

T = TypeVar("T")


def read_json(path: Path) -> Any:
    """The content of a JSON file; OSError if it cannot be read, `UserError` if it is not valid."""
    return parse_json(files.read_regular(path))


def read_toml(path: str | Path) -> dict[str, Any]:
    """The content of a TOML file; OSError if it cannot be read, `UserError` if it is not valid."""
    try:
        table = tomllib.loads(files.read_regular(path).decode())
    except RecursionError as error:
        raise UserError(f"it is nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        raise UserError(f"it is not valid TOML: {error!s:.200}") from error
    check_nesting(table)
    return table


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON document that is neither nested too deep nor holds half a character."""
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise UserError(f"it is nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        raise UserError(f"it is not valid JSON: {error!s:.100}") from error
    check_nesting(value)
    return value


def check_nesting(value: Any) -> None:
    """Raises for deep nesting, and for strings that UTF-8 cannot encode."""
    pending = [(value, 0)]
    while pending:
        part, depth = pending.pop()
        if isinstance(part, str) and not part.isascii():
            try:
                part.encode()
            except UnicodeEncodeError as error:
                raise UserError(f"{part!r:.60} contains half a character") from error
        elif isinstance(part, dict | list):
            if depth == MAX_DEPTH:
                raise UserError(f"it is nested deeper than {MAX_DEPTH} levels")
            parts = [*part, *part.values()] if isinstance(part, dict) else part
            pending.extend((one, depth + 1) for one in parts)


def decode_table(cls: type[T], table: Any, name: str = "", strict: Container[type] = ()) -> T:
    """A dataclass from a JSON object whose values have the types of its fields.

    `name` is the place of the table in its document. Fields with a default may be missing. A key
    without a field is an error for the dataclasses in `strict`; for others it is ignored, as a
    newer version may have written it.
    """
    if not isinstance(table, Mapping):
        raise UserError(f"{name or 'the document'} is {shorten_value(table)}; wanted an object")
    prefix = f"{name}." if name else ""
    hints = get_type_hints(cls)
    known = {field.name for field in fields(cls) if field.init}  # type: ignore[arg-type]
    if cls in strict and (unknown := table.keys() - known):
        raise UserError(
            f"{prefix}{min(unknown)} is unknown; a newer version of Vitrail may have written it: "
            f"upgrade"
        )
    values = {
        key: decode_value(hints[key], value, f"{prefix}{key}", strict)
        for key, value in table.items()
        if key in known
    }
    needed = [field.name for field in fields(cls) if is_required(field)]  # type: ignore[arg-type]
    if missing := [key for key in needed if key not in values]:
        raise UserError(f"{prefix}{missing[0]} is missing; another version may have written it")
    return cls(**values)


def is_required(field: "Field[Any]") -> bool:
    return field.init and field.default is MISSING and field.default_factory is MISSING


def decode_value(hint: Any, value: Any, name: str, strict: Container[type] = ()) -> Any:
    """A JSON value as the type that `hint` declares."""
    for part in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        if is_dataclass(part) and isinstance(value, Mapping):
            return decode_table(part, value, name, strict)  # type: ignore[arg-type]
        if has_type(value, part):
            return _convert(part, value, name, strict)
    raise UserError(f"{name} is {shorten_value(value)}; wanted {describe_type(hint)}")


def _convert(hint: Any, value: Any, name: str, strict: Container[type]) -> Any:
    """A value whose type is right: lists become tuples, numbers of type float are converted."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is tuple:
        return tuple(
            decode_value(parts[0], one, f"{name}[{i}]", strict) for i, one in enumerate(value)
        )
    if origin is dict:
        return {
            key: decode_value(parts[1], one, f"{name}.{key}", strict) for key, one in value.items()
        }
    return float(value) if hint is float else value


def has_type(value: object, hint: Any) -> bool:
    """Whether a value suits a type hint; a list is accepted for a tuple."""
    if hint is Any:
        return True
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(has_type(value, part) for part in parts)
    if origin is tuple:
        if not isinstance(value, list | tuple) or not (... in parts or len(value) == len(parts)):
            return False
        return is_dataclass(parts[0]) or all(has_type(one, parts[0]) for one in value)
    if origin is dict:
        return isinstance(value, Mapping)
    if origin is Literal:
        return isinstance(value, str)  # the config itself checks the choice
    if hint in (int, float):
        number = int if hint is int else int | float
        return isinstance(value, number) and not isinstance(value, bool) and is_finite(value)
    return isinstance(value, hint)


def is_finite(number: float) -> bool:
    """Whether a number is finite, and as a float too: JSON and TOML have integers of any size."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def describe_type(hint: Any) -> str:
    """A type hint in words."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(describe_type(part) for part in parts if part is not NoneType)
    if origin is tuple:
        return f"a list of {'strings' if parts[0] is str else 'numbers'}"
    if origin is dict or is_dataclass(hint):
        return "an object"
    return TYPE_NAMES.get(hint, "a string")


def shorten_value(value: object) -> str:
    """A value of any size as a few characters."""
    try:
        return f"{value!r:.60}"
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits
        return f"a value of type {type(value).__name__}"
