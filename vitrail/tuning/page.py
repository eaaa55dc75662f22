"""The report of a search: one HTML page with the trials, their settings and the test accuracy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

from vitrail import __version__, files
from vitrail.display.figures import PALETTE, style_axes, to_png, to_svg
from vitrail.display.page import load_templates
from vitrail.display.style import default_style
from vitrail.display.text import format_count, format_percent
from vitrail.tuning.result import SearchResult, format_value
from vitrail.tuning.space import Choice, Range, Space
from vitrail.tuning.study import finished_trials

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from optuna import Study
    from optuna.trial import FrozenTrial

PAGE, FIGURES = "search.html", "figures"
STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}
MIN_TRIALS = 4  # complete trials needed to estimate importances
PLOT_SIZE = (5.6, 3.3)  # inches
LABEL_LENGTH = 12  # characters of a choice on an axis


def write_search_page(folder: Path, study: "Study", space: Space, result: SearchResult) -> None:
    """Writes the page and its figures."""
    trials = finished_trials(study)
    best = result.best.trial
    figures = {
        "history": draw_history(trials, best),
        "time": draw_training_time(trials, best),
        "slices": draw_slices(trials, space, best),
    }
    if importances := compute_importances(study, trials):
        figures["importance"] = draw_importances(importances)
    (folder / FIGURES).mkdir(exist_ok=True)
    for name, figure in figures.items():
        files.write_file(folder / FIGURES / f"{name}.png", to_png(figure))
    template = load_templates(Path(__file__).parent).get_template("page.html")
    text = template.render(
        version=__version__,
        folder=folder,
        result=result,
        trials=format_count(result.trials, "trial"),
        figures={name: to_svg(figure) for name, figure in figures.items()},
        names=list(space),
        rows=[describe_trial(trial, space) for trial in sorted(trials, key=trial_rank)],
        recipe=result.recipe.read_text(encoding="utf-8"),
        percent=format_percent,
        importances=list(importances),
    )
    files.write_file(result.report, text)


def trial_rank(trial: "FrozenTrial") -> tuple[bool, float, int]:
    """Sorts complete trials by descending accuracy, then the others by number."""
    value = trial.value if trial.state.name == "COMPLETE" else None
    return value is None, -(value or 0.0), trial.number


def describe_trial(trial: "FrozenTrial", space: Space) -> dict[str, Any]:
    """A row of the table of trials."""
    accuracy = last_accuracy(trial)
    return {
        "number": trial.number,
        "state": STATES[trial.state.name],
        "accuracy": "-" if accuracy is None else format_percent(accuracy),
        "seconds": f"{trial.user_attrs.get('seconds', 0):.0f}",
        "settings": [format_value(trial.params.get(name, "-")) for name in space],
        "reason": trial.user_attrs.get("reason", ""),
    }


def last_accuracy(trial: "FrozenTrial") -> float | None:
    """Validation accuracy at the end, or the best one that a pruned or failed trial reported."""
    if trial.value is not None and trial.state.name == "COMPLETE":
        return trial.value
    return max(trial.intermediate_values.values(), default=None)


@default_style()
def draw_history(trials: Sequence["FrozenTrial"], best: int) -> Figure:
    """Validation accuracy of every trial, and the best so far."""
    figure = Figure(figsize=PLOT_SIZE, layout="constrained")
    axes = figure.subplots()
    accuracies = scatter_trials(axes, trials, lambda trial: float(trial.number), best)
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    if complete:
        x = [trial.number for trial in complete]
        y = np.maximum.accumulate([trial.value or 0.0 for trial in complete])
        axes.step(x, y, where="post", color=PALETTE["blue"], linewidth=1.8, zorder=1)
    scale_accuracy_axis(axes, "trial", accuracies)
    return figure


@default_style()
def draw_training_time(trials: Sequence["FrozenTrial"], best: int) -> Figure:
    """Validation accuracy against training time."""
    figure = Figure(figsize=PLOT_SIZE, layout="constrained")
    axes = figure.subplots()
    accuracies = scatter_trials(axes, trials, lambda trial: trial.user_attrs.get("seconds"), best)
    axes.set_xlim(left=0)
    scale_accuracy_axis(axes, "training time (seconds)", accuracies)
    return figure


@default_style()
def draw_slices(trials: Sequence["FrozenTrial"], space: Space, best: int) -> Figure:
    """A slice plot: validation accuracy against each setting."""
    columns = min(3, len(space))
    rows = -(-len(space) // columns)
    figure = Figure(figsize=(3.75 * columns, 2.7 * rows), layout="constrained")
    grid = np.atleast_1d(figure.subplots(rows, columns, sharey=True)).ravel()
    for axes, (name, dimension) in zip(grid, space.items(), strict=False):
        accuracies = scatter_trials(axes, trials, axis_position(name, dimension), best)
        if isinstance(dimension, Range) and dimension.log:
            axes.set_xscale("log")
        scale_accuracy_axis(axes, name, accuracies, label="" if axes is not grid[0] else None)
        if isinstance(dimension, Choice):
            axes.set_xticks(
                range(len(dimension.values)),
                [str(value)[:LABEL_LENGTH] for value in dimension.values],
            )
        elif dimension.log:
            axes.xaxis.set_major_locator(LogLocator(numticks=6))
            axes.xaxis.set_minor_formatter(NullFormatter())
    for axes in grid[len(space) :]:
        axes.set_visible(False)
    return figure


def axis_position(name: str, dimension: Range | Choice) -> Any:
    """A function from a trial to its x coordinate; None if it does not have the setting."""
    if isinstance(dimension, Choice):
        return lambda trial: (
            dimension.values.index(trial.params[name]) if name in trial.params else None
        )
    return lambda trial: trial.params.get(name)


def scatter_trials(
    axes: "Axes", trials: Sequence["FrozenTrial"], position: Any, best: int
) -> list[float]:
    """Draws complete trials as dots, others as crosses, and a ring around the best one.

    Returns the accuracies.
    """
    accuracies = []
    for trial in trials:
        x, y = position(trial), last_accuracy(trial)
        if x is None or y is None:
            continue
        accuracies.append(y)
        complete = trial.state.name == "COMPLETE"
        colour = PALETTE["blue" if complete else "soft"]
        axes.plot(x, y, "o" if complete else "x", color=colour, markersize=5, alpha=0.8, zorder=2)
        if trial.number == best:
            ring = {"markersize": 11, "fillstyle": "none", "markeredgewidth": 1.8, "zorder": 3}
            axes.plot(x, y, "o", color=PALETTE["amber"], **ring)  # type: ignore[arg-type]
    return accuracies


def scale_accuracy_axis(
    axes: "Axes", x: str, accuracies: list[float], label: str | None = None
) -> None:
    """Fits the y axis to the accuracies, and labels both axes."""
    if accuracies:
        low, high = min(accuracies), max(accuracies)
        margin = 0.06 * max(0.02, high - low)
        axes.set_ylim(max(0.0, low - margin), min(1.0, high) + margin)
    style_axes(axes, x, "validation accuracy" if label is None else label)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))


def compute_importances(study: "Study", trials: Sequence["FrozenTrial"]) -> dict[str, float]:
    """Hyper-parameter importances by PED-ANOVA (Watanabe et al., 2023); empty for few trials."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    values = [trial.value for trial in trials if trial.state.name == "COMPLETE"]
    if len(values) < MIN_TRIALS or len(set(values)) < 2:
        return {}
    return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())


@default_style()
def draw_importances(importances: Mapping[str, float]) -> Figure:
    figure = Figure(figsize=(PLOT_SIZE[0], 0.9 + 0.36 * len(importances)), layout="constrained")
    axes = figure.subplots()
    names = list(importances)[::-1]
    axes.barh(range(len(names)), [importances[name] for name in names], color=PALETTE["blue"])
    style_axes(axes, "importance", "")
    axes.grid(False)
    axes.set_yticks(range(len(names)), names)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    return figure
