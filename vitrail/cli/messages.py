"""Turns the Python names in a message into the flags of the command line.

Below `cli/`, messages name settings and arguments as Python callers write them, between backticks:
`train.batch`, `out`, `device='cpu'`. Here they become --train.batch, --out and --device cpu.
Other text between backticks, such as `vitrail resume RUN`, stays as it is.
"""

import ast
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro

QUOTED = re.compile(r"`([a-z_][\w.]*)(?:=([^`]*))?`")
# Dotted names of settings outside backticks, unless they are part of a path or a longer name.
DOTTED = re.compile(
    r"(?<![\w./\\`-])(?:vit|train|data|preprocess|pretrain|joint|teacher)(?:\.[a-z_]+)+(?![\w/\\`]|\.\w)"
)


def translate(text: str, flags: Mapping[str, str]) -> str:
    """The message with every known name written as `flags` says."""

    def replace(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in flags:
            return match[0]
        return flags[name] if value is None else with_value(flags[name], value)

    text = QUOTED.sub(replace, text)
    return DOTTED.sub(lambda match: flags.get(match[0], match[0]), text)


def with_value(flag: str, value: str) -> str:
    """A flag with a value that is written as in Python: `skip_broken=True`, `image=(32, 64)`."""
    try:
        literal = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        literal = value
    if literal is True:
        return flag
    if literal is False:
        *sections, name = flag.removeprefix("--").split(".")
        return f"--{'.'.join([*sections, f'no-{name}'])}"
    values = literal if isinstance(literal, list | tuple) else [literal]
    return " ".join([flag, *(shlex.quote(str(one)) for one in values)])


def flags_of(verb: Callable[..., Any]) -> dict[str, str]:
    """What each argument and setting of a verb is called on the command line."""
    annotations = get_type_hints(verb, include_extras=True)
    annotations.pop("return", None)
    flags = dict(_flags(annotations, ""))
    if "data.skip_broken" not in flags and "skip_broken" in flags:
        flags["data.skip_broken"] = flags["skip_broken"]
    return flags


def _flags(annotations: Mapping[str, Any], section: str) -> Iterator[tuple[str, str]]:
    for name, annotation in annotations.items():
        kind, marks = annotation, []
        if get_origin(annotation) is Annotated:
            kind, *marks = get_args(annotation)
        called = _mark(marks, "name") or name
        if is_dataclass(kind) and isinstance(kind, type):
            inner = get_type_hints(kind, include_extras=True)
            yield from _flags(inner, f"{section}{called}.")
        elif tyro.conf.Positional in marks:
            metavar = (_mark(marks, "metavar") or name.upper()).strip("[]").split()[0]
            yield name, metavar
            yield metavar.lower(), metavar  # `data` of the Python function is DATA of the verb
        else:
            flag = f"--{section}{called}".replace("_", "-")
            yield f"{section}{name}", flag
            yield f"{section}{called}", flag  # a setting such as `data.labels`, an argument here


def _mark(marks: Sequence[Any], key: str) -> str | None:
    """What `tyro.conf.arg` says about an argument."""
    values = (getattr(mark, key, None) for mark in marks)
    return next((value for value in values if isinstance(value, str)), None)
