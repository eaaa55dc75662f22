"""What is searched: settings with their ranges or choices, from a TOML file or by default."""

import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vitrail.data.config import AUGMENTS, Augment
from vitrail.errors import UserError
from vitrail.run.recipe import SECTIONS, Recipe, build, plain
from vitrail.zoo.presets import PRESETS, SIZES

Scalar = str | int | float | bool
Params = dict[str, Any]

SMALL = ("Pico", "Nano", "Micro", "Mini")  # sizes that a default space tries
RATES = {"muon": (1e-3, 1e-1), "adamw": (1e-4, 1e-2)}
FEWEST, MOST = 9, 400  # patches of an image
POINTS = 3  # of a range, in a grid
LARGEST = 10_000  # points of a grid
FARTHEST = 10**18  # that a range may reach: whole numbers have 64 bits
STRONGEST = 10  # times an augmentation: nothing of it is left to grow

SPECIAL = {
    "size": "width, depth and heads of a small model by name",
    "augment": "kind of augmentation by name",
    "strength": "how far that goes: 1 is as named, 0 is none",
}


@dataclass(frozen=True, kw_only=True)
class Range:
    low: float
    high: float
    log: bool = False  # as likely between 1 and 10 as between 10 and 100
    points: int = POINTS  # in a grid

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def grid(self) -> list[float]:
        ends = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        steps = [ends[0] + (ends[1] - ends[0]) * n / (self.points - 1) for n in range(self.points)]
        found = [math.exp(step) if self.log else step for step in steps]
        if self.whole:
            return sorted({round(number) for number in found})
        found[0], found[-1] = self.low, self.high
        return found

    def holds(self, value: Any) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Choice:
    values: tuple[Scalar, ...]

    def grid(self) -> list[Scalar]:
        return list(self.values)

    def holds(self, value: Any) -> bool:
        return value in self.values


Space = dict[str, Range | Choice]


