"""What a search found as one page: how it went, which settings mattered, and the one test."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

from vitrail import __version__, files
from vitrail.display.figures import PALETTE, house, png, svg
from vitrail.display.page import templates
from vitrail.search.space import Choice, Range, Space
from vitrail.search.study import finished

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from optuna import Study
    from optuna.trial import FrozenTrial

PAGE, FIGURES = "search.html", "figures"
STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}
LEAST = 4  # finished trials from which something can be said of importance


def make(folder: Path, study: "Study", space: Space, facts: Mapping[str, Any]) -> Path:
    """Writes the page and every picture in it."""
    trials = finished(study)
    best = facts["best"]["trial"]
    pictures = {
        "history": history(trials, best),
        "time": against_time(trials, best),
        "slices": slices(trials, space, best),
    }
    if weights := importance(study, trials):
        pictures["importance"] = bars(weights)
    (folder / FIGURES).mkdir(exist_ok=True)
    for name, figure in pictures.items():
        files.write(folder / FIGURES / f"{name}.png", png(figure))
    template = templates(Path(__file__).parent).get_template("page.html")
    text = template.render(
        version=__version__,
        folder=folder,
        facts=facts,
        pictures={name: svg(figure) for name, figure in pictures.items()},
        names=list(space),
        rows=[row(one, space) for one in sorted(trials, key=rank)],
        recipe=(folder / "best.toml").read_text(encoding="utf-8"),
        percent=percent,
        weights=list(weights),
    )
    files.write(folder / PAGE, text)
    return folder / PAGE


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def rank(trial: "FrozenTrial") -> tuple[bool, float, int]:
    """The best first, then those that were not finished."""
    value = trial.value if trial.state.name == "COMPLETE" else None
    return value is None, -(value or 0.0), trial.number


def row(trial: "FrozenTrial", space: Space) -> dict[str, Any]:
    reached = reach(trial)
    return {
        "number": trial.number,
        "state": STATES[trial.state.name],
        "accuracy": "-" if reached is None else percent(reached),
        "seconds": f"{trial.user_attrs.get('seconds', 0):.0f}",
        "settings": [short(trial.params.get(name, "-")) for name in space],
        "reason": trial.user_attrs.get("reason", ""),
    }


def short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def reach(trial: "FrozenTrial") -> float | None:
    """Accuracy at the end, or when the trial was ended."""
    if trial.value is not None and trial.state.name == "COMPLETE":
        return trial.value
    return max(trial.intermediate_values.values(), default=None)


def history(trials: Sequence["FrozenTrial"], best: int) -> Figure:
    """Every trial in its order, and the best so far."""
    figure = Figure(figsize=(5.6, 3.3), layout="constrained")
    axes = figure.subplots()
    shown = scatter(axes, trials, lambda one: float(one.number), best)
    complete = [one for one in trials if one.state.name == "COMPLETE"]
    if complete:
        x = [one.number for one in complete]
        y = np.maximum.accumulate([one.value or 0.0 for one in complete])
        axes.step(x, y, where="post", color=PALETTE["blue"], linewidth=1.8, zorder=1)
    finish(axes, "trial", shown)
    return figure


def against_time(trials: Sequence["FrozenTrial"], best: int) -> Figure:
    figure = Figure(figsize=(5.6, 3.3), layout="constrained")
    axes = figure.subplots()
    shown = scatter(axes, trials, lambda one: one.user_attrs.get("seconds"), best)
    axes.set_xlim(left=0)
    finish(axes, "seconds of training", shown)
    return figure


def slices(trials: Sequence["FrozenTrial"], space: Space, best: int) -> Figure:
    """Accuracy along each setting, whatever the others were."""
    columns = min(3, len(space))
    lines = -(-len(space) // columns)
    figure = Figure(figsize=(3.75 * columns, 2.7 * lines), layout="constrained")
    grid = np.atleast_1d(figure.subplots(lines, columns, sharey=True)).ravel()
    for axes, (name, one) in zip(grid, space.items(), strict=False):
        shown = scatter(axes, trials, position(name, one), best)
        if isinstance(one, Range) and one.log:
            axes.set_xscale("log")
        finish(axes, name, shown, y="" if axes is not grid[0] else None)
        if isinstance(one, Choice):
            axes.set_xticks(range(len(one.values)), [str(value)[:12] for value in one.values])
        elif one.log:
            axes.xaxis.set_major_locator(LogLocator(numticks=6))
            axes.xaxis.set_minor_formatter(NullFormatter())
    for axes in grid[len(space) :]:
        axes.set_visible(False)
    return figure


def position(name: str, one: Range | Choice) -> Any:
    if isinstance(one, Choice):
        return lambda trial: one.values.index(trial.params[name]) if name in trial.params else None
    return lambda trial: trial.params.get(name)


def scatter(axes: "Axes", trials: Sequence["FrozenTrial"], where: Any, best: int) -> list[float]:
    """Finished trials as dots, ended ones as crosses, a ring around the best."""
    heights = []
    for trial in trials:
        x, y = where(trial), reach(trial)
        if x is None or y is None:
            continue
        heights.append(y)
        whole = trial.state.name == "COMPLETE"
        colour = PALETTE["blue" if whole else "soft"]
        axes.plot(x, y, "o" if whole else "x", color=colour, markersize=5, alpha=0.8, zorder=2)
        if trial.number == best:
            ring = {"markersize": 11, "fillstyle": "none", "markeredgewidth": 1.8, "zorder": 3}
            axes.plot(x, y, "o", color=PALETTE["amber"], **ring)  # type: ignore[arg-type]
    return heights


def finish(axes: "Axes", x: str, heights: list[float], y: str | None = None) -> None:
    if heights:
        margin = 0.06 * max(0.02, max(heights) - min(heights))
        axes.set_ylim(max(0.0, min(heights) - margin), min(1.0, max(heights)) + margin)
    house(axes, x, "validation images right" if y is None else y)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))


def importance(study: "Study", trials: Sequence["FrozenTrial"]) -> dict[str, float]:
    """How much of the differences among good trials each setting explains (Watanabe, 2023)."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    values = [one.value for one in trials if one.state.name == "COMPLETE"]
    if len(values) < LEAST or len(set(values)) < 2:
        return {}
    return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())


def bars(weights: Mapping[str, float]) -> Figure:
    figure = Figure(figsize=(5.6, 0.9 + 0.36 * len(weights)), layout="constrained")
    axes = figure.subplots()
    names = list(weights)[::-1]
    axes.barh(range(len(names)), [weights[name] for name in names], color=PALETTE["blue"])
    house(axes, "share of what made trials differ", "")
    axes.grid(False)
    axes.set_yticks(range(len(names)), names)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    return figure
