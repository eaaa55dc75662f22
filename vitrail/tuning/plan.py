"""The plan of a search: everything its processes need to know, in one JSON file."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vitrail import files
from vitrail.data.open import open_data
from vitrail.data.source import Source, fingerprint, split_indices
from vitrail.data.sources.places import check_output_path
from vitrail.decoding import decode_table, read_json
from vitrail.errors import UserError
from vitrail.run.design import design_recipe
from vitrail.run.recipe import Recipe, settings_from_dict, settings_to_dict
from vitrail.run.request import LENGTH_SETTINGS, NONE, Request
from vitrail.run.terminal import Terminal
from vitrail.training.device import pick_device
from vitrail.tuning.space import (
    Space,
    default_space,
    iterate_grid,
    parse_space,
    read_space,
    space_to_dict,
)

PLAN = "search.json"
FORMAT = 2
DEFAULT_TRIALS = 20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a search."""

    data: str
    fingerprint: str  # checksum of the data
    settings: dict[str, Any]  # requested by recipe file and arguments, by section
    request: dict[str, Any]  # model, weights, epochs, seed and device, where they were given
    base: dict[str, Any]  # the complete recipe that the search starts from
    space: dict[str, Any]
    grid: bool
    minutes: float | None  # for each trial; None: the recipe's epochs or steps
    format: int = FORMAT

    @property
    def recipe(self) -> Recipe:
        return settings_from_dict(Recipe, self.base)

    @property
    def dimensions(self) -> Space:
        return parse_space(self.space)


def make_plan(
    request: Request,
    *,
    out: Path | None,
    space: str | Path | Mapping[str, Any] | None,
    grid: bool,
    trials: int | None,
    jobs: int,
    quiet: bool,
) -> tuple[Path, Plan]:
    """The folder and plan of the requested search; writes the plan if the folder has none.

    `request.minutes` is the time of the whole search.
    """
    dimensions = read_space(space) if space else None
    check_lengths(request, dimensions or {})
    source = open_data(request.data, columns=request.columns, labels=request.labels)
    if not len(split_indices(source, "val")):
        raise UserError(
            f"{source.name} has no validation images, which a search needs to select settings; "
            f"add a split named val"
        )
    folder = choose_folder(source, out)
    base = design_base(source, request, trials, jobs, quiet)
    given = {"model": request.model, "weights": base.weights or NONE, "epochs": request.epochs}
    given |= {"seed": request.seed, "device": request.device}
    plan = Plan(
        data=base.source,
        fingerprint=fingerprint(source),
        settings=dict(request.settings),
        request={name: value for name, value in given.items() if value is not None},
        base=settings_to_dict(base),
        space=space_to_dict(dimensions or default_space(base)),
        grid=grid,
        minutes=None,
    )
    count = count_trials(plan, trials)
    plan = replace(plan, minutes=minutes_per_trial(request.minutes, count, jobs))
    if not (folder / PLAN).is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(
                f"{folder} already exists and is not a search folder; choose another `out`"
            )
        write_plan(folder, plan)
    return folder, plan


def check_lengths(request: Request, space: Space) -> None:
    if request.minutes is None and request.epochs is None:
        return
    for name in LENGTH_SETTINGS:
        if f"train.{name}" in space:
            raise UserError(
                f"the space contains train.{name}, which also sets the length of a trial; "
                f"remove it, or omit `minutes` and `epochs`"
            )


def choose_folder(source: Source, out: Path | None) -> Path:
    folder = files.expand_user(out) if out else Path("runs") / f"search-{source.name}"
    files.check_utf8_name(folder)
    check_output_path(source, folder, "out")
    return folder


def design_base(
    source: Source, request: Request, trials: int | None, jobs: int, quiet: bool
) -> Recipe:
    """The recipe that `train` would choose for one trial."""
    minutes = minutes_per_trial(request.minutes, trials or DEFAULT_TRIALS, jobs)
    device = pick_device(request.device)
    design = design_recipe(source, replace(request, minutes=minutes), device)
    Terminal(quiet=quiet).print("\n  ".join(design.reasons))
    return design.recipe


def minutes_per_trial(minutes: float | None, trials: int, jobs: int) -> float | None:
    """Divides the time equally among the trials and the final run with the best settings."""
    return None if minutes is None else minutes / (math.ceil(trials / jobs) + 1)


def count_trials(plan: Plan, trials: int | None) -> int:
    """The number of trials; at most the number of points of a grid."""
    if not plan.grid:
        return trials or DEFAULT_TRIALS
    points = sum(1 for _ in iterate_grid(plan.dimensions))
    return min(trials or points, points)


def write_plan(folder: Path, plan: Plan) -> None:
    files.write_file(folder / PLAN, json.dumps(asdict(plan), indent=1) + "\n")


def read_plan(folder: Path) -> Plan:
    """The plan of a search folder; a damaged one is an error."""
    try:
        table = read_json(folder / PLAN)
    except (OSError, UserError) as error:
        raise damaged_plan_error(str(folder / PLAN), error) from error
    return decode_plan(table, str(folder / PLAN))


def damaged_plan_error(name: str, error: Exception) -> UserError:
    return UserError(f"{name} is damaged: {error!s:.100}; start a new search with another `out`")


def decode_plan(table: Any, name: str) -> Plan:
    """A plan from its JSON document, called `name`."""
    try:
        plan = decode_table(Plan, table, strict=(Plan,))
        valid = plan.format == FORMAT and bool(plan.recipe) and bool(plan.dimensions)
    except UserError as error:
        raise damaged_plan_error(name, error) from error
    if not valid:
        raise UserError(
            f"{name} has format {plan.format}, this version reads {FORMAT}; "
            f"start a new search with another `out`"
        )
    return plan


def check_same_plan(folder: Path, requested: Plan) -> Plan:
    """The stored plan; an error if it differs from the requested one."""
    stored, expected = read_plan(folder), asdict(requested)
    for name in ("data", "fingerprint", "settings", "request", "space", "grid"):
        if json.loads(json.dumps(expected[name])) != getattr(stored, name):
            what = {"fingerprint": "images", "request": "arguments"}.get(name, name)
            raise UserError(
                f"{folder} contains a search with different {what}; "
                f"pass the same ones to resume it, or choose another `out`"
            )
    return stored