def read_space(path: str | Path) -> Space:
    """A TOML file of `"train.lr" = {low = 1e-4, high = 1e-2, log = true}` or lists of choices."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the space {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the space {path} is no TOML: {error}") from error
    try:
        return parse(dotted(table))
    except UserError as error:
        raise UserError(f"in the space {path}: {error}") from error


def dotted(table: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Sections such as [train] become names such as train.lr."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{where}{key}"
        if isinstance(value, Mapping) and name in SECTIONS:
            found |= dotted(value, f"{name}.")
        else:
            found[name] = value
    return found


def parse(table: Mapping[str, Any]) -> Space:
    if not table:
        raise UserError('it is empty; give at least one setting, such as "train.lr" = [1e-3, 1e-2]')
    space: Space = {}
    for name, value in table.items():
        known = (*names(), *SPECIAL)
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0)[0]
            raise UserError(f"there is no setting {name}; the nearest is {near}")
        space[name] = choice(name, value) if isinstance(value, list) else span(name, value)
    for name, dimension in space.items():
        check(name, dimension)
    return space


def names() -> list[str]:
    """Every setting that a recipe has, by its dotted name."""
    return [
        f"{section}.{entry.name}"
        for section, cls in SECTIONS.items()
        for entry in fields(cls)
        if f"{section}.{entry.name}" not in SECTIONS
    ]


def choice(name: str, values: list[Any]) -> Choice:
    odd = [value for value in values if not isinstance(value, str | int | float | bool)]
    if odd or len(values) < 1 or len(set(map(str, values))) < len(values):
        raise UserError(f"{name} has the choices {values}; give different numbers, words or truths")
    return Choice(values=tuple(values))


def span(name: str, value: Any) -> Range:
    wanted = "a list of choices, or {low = 1e-4, high = 1e-2, log = true}"
    if not isinstance(value, Mapping):
        raise UserError(f"{name} is {value!r}; give {wanted}")
    known = [entry.name for entry in fields(Range)]
    for key in value:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0)[0]
            raise UserError(f"{name} has no {key}; the nearest is {near}")
    if not {"low", "high"} <= value.keys():
        raise UserError(f"{name} has no {'low' if 'low' not in value else 'high'}; give {wanted}")
    numbers = [value["low"], value["high"]]
    if any(isinstance(one, bool) or not isinstance(one, int | float) for one in numbers):
        raise UserError(f"{name} goes from {numbers[0]!r} to {numbers[1]!r}; give two numbers")
    if not -FARTHEST <= numbers[0] < numbers[1] <= FARTHEST:
        low, high = (f"{one!r:.30}" for one in numbers)
        raise UserError(f"{name} goes from {low} to {high}; give low below high, within 1e18")
    log, points = value.get("log", False), value.get("points", POINTS)
    if not isinstance(log, bool) or (log and numbers[0] <= 0):
        raise UserError(f"{name} has log {log} and low {numbers[0]}; a log range begins above 0")
    if not isinstance(points, int) or isinstance(points, bool) or not 2 <= points <= LARGEST:
        raise UserError(f"{name} has {points!r:.30} points; give a whole number of 2 to {LARGEST}")
    return Range(low=numbers[0], high=numbers[1], log=log, points=points)


def check(name: str, dimension: Range | Choice) -> None:
    """Refuses values that no recipe takes, before a run is spent on them."""
    if name == "size":
        known: tuple[str, ...] = tuple(SIZES)
    elif name == "augment":
        known = tuple(AUGMENTS)
    else:
        known = ()
    if known:
        given = dimension.values if isinstance(dimension, Choice) else ("numbers",)
        for value in given:
            if value not in known:
                near = get_close_matches(str(value), known, n=1, cutoff=0)[0]
                raise UserError(f"{name} has no {value!r}; the nearest is {near}")
        return
    section, _, key = name.rpartition(".")
    ends = dimension.values if isinstance(dimension, Choice) else (dimension.low, dimension.high)
    if name == "strength":
        for value in ends:
            if isinstance(value, str | bool) or not 0 <= value <= STRONGEST:
                raise UserError(f"strength has {value!r:.50}; give numbers from 0 to {STRONGEST}")
    if section in ("", "vit"):  # those of a model are judged together, with the data
        return
    for value in ends:
        build(SECTIONS[section], {key: value}, f"{section}.")


def default_space(base: Recipe) -> Space:
    """Augmentation, learning rate, decay, size, patch and drop path, around what was chosen."""
    low, high = RATES[base.train.optimizer]
    if base.weights:
        low, high = low / 3, high / 3
    rate, decay = base.train.lr, base.train.weight_decay
    space: Space = {
        "train.lr": Range(low=min(low, rate), high=max(high, rate), log=True),
        "train.weight_decay": Range(low=min(1e-3, decay or 1e-3), high=max(0.3, decay), log=True),
        "vit.drop_path": Range(low=0.0, high=max(0.3, base.vit.drop_path)),
    }
    own = augment_name(base.data.augment)
    if own is not None:
        grey = ("none", "gentle digits", "digits")
        kinds = grey if base.vit.channels == 1 else ("none", "flips", "light", "medium", "strong")
        space["augment"] = Choice(values=kinds if own in kinds else (*kinds, own))
        space["strength"] = Range(low=0.25, high=1.5)
    size = base.model.partition("/")[0]
    own_size = SIZES.get(size, {}).items() <= plain(base.vit).items()  # no part of it was changed
    if not base.weights and size in SMALL and own_size:
        space["size"] = Choice(values=SMALL)
        if len(patches := fitting_patches(base)) > 1:
            space["vit.patch"] = Choice(values=patches)
    return space


def augment_name(augment: Augment) -> str | None:
    return next((name for name, one in AUGMENTS.items() if one == augment), None)


def fitting_patches(base: Recipe) -> tuple[int, ...]:
    own, (height, width) = base.vit.patch, base.vit.size
    return tuple(
        patch
        for patch in (own // 2, own, 2 * own)
        if patch >= 2
        and height % patch == width % patch == 0
        and FEWEST <= height // patch * (width // patch) <= MOST
    )


def starting_point(space: Space, base: Recipe) -> Params:
    """Where the chosen recipe itself lies in the space; nothing if it lies outside."""
    table = flat_recipe(base)
    table |= {"size": base.model.partition("/")[0], "strength": 1.0}
    table["augment"] = augment_name(base.data.augment)
    found = {name: table.get(name) for name in space}
    return found if all(one.holds(found[name]) for name, one in space.items()) else {}


def flat_recipe(recipe: Any, where: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in fields(recipe):
        value = getattr(recipe, entry.name)
        if is_dataclass(value):
            found |= flat_recipe(value, f"{where}{entry.name}.")
        else:
            found[f"{where}{entry.name}"] = value
    return found


def grid(space: Space) -> Iterator[Params]:
    """Every combination."""
    count = math.prod(len(dimension.grid()) for dimension in space.values())
    if count > LARGEST:
        raise UserError(f"the grid has {count:,} points; search fewer settings, or leave --grid")
    for values in itertools.product(*(dimension.grid() for dimension in space.values())):
        yield dict(zip(space, values, strict=True))


def changes(params: Mapping[str, Any], base: Recipe) -> tuple[dict[str, Any], str | None]:
    """Settings by section, as `train` takes them, and the model's name if it is another one."""
    table: dict[str, Any] = {}
    vit: dict[str, Any] = {}
    if "size" in params:
        vit |= SIZES[params["size"]]
    if {"augment", "strength"} & params.keys():
        kind = AUGMENTS[params["augment"]] if "augment" in params else base.data.augment
        table["data"] = {"augment": plain(strengthened(kind, params.get("strength", 1.0)))}
    for name, value in params.items():
        if name in SPECIAL:
            continue
        if name.startswith("vit."):
            vit[name.removeprefix("vit.")] = value
            continue
        *sections, key = name.split(".")
        place = table
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    size = params.get("size", base.model.partition("/")[0])
    model = f"{size}/{vit.get('patch', base.vit.patch)}"
    table["vit"] = plain(base.vit) | vit
    if base.weights:
        table["vit"] = vit
    return table, model if model in PRESETS and not base.weights else None


def strengthened(augment: Augment, strength: float) -> Augment:
    """Every amount times `strength`, as far as it may go; chances of a flip stay."""
    a, s = augment, strength
    if s == 1:
        return a
    return replace(
        a,
        shift=min(1.0, a.shift * s),
        scale=max(0.05, 1 - (1 - a.scale) * s),
        rotate=a.rotate * s,
        zoom=min(0.9, a.zoom * s),
        shear=a.shear * s,
        magnitude=min(1.0, a.magnitude * s) if a.policy != "none" else a.magnitude,
        erase=min(1.0, a.erase * s),
        mixup=a.mixup * s,
        cutmix=a.cutmix * s,
    )


def to_plain(space: Space) -> dict[str, Any]:
    """As the file has it."""
    return {
        name: list(one.values) if isinstance(one, Choice) else vars(one)
        for name, one in space.items()
    }
