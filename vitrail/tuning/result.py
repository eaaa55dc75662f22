"""The result of a hyper-parameter search."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from vitrail.display.text import format_accuracy, format_count, format_percent


@dataclass(frozen=True, kw_only=True)
class SplitAccuracy:
    """Accuracy on a split, with its 95 % confidence interval (Wilson)."""

    accuracy: float
    interval: tuple[float, float]

    def __str__(self) -> str:
        return format_accuracy(self.accuracy, self.interval)


@dataclass(frozen=True, kw_only=True)
class BestTrial:
    """The trial with the highest validation accuracy."""

    value: float  # its validation accuracy: the maximum over all trials, so biased upwards
    settings: Mapping[str, Any]  # values of the search space, by dotted names
    trial: int  # its number


@dataclass(frozen=True, kw_only=True, repr=False)
class SearchResult:
    """What a search found: the best settings, and the run that was trained again with them.

    >>> from pathlib import Path
    >>> from vitrail.tuning.result import BestTrial, SearchResult
    >>> best = BestTrial(value=0.973, settings={"train.lr": 0.01}, trial=7)
    >>> SearchResult(trials=20, pruned=3, failed=0, best=best, recipe=Path("s/best.toml"),
    ...              val=None, test=None, tests=0, run=Path("s/final-007"), folder=Path("s"),
    ...              report=Path("s/search.html"))
    SearchResult: 20 trials (3 pruned, 0 failed)
      best trial 7, validation accuracy 97.3 %
        train.lr = 0.01
      recipe s/best.toml
      report s/search.html
    """

    trials: int  # finished trials, including pruned and failed ones
    pruned: int
    failed: int
    best: BestTrial
    recipe: Path  # TOML file that repeats the best trial with `vitrail train --recipe`
    val: SplitAccuracy | None  # of the best settings, trained again
    test: SplitAccuracy | None  # of that run; None without test images
    tests: int  # runs tested in this folder: more than one after an extended search
    run: Path  # folder of that run
    folder: Path  # of the search
    report: Path  # HTML page

    def to_dict(self) -> dict[str, Any]:
        """The document that `vitrail search --json` prints.

        >>> finished = "runs/search-digits"
        >>> vitrail.search("digits", out=finished).to_dict()["best"]  # doctest: +SKIP
        """
        return {
            "trials": self.trials,
            "best": asdict(self.best),
            "recipe": str(self.recipe),
            "test": accuracy_to_dict(self.test),
            "val": accuracy_to_dict(self.val),
            "run": str(self.run),
            "tests": self.tests,
            "pruned": self.pruned,
            "failed": self.failed,
            "page": str(self.report),
        }

    def __repr__(self) -> str:
        accuracy = format_percent(self.best.value)
        lines = [
            f"SearchResult: {format_count(self.trials, 'trial')} "
            f"({self.pruned} pruned, {self.failed} failed)",
            f"  best trial {self.best.trial}, validation accuracy {accuracy}",
            *(f"    {name} = {format_value(value)}" for name, value in self.best.settings.items()),
        ]
        if self.test is not None:
            lines.append(f"  trained again: test accuracy {self.test}")
        return "\n".join([*lines, f"  recipe {self.recipe}", f"  report {self.report}"])

    def _repr_html_(self) -> str:
        rows = {
            "trials": f"{self.trials} ({self.pruned} pruned, {self.failed} failed)",
            "best trial": str(self.best.trial),
            "best validation accuracy": format_percent(self.best.value),
            **{name: format_value(value) for name, value in self.best.settings.items()},
            "test accuracy, trained again": "no test images" if self.test is None else self.test,
            "recipe": self.recipe,
            "report": self.report,
        }
        cells = (
            f"<tr><th style='text-align: left'>{escape(name)}</th>"
            f"<td style='text-align: left'>{escape(str(value))}</td></tr>"
            for name, value in rows.items()
        )
        return f"<table>{''.join(cells)}</table>"


def accuracy_to_dict(score: SplitAccuracy | None) -> dict[str, Any] | None:
    return None if score is None else {"accuracy": score.accuracy, "interval": list(score.interval)}


def accuracy_from_dict(table: Mapping[str, Any] | None) -> SplitAccuracy | None:
    """From the metrics of a run."""
    if table is None:
        return None
    low, high = table["interval"]
    return SplitAccuracy(accuracy=table["accuracy"], interval=(low, high))


def format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
