"""Generated pages: settings from the dataclasses, API from the docstrings, benchmarks from JSON."""

import inspect
import json
import re
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any

import vitrail
from vitrail.cli.flags import CHOSEN_SECTIONS, CHOSEN_SETTINGS, field_comments
from vitrail.run.recipe import SECTIONS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
BENCHMARKS = {  # a file in bench/results: its title
    "inference": "Inference",
    "step": "Training step",
    "memory": "Memory of a training step",
    "input": "Reading images",
    "remote": "Shards in a bucket",
    "load": "Loading weights",
    "start-up": "Start-up",
    "start": "Time to the first step",
    "accuracy": "Accuracy after the same time",
    "finetune": "Fine-tuning in the same time",
    "engines": "Engines",
    "serve": "Serving",
    "knn": "Nearest neighbours",
    "batch": "Features of many images",
    "processes": "Several processes",
    "plan": "Forecast and measured training",
}
SECTION_TITLES = {
    "vit": "Architecture",
    "train": "Training",
    "data": "Data",
    "preprocess": "Preprocessing",
    "pretrain": "Pretraining",
    "joint": "Images without labels",
    "teacher": "Teacher",
    "data.augment": "Augmentation",
    "data.columns": "Columns of a table",
}


def settings_page() -> str:
    """All settings of a recipe, one table for each section."""
    intro = (
        "# Settings\n\nEvery setting is a flag (`--train.lr 3e-4`), a line of a recipe in TOML "
        "(`lr = 3e-4` below `[train]`), and an entry of `settings` in Python "
        '(`{"train": {"lr": 3e-4}}`). A setting that you do not give is chosen from the data, or '
        "has the default below. The run folder keeps all of them in `recipe.toml`.\n"
    )
    return intro + "".join(settings_table(section) for section in SECTIONS)


