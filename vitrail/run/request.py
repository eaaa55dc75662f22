"""What the caller of a training asks for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitrail import files
from vitrail.data.config import Columns, LabelKind
from vitrail.data.source import Source, Split, label_kind
from vitrail.errors import UserError
from vitrail.pretraining.config import Method
from vitrail.run.recipe import (
    Recipe,
    check_settings,
    data_settings,
    merge_settings,
    read_recipe,
    settings_to_dict,
)
from vitrail.run.teacher import Teacher
from vitrail.training.distributed import World

OnEpoch = Callable[[dict[str, Any]], None]  # an exception that it raises ends the run

AUTO, NONE = "auto", "none"  # values of `weights`: chosen from the data, or training from scratch
LENGTH_SETTINGS = ("epochs", "steps")  # settings of [train] that determine the length of a run
TRANSFERABLE = {"image", "classes", "head", "drop_path", "dropout"}  # by any published weights
MAX_MINUTES = 1e7  # 19 years; more is a mistake


@dataclass(frozen=True, kw_only=True)
class Request:
    """The data, and what the caller has decided; None is chosen from the data."""

    data: str
    model: str | None = None
    weights: str = AUTO
    tune: str = AUTO
    minutes: float | None = None
    epochs: int | None = None
    seed: int | None = None
    device: str = "auto"
    method: Method | None = None  # how to learn without labels; None: with labels
    teacher: str | Teacher | None = None  # whose answers are learned too
    settings: Mapping[str, Any] = field(default_factory=dict)  # nested, as in a recipe
    reasons: tuple[str, ...] = ()  # why a recipe was changed

    def __post_init__(self) -> None:
        check_minutes(self.minutes)

    @property
    def columns(self) -> Columns:
        """The names of the columns of a data table."""
        return data_settings(self.settings).columns

    @property
    def labels(self) -> LabelKind | None:
        """Labels per image, as far as the caller says."""
        return data_settings(self.settings).labels

    @property
    def labelled(self) -> float:
        """Fraction of the training images whose labels are used."""
        return data_settings(self.settings).labelled

    @property
    def lacks_labels(self) -> bool:
        """Whether some images have no label, and the caller does not say what to start from."""
        given = self.weights != AUTO or "weights" in self.settings
        return not given and self.has_unlabelled

    @property
    def has_unlabelled(self) -> bool:
        """Whether the labels of some training images are missing or not used."""
        return self.labelled < 1 or self.labels == "partial"

    def with_labels(self, labels: LabelKind | None) -> "Request":
        """The same request for data that was opened with such labels."""
        if labels is None:
            return self
        data = {**self.settings.get("data", {}), "labels": labels}
        return replace(self, settings={**self.settings, "data": data})

    def with_settings_of(self, source: Source) -> "Request":
        """The same request, with the labels and columns that a source from Python has.

        A resume opens the path again, and needs them.
        """
        kind = label_kind(source)
        labels = getattr(source, "requested_labels", None) or (None if kind == "single" else kind)
        columns = settings_to_dict(getattr(source, "columns", Columns()))
        plain = settings_to_dict(Columns())
        named = {name: value for name, value in columns.items() if value != plain.get(name)}
        request = self.with_labels(labels)
        if not named:
            return request
        data = {**request.settings.get("data", {}), "columns": named}
        return replace(request, settings={**request.settings, "data": data})

    @property
    def asks_teacher(self) -> str | Teacher | None:
        """The teacher of the caller, or of the recipe."""
        return self.teacher or self.settings.get("teacher", {}).get("weights")

    @property
    def start_from(self) -> str:
        """The weights to fine-tune, "none" for training from scratch, or "auto".

        An architecture can only be trained from scratch.
        """
        if self.weights != AUTO:
            return self.weights
        if "weights" in self.settings:
            return str(self.settings["weights"]) or NONE
        names_model = self.model or self.settings.get("model")
        changes = self.settings.get("vit", {}).keys() - TRANSFERABLE
        return NONE if names_model or changes else AUTO


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run shows and leaves, besides its model."""

    tensorboard: bool = False
    quiet: bool = False
    report: bool = True
    test: bool = True  # evaluate on the test split at the end
    on_epoch: OnEpoch | None = None

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits of the final evaluation."""
        return ("val", "test") if self.test else ("val",)

    def for_rank(self, world: World) -> "Options":
        """Only the leader prints, and makes the report."""
        return self if world.is_leader else replace(self, quiet=True, report=False)


def name_data(data: str | Path | Source | None, settings: Mapping[str, Any]) -> str:
    """The data set of a request; by default that of its recipe."""
    if data is not None and not isinstance(data, str | Path):
        return str(data.path or data.name)
    if isinstance(data, Path):  # a folder, even if a built-in data set has its name
        data = str(files.expand_user(data).absolute())
    name = data or settings.get("source", "")
    if not name:
        raise UserError("`data` is missing; give a folder, a table, or a name such as digits")
    return str(name)


def check_minutes(minutes: float | None) -> None:
    if minutes is not None and not 0 < minutes <= MAX_MINUTES:
        raise UserError(f"`minutes` is {minutes:g}; give a number above 0, at most {MAX_MINUTES:g}")


def read_settings(
    recipe: str | Path | None,
    settings: Mapping[str, Any],
    minutes: float | None,
    epochs: int | None,
) -> dict[str, Any]:
    """The settings of a recipe file, changed by `settings`.

    At most one argument may give the length of the run; it wins over the file.
    """
    check_minutes(minutes)
    check_settings(Recipe, settings)
    return change_settings(read_recipe(recipe) if recipe else {}, settings, minutes, epochs)


def change_settings(
    table: dict[str, Any], settings: Mapping[str, Any], minutes: float | None, epochs: int | None
) -> dict[str, Any]:
    """The settings of a recipe, changed by `settings` and the length of the run."""
    arguments = {"minutes": minutes, "epochs": epochs}
    lengths = [name for name, value in arguments.items() if value is not None]
    lengths += [f"train.{name}" for name in LENGTH_SETTINGS if settings.get("train", {}).get(name)]
    if len(lengths) > 1:
        raise UserError(
            f"`{lengths[0]}` and `{lengths[1]}` both set the length of the run; give one of them"
        )
    if lengths:
        for name in LENGTH_SETTINGS:
            table.get("train", {}).pop(name, None)
    return merge_settings(table, settings)
