"""The result of `train` and `resume`: where the run is, how good it is, its classifier."""

from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.display.text import format_accuracy, format_duration
from vitrail.run.storage.record import REPORT

if TYPE_CHECKING:
    from vitrail.inference.backbone import Backbone
    from vitrail.inference.classifier import Classifier

SPLIT_NAMES = {"val": "validation", "test": "test"}


@dataclass(frozen=True, kw_only=True, repr=False)
class Run:
    """A finished run.

    `metrics` has the keys that `vitrail train --json` prints: run, model, epochs, steps, seconds,
    and for val and test the accuracy with its 95 % confidence interval (None if not evaluated).

    >>> run = vitrail.resume("runs/digits-1")  # a finished run is returned as it is
    >>> run.classifier.predict("digit.png").label in run.classifier.classes
    True
    """

    folder: Path
    metrics: dict[str, Any]
    is_leader: bool = field(default=True, compare=False)  # false on other ranks of a torchrun

    @cached_property
    def classifier(self) -> "Classifier":
        """The trained classifier, loaded at first use.

        >>> vitrail.resume("runs/digits-1").classifier.classes[:3]
        ('0', '1', '2')
        """
        from vitrail.inference.load import load

        return load(self.folder)

    @property
    def report(self) -> Path | None:
        """The path of the report, or None if the run has none.

        >>> run = vitrail.resume("runs/digits-1", report=False)
        >>> run.report is None or run.report.name == "report.html"
        True
        """
        path = self.folder / REPORT
        return path if path.is_file() else None

    def __repr__(self) -> str:
        scores = "".join(f", {name} {text}" for name, text in self._scores().items())
        start = f"{type(self).__name__}({str(self.folder)!r}"
        return (
            f"{start}: {self.metrics['model']}, {self.metrics['epochs']} epochs, "
            f"{self.metrics['steps']} steps, {format_duration(self.metrics['seconds'])}{scores})"
        )

    def _repr_html_(self) -> str:
        rows = {
            "model": self.metrics["model"],
            "training": f"{self.metrics['epochs']} epochs, {self.metrics['steps']} steps, "
            f"{format_duration(self.metrics['seconds'])}",
            **self._scores(),
            "folder": str(self.folder),
        }
        cells = "".join(
            f"<tr><th style='text-align: left'>{escape(name)}</th>"
            f"<td style='text-align: left'>{escape(str(text))}</td></tr>"
            for name, text in rows.items()
        )
        link = ""
        if self.report is not None:
            link = f"<p><a href='{escape(self.report.as_posix())}'>report</a></p>"
        return f"<table>{cells}</table>{link}"

    def _scores(self) -> dict[str, str]:
        return {
            f"{name} accuracy": format_accuracy(score["accuracy"], score["interval"])
            for split, name in SPLIT_NAMES.items()
            if (score := self.metrics[split]) is not None
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class Pretraining(Run):
    """A finished pretraining.

    `metrics` has the keys that `vitrail pretrain --json` prints: run, model, method, epochs, steps,
    seconds, the held-out loss, the effective rank of the features, and the accuracies of a probe
    if there are labels.

    >>> vitrail.resume("runs/digits-pre-1").backbone.features("digit.png").shape[0]
    1
    """

    @cached_property
    def backbone(self) -> "Backbone":
        """The backbone, loaded at first use.

        >>> vitrail.resume("runs/digits-pre-1").backbone.model.config.head
        'none'
        """
        from vitrail.inference.backbone import load_backbone

        return load_backbone(self.folder)

    def _scores(self) -> dict[str, str]:
        scores = {
            "held-out loss": f"{self.metrics['loss']:.3f}",
            "effective rank": f"{self.metrics['rank']:.1f}",
        }
        if (probe := self.metrics["probe"]) is not None:
            scores["linear probe"] = format_accuracy(probe["linear"], probe["interval"])
        return scores


def make_run(folder: Path, metrics: dict[str, Any], is_leader: bool) -> Run:
    """The result of a finished run, of whichever kind."""
    kind = Pretraining if "method" in metrics else Run
    return kind(folder=folder, metrics=metrics, is_leader=is_leader)
