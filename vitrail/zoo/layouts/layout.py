"""What a foreign layout consists of, and how its parameter names become Vitrail's and back."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.data.config import Preprocess
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.zoo.files.lazy import LazyTensor, Shape

# From foreign parameter names to Vitrail's. {i} to {n} match numbers, {p} weight or bias, {r} the
# rest of a name. Where a layout has several tensors for one parameter, such as separate queries,
# keys and values for the fused qkv, #0, #1, #2 number the chunks along the first axis.
NameTable = Mapping[str, str]
PLACEHOLDERS = {"p": "weight|bias", "r": r"[\w.]+", **dict.fromkeys("ijkn", r"\d+")}

MAX_LISTED = 3  # names in a message


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What the config files next to the weights say, in Vitrail's terms."""

    vit: dict[str, Any] = field(default_factory=dict)  # settings that no tensor shows
    classes: tuple[str, ...] | None = None
    preprocess: dict[str, Any] | None = None  # settings of `Preprocess`; the size may be missing
    names: tuple[str, ...] = ()  # under which the table of published weights may list them
    assumed: tuple[str, ...] = ()  # where Vitrail differs from what they say


@dataclass(frozen=True, kw_only=True)
class MappedStateDict:
    """A file's tensors under Vitrail's parameter names, each in chunks along its first axis."""

    format: str
    chunks: dict[str, dict[int, LazyTensor]]
    left_out: list[str] = field(default_factory=list)  # tensors without a parameter, and why
    assumed: list[str] = field(default_factory=list)
    vit: dict[str, Any] = field(default_factory=dict)  # settings that names or shapes reveal

    def shape(self, name: str) -> Shape | None:
        """Of the concatenated chunks; None if the file has no such parameter."""
        if name not in self.chunks:
            return None
        shapes = [chunk.shape for chunk in self.chunks[name].values()]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True, kw_only=True)
class Export:
    """A model in a foreign layout, ready to be written."""

    tensors: dict[str, Tensor]
    json_files: dict[str, dict[str, Any]] = field(default_factory=dict)  # by file name


Exporter = Callable[
    [ViTConfig, dict[str, Tensor], tuple[str, ...] | None, Preprocess | None], Export
]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How another library names and shapes the parameters of a ViT; see `mapping.LAYOUTS`."""

    name: str
    patch_weight: str  # name of the patch projection, by which a file is recognised
    names: NameTable
    normalise: Callable[[str], str] = str  # other spellings of the same name
    outside: str = ""  # why tensors without the prefix of the patch projection are not used
    unused: Mapping[str, str] = field(default_factory=dict)  # regex of tensor names, and the reason
    # Completes the mapping, given the normalised names and the source.
    finish: Callable[[MappedStateDict, list[str], str], None] | None = None
    config_key: str = ""  # by which its config.json is recognised
    parse_config: Callable[[Mapping[str, Any], Path], CheckpointConfig] | None = None
    export: Exporter | None = None  # None: Vitrail reads this layout and does not write it
    eps: tuple[float, ...] | None = None  # of layer norms that its files imply; None: config.json


def translate_name(name: str, table: NameTable) -> str | None:
    """The right-hand name for a left-hand name of the table; None if no line matches."""
    for pattern, target in compile_table(tuple(table.items())):
        if match := pattern.fullmatch(name):
            return target.format(**match.groupdict())
    return None


def invert_table(table: NameTable) -> dict[str, str]:
    return {ours: theirs for theirs, ours in table.items()}


@cache
def compile_table(lines: tuple[tuple[str, str], ...]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(template_pattern(left)), right) for left, right in lines]


def template_pattern(template: str) -> str:
    return re.sub(
        r"\\\{(\w)\\\}",
        lambda match: f"(?P<{match[1]}>{PLACEHOLDERS[match[1]]})",
        re.escape(template),
    )


def rename_tensors(state: Mapping[str, Tensor], table: NameTable) -> dict[str, Tensor]:
    """Every tensor under its foreign name; a fused qkv is split where the table numbers chunks."""
    inverse = invert_table(table)
    tensors: dict[str, Tensor] = {}
    for name, x in state.items():
        if theirs := translate_name(name, inverse):
            tensors[theirs] = x
            continue
        for number, chunk in enumerate(x.chunk(3)):
            part = translate_name(f"{name}#{number}", inverse)
            assert part is not None, f"{name} has no foreign name"
            tensors[part] = chunk
    return tensors


def check_supported(library: str, unsupported: Mapping[str, bool]) -> None:
    """Raises if the model has a feature that the library's classes do not support."""
    for feature, present in unsupported.items():
        if present:
            raise UserError(f"{library} does not support {feature}; try `to='timm'`")


def summarise_names(names: list[str]) -> str:
    """The first of many names, and how many more there are."""
    if len(names) <= MAX_LISTED:
        return ", ".join(names)
    shown = names[: MAX_LISTED - 1]
    return f"{', '.join(shown)} and {len(names) - len(shown)} more"