def settings_table(section: str) -> str:
    cls = SECTIONS[section]
    types, comments = typing.get_type_hints(cls), field_comments(cls)
    lines = [
        f"\n## {SECTION_TITLES[section]}\n",
        "| setting | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for entry in fields(cls):
        name, kind = f"{section}.{entry.name}", types[entry.name]
        if is_dataclass(kind):
            continue
        chosen = section in CHOSEN_SECTIONS or name in CHOSEN_SETTINGS
        default = "chosen from the data" if chosen else format_default(entry)
        meaning = comments[entry.name].replace("|", "\\|")
        lines.append(f"| `{name}` | {format_type(kind)} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def format_default(entry: Any) -> str:
    default = entry.default if entry.default is not MISSING else entry.default_factory()
    return "not set" if default is None or default == "" else f"`{default}`"


def format_type(kind: Any) -> str:
    """A type as a reader says it: choices are listed, None is left out."""
    if typing.get_origin(kind) is typing.Literal:
        return " ".join(f"`{choice}`" for choice in typing.get_args(kind))
    parts = [part for part in typing.get_args(kind) if part is not type(None)]
    if len(parts) == 1 and typing.get_origin(kind) is not tuple:
        return format_type(parts[0])
    name = kind.__name__ if isinstance(kind, type) and not parts else str(kind)
    return name.replace("typing.", "").replace(" | None", "").replace("|", "or")


def api_page() -> str:
    """Every public name: first the functions, then the types with their methods."""
    values = {name: getattr(vitrail, name) for name in vitrail.__all__}
    functions = {name: value for name, value in values.items() if inspect.isfunction(value)}
    types = {name: value for name, value in values.items() if inspect.isclass(value)}
    parts = [
        "# Python API\n\nEverything below is imported as `vitrail.NAME`. The examples run as "
        "tests; in them, `runs/digits-1` is a run and `digit.png` an image.\n"
    ]
    parts += ["\n## Functions\n", *(format_function(name, f) for name, f in functions.items())]
    parts += ["\n## Types\n", *(format_class(name, cls) for name, cls in types.items())]
    return "".join(parts)


def format_function(name: str, function: Any, level: str = "###") -> str:
    signature = format_signature(name.rpartition(".")[2], function)
    return f"\n{level} `{name}`\n\n```python\n{signature}\n```\n\n{format_docstring(function)}\n"


def format_class(name: str, cls: type) -> str:
    """A type: its docstring, then its public methods and properties."""
    parts = [f"\n### `{name}`\n\n{format_docstring(cls)}\n"]
    if is_dataclass(cls):
        comments = field_comments(cls)
        rows = [f"| `{e.name}` | {comments.get(e.name) or ''} |" for e in fields(cls)]
        table = "\n".join(["| field | meaning |", "|---|---|", *rows])
        parts.append(f"\n{table}\n")
    for member, value in vars(cls).items():
        if member.startswith("_") or not inspect.getdoc(value):
            continue
        value = getattr(value, "__func__", value)  # of a class method
        if isinstance(value, property):
            parts.append(f"\n#### `{name}.{member}`\n\n{format_docstring(value)}\n")
        elif inspect.isfunction(value):
            parts.append(format_function(f"{name}.{member}", value, "####"))
    return "".join(parts)


def format_signature(name: str, function: Any) -> str:
    """`name(...)` on one line, or with one parameter on each."""
    signature = read_signature(function)
    line = name + clean_types(str(signature))
    if len(line) <= 88:
        return line
    parts, star = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts, star = [*parts, "*"], True
        parts.append(clean_types(str(parameter)))
    result = signature.return_annotation
    arrow = "" if result is signature.empty else f" -> {clean_types(str(result))}"
    return name + "(\n" + "".join(f"    {part},\n" for part in parts) + f"){arrow}"


class Words(str):
    """A type as a signature shows it: without quotes."""

    __repr__ = str.__str__


def read_signature(function: Any) -> inspect.Signature:
    """The signature, with its types as a reader would write them."""
    signature = inspect.signature(function)
    parameters = [
        one if one.annotation is one.empty else one.replace(annotation=spell_type(one.annotation))
        for one in signature.parameters.values()
    ]
    result = signature.return_annotation
    if result is not signature.empty:
        result = spell_type(result)
    return signature.replace(parameters=parameters, return_annotation=result)


def spell_type(kind: Any) -> Words:
    """`str | None`, whether it was written so, in quotes, or by an alias that Python expanded."""
    if isinstance(kind, str):
        return Words(kind)
    if kind is type(None):
        return Words("None")
    if typing.get_origin(kind) in (typing.Union, UnionType):
        return Words(" | ".join(spell_type(part) for part in typing.get_args(kind)))
    return Words(inspect.formatannotation(kind))


def clean_types(text: str) -> str:
    text = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text)  # vitrail.run.result.Run
    text = re.sub(r"<object object at 0x\w+>|<factory>", "...", text)
    return text.replace("'", '"') if text.count("'") % 2 == 0 else text


def format_docstring(value: Any) -> str:
    """The docstring as Markdown: `Args` become a list, examples a block."""
    text = inspect.getdoc(value) or ""
    text, _, example = text.partition(">>>")
    lines: list[str] = []
    listed = False
    for line in text.rstrip().splitlines():
        if line in ("Args:", "Returns:", "Raises:"):
            listed = True
            lines += ["", f"**{line[:-1].replace('Args', 'Parameters')}**", ""]
        elif listed and re.match(r" {4}\w[\w, ]*: ", line):
            name, _, meaning = line.strip().partition(": ")
            lines.append(f"- `{name}`: {meaning}")
        elif listed and line.startswith(" "):
            lines.append(f"  {line.strip()}")
        else:
            listed = False
            lines.append(line)
    body = "\n".join(lines).strip()
    return f"{body}\n\n```pycon\n>>>{example.rstrip()}\n```" if example else body


def benchmarks_page() -> str:
    """The measured tables and plots of bench/results."""
    parts = [
        "# Benchmarks\n\nMeasured by `python -m bench NAME`; `make bench` runs the short ones. "
        "Each table names its own commit, machine and versions. Unless a table says otherwise, "
        "a ratio above 1 means that the other contender is slower or larger.\n"
    ]
    order = list(BENCHMARKS)
    for path in sorted(RESULTS.glob("*.json"), key=lambda path: order.index(path.stem)):
        title = BENCHMARKS[path.stem]
        table = path.with_suffix(".md").read_text().replace(" ± ", "&nbsp;±&nbsp;")
        parts.append(f"\n## {title}\n\n{table}\n")
        if path.with_suffix(".svg").exists():
            parts.append(f"![{title}: the same numbers as a plot]({path.stem}.svg)\n")
        assert json.loads(path.read_text()), f"{path.name} is empty"
    return "".join(parts)
