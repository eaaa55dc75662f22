"""The search space: settings with ranges or choices, from a TOML file, a mapping or by default."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vitrail.data.config import AUGMENT_PRESETS, Augment
from vitrail.decoding import read_toml
from vitrail.errors import UserError
from vitrail.run.recipe import SECTIONS, Recipe, settings_from_dict, settings_to_dict
from vitrail.zoo.presets import HYBRID_SIZES, PRESETS, R9_PATCHES, SIZES

Scalar = str | int | float | bool
Params = dict[str, Any]

ALL_SIZES = SIZES | HYBRID_SIZES
SEARCHED_SIZES = (("Pico", "Nano", "Micro", "Mini"), tuple(HYBRID_SIZES))  # of default spaces
LR_RANGES = {"muon": (1e-3, 1e-1), "adamw": (1e-4, 1e-2)}  # of the default space
FINE_TUNING_DIVISOR = 3  # of both bounds: fine-tuning needs lower learning rates
WEIGHT_DECAY_RANGE = (1e-3, 0.3)
MAX_DROP_PATH = 0.3  # of the default space
STRENGTH_RANGE = (0.25, 1.5)  # of the default space
MIN_PATCHES, MAX_PATCHES = 9, 400  # number of patches that the default space allows
GRID_POINTS = 3  # default number of values of a range in a grid
MAX_GRID = 10_000  # points of a grid
MAX_BOUND = 10**18  # of a range, so that integers fit into 64 bits
MAX_STRENGTH = 10  # a larger factor is most likely a typo
MIN_CROP_SCALE, MAX_ZOOM = 0.05, 0.9  # limits when an augmentation is scaled up

SPECIAL_SETTINGS = {  # each sets several settings of a recipe
    "size": "width, depth and heads of a small model by name",
    "augment": "augmentation preset by name",
    "strength": "factor for every magnitude of the augmentation: 1 keeps it, 0 disables it",
}


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from `low` to `high`, both included; integers if both ends are integers."""

    low: float
    high: float
    log: bool = False  # sample the logarithm uniformly
    points: int = GRID_POINTS  # in a grid

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def grid_values(self) -> list[float]:
        ends = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        steps = [ends[0] + (ends[1] - ends[0]) * n / (self.points - 1) for n in range(self.points)]
        values = [math.exp(step) if self.log else step for step in steps]
        if self.is_integer:
            return sorted({round(number) for number in values})
        values[0], values[-1] = self.low, self.high
        return values

    def contains(self, value: Any) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of several values."""

    values: tuple[Scalar, ...]

    def grid_values(self) -> list[Scalar]:
        return list(self.values)

    def contains(self, value: Any) -> bool:
        return value in self.values


Space = dict[str, Range | Choice]


def read_space(space: str | Path | Mapping[str, Any]) -> Space:
    """A space from a TOML file or a mapping.

    >>> read_space({"train.lr": {"low": 1e-4, "high": 1e-2, "log": True}})
    {'train.lr': Range(low=0.0001, high=0.01, log=True, points=3)}
    """
    if isinstance(space, Mapping):
        return parse_space(flatten_sections(space))
    try:
        table = read_toml(space)
    except (OSError, UserError) as error:
        raise UserError(f"cannot read the space {space}: {error}") from error
    try:
        return parse_space(flatten_sections(table))
    except UserError as error:
        raise UserError(f"in the space {space}: {error}") from error


def flatten_sections(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turns sections such as [train] into dotted names such as train.lr."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name in SECTIONS:
            flat |= flatten_sections(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def parse_space(table: Mapping[str, Any]) -> Space:
    """A space from dotted names with lists of choices or tables of `low` and `high`."""
    if not isinstance(table, Mapping):
        raise UserError(f"the space is {table!r:.60}; give a table of settings")
    if not table:
        raise UserError(
            'the space is empty; give at least one setting, such as "train.lr" = [1e-3, 1e-2]'
        )
    space: Space = {}
    known = (*setting_names(), *SPECIAL_SETTINGS)
    for name, value in table.items():
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0)[0]
            raise UserError(f"unknown setting {name}; the nearest is {near}")
        is_choice = isinstance(value, list | tuple)
        space[name] = parse_choice(name, value) if is_choice else parse_range(name, value)
    for name, dimension in space.items():
        check_dimension(name, dimension)
    return space


def setting_names() -> list[str]:
    """The dotted names of all settings of a recipe."""
    return [
        f"{section}.{entry.name}"
        for section, cls in SECTIONS.items()
        for entry in fields(cls)
        if f"{section}.{entry.name}" not in SECTIONS
    ]


def parse_choice(name: str, values: Sequence[Any]) -> Choice:
    scalars = all(isinstance(value, str | int | float | bool) for value in values)
    if not scalars or len(values) < 1 or len(set(map(str, values))) < len(values):
        raise UserError(
            f"{name} has the choices {list(values)}; "
            f"give at least one number, string or boolean, without repeats"
        )
    return Choice(values=tuple(values))


def parse_range(name: str, value: Any) -> Range:
    expected = "a list of choices, or {low = 1e-4, high = 1e-2, log = true}"
    if not isinstance(value, Mapping):
        raise UserError(f"{name} is {value!r}; give {expected}")
    known = [entry.name for entry in fields(Range)]
    for key in value:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0)[0]
            raise UserError(f"{name} has an unknown key {key}; the nearest is {near}")
    if not {"low", "high"} <= value.keys():
        raise UserError(f"{name} has no {'low' if 'low' not in value else 'high'}; give {expected}")
    low, high = value["low"], value["high"]
    if any(isinstance(end, bool) or not isinstance(end, int | float) for end in (low, high)):
        raise UserError(f"{name} has low {low!r} and high {high!r}; give two numbers")
    if not -MAX_BOUND <= low < high <= MAX_BOUND:
        raise UserError(
            f"{name} has low {low!r:.30} and high {high!r:.30}; give low below high, within 1e18"
        )
    log, points = value.get("log", False), value.get("points", GRID_POINTS)
    if not isinstance(log, bool) or (log and low <= 0):
        raise UserError(
            f"{name} has log {log} and low {low}; log is true or false, and needs a positive low"
        )
    if not isinstance(points, int) or isinstance(points, bool) or not 2 <= points <= MAX_GRID:
        raise UserError(f"{name} has {points!r:.30} points; give an integer from 2 to {MAX_GRID}")
    return Range(low=low, high=high, log=log, points=points)


def check_dimension(name: str, dimension: Range | Choice) -> None:
    """Rejects values that a recipe rejects, before a trial is spent on them."""
    if name == "size":
        known: tuple[str, ...] = tuple(ALL_SIZES)
    elif name == "augment":
        known = tuple(AUGMENT_PRESETS)
    else:
        known = ()
    if known:
        if isinstance(dimension, Range):
            raise UserError(f"{name} is a range; give a list of names: {', '.join(known)}")
        for value in dimension.values:
            if value not in known:
                near = get_close_matches(str(value), known, n=1, cutoff=0)[0]
                raise UserError(f"unknown {name} {value!r}; the nearest is {near}")
        return
    section, _, key = name.rpartition(".")
    ends = dimension.values if isinstance(dimension, Choice) else (dimension.low, dimension.high)
    if name == "strength":
        for value in ends:
            if isinstance(value, str | bool) or not 0 <= value <= MAX_STRENGTH:
                raise UserError(
                    f"strength has {value!r:.50}; give numbers from 0 to {MAX_STRENGTH}"
                )
    if section in ("", "vit"):  # settings of the model are checked together, with the data
        return
    for value in ends:
        settings_from_dict(SECTIONS[section], {key: value}, f"{section}.")


def default_space(base: Recipe) -> Space:
    """Learning rate, weight decay, drop path, augmentation, size and patch around a recipe."""
    low, high = LR_RANGES[base.train.optimizer]
    if base.weights:
        low, high = low / FINE_TUNING_DIVISOR, high / FINE_TUNING_DIVISOR
    lr, decay = base.train.lr, base.train.weight_decay
    low_decay, high_decay = WEIGHT_DECAY_RANGE
    space: Space = {
        "train.lr": Range(low=min(low, lr), high=max(high, lr), log=True),
        "train.weight_decay": Range(
            low=min(low_decay, decay or low_decay), high=max(high_decay, decay), log=True
        ),
        "vit.drop_path": Range(low=0.0, high=max(MAX_DROP_PATH, base.vit.drop_path)),
    }
    current = augment_name(base.data.augment)
    if current is not None:
        grey = ("none", "gentle digits", "digits")
        presets = grey if base.vit.channels == 1 else ("none", "flips", "light", "medium", "strong")
        space["augment"] = Choice(values=presets if current in presets else (*presets, current))
        space["strength"] = Range(low=STRENGTH_RANGE[0], high=STRENGTH_RANGE[1])
    size = base.model.partition("/")[0]
    unchanged = ALL_SIZES.get(size, {}).items() <= settings_to_dict(base.vit).items()
    family = next((sizes for sizes in SEARCHED_SIZES if size in sizes), None)
    if not base.weights and family and unchanged:
        space["size"] = Choice(values=family)
        if len(patches := candidate_patches(base)) > 1:
            space["vit.patch"] = Choice(values=patches)
    return space


def augment_name(augment: Augment) -> str | None:
    """The name of the preset that equals an augmentation; None if there is none."""
    return next((name for name, preset in AUGMENT_PRESETS.items() if preset == augment), None)


def candidate_patches(base: Recipe) -> tuple[int, ...]:
    """Half, once and twice the patch size, if they divide the image size."""
    patch_size, (height, width) = base.vit.patch, base.vit.size
    return tuple(
        patch
        for patch in (patch_size // 2, patch_size, 2 * patch_size)
        if (patch in R9_PATCHES if base.vit.stem == "r9" else patch >= 2)
        and height % patch == width % patch == 0
        and MIN_PATCHES <= height // patch * (width // patch) <= MAX_PATCHES
    )


def initial_params(space: Space, base: Recipe) -> Params:
    """The recipe as a point of the space; empty if it is outside."""
    table = flatten_recipe(base)
    table |= {"size": base.model.partition("/")[0], "strength": 1.0}
    table["augment"] = augment_name(base.data.augment)
    params = {name: table.get(name) for name in space}
    inside = all(dimension.contains(params[name]) for name, dimension in space.items())
    return params if inside else {}


def flatten_recipe(recipe: Any, prefix: str = "") -> dict[str, Any]:
    """The settings of a recipe by dotted names."""
    flat: dict[str, Any] = {}
    for entry in fields(recipe):
        value = getattr(recipe, entry.name)
        if is_dataclass(value):
            flat |= flatten_recipe(value, f"{prefix}{entry.name}.")
        else:
            flat[f"{prefix}{entry.name}"] = value
    return flat


def iterate_grid(space: Space) -> Iterator[Params]:
    """Every combination of the grid values."""
    count = math.prod(len(dimension.grid_values()) for dimension in space.values())
    if count > MAX_GRID:
        raise UserError(
            f"the grid has {count:,} points, more than {MAX_GRID:,}; "
            f"search fewer settings, or omit `grid`"
        )
    for values in itertools.product(*(dimension.grid_values() for dimension in space.values())):
        yield dict(zip(space, values, strict=True))


def params_to_settings(
    params: Mapping[str, Any], base: Recipe
) -> tuple[dict[str, Any], str | None]:
    """Settings by section, as `train` takes them, and the model preset if there is one."""
    table: dict[str, Any] = {}
    vit: dict[str, Any] = {}
    if "size" in params:
        vit |= ALL_SIZES[params["size"]]
    if {"augment", "strength"} & params.keys():
        preset = AUGMENT_PRESETS[params["augment"]] if "augment" in params else base.data.augment
        augment = scale_augmentation(preset, params.get("strength", 1.0))
        table["data"] = {"augment": settings_to_dict(augment)}
    for name, value in params.items():
        if name in SPECIAL_SETTINGS:
            continue
        if name.startswith("vit."):
            vit[name.removeprefix("vit.")] = value
            continue
        *sections, key = name.split(".")
        section_table = table
        for section in sections:
            section_table = section_table.setdefault(section, {})
        section_table[key] = value
    size = params.get("size", base.model.partition("/")[0])
    model = f"{size}/{vit.get('patch', base.vit.patch)}"
    table["vit"] = settings_to_dict(base.vit) | vit
    if base.weights:
        table["vit"] = vit
    return table, model if model in PRESETS and not base.weights else None


def scale_augmentation(augment: Augment, strength: float) -> Augment:
    """Scales every magnitude by `strength`, within its limits; flip probabilities are unchanged."""
    a, s = augment, strength
    if s == 1:
        return a
    return replace(
        a,
        shift=min(1.0, a.shift * s),
        scale=max(MIN_CROP_SCALE, 1 - (1 - a.scale) * s),
        rotate=a.rotate * s,
        zoom=min(MAX_ZOOM, a.zoom * s),
        shear=a.shear * s,
        magnitude=min(1.0, a.magnitude * s) if a.policy != "none" else a.magnitude,
        erase=min(1.0, a.erase * s),
        mixup=a.mixup * s,
        cutmix=a.cutmix * s,
    )


def space_to_dict(space: Space) -> dict[str, Any]:
    """The space as a TOML file would state it."""
    return {
        name: list(dimension.values) if isinstance(dimension, Choice) else vars(dimension)
        for name, dimension in space.items()
    }
