"""Several runs side by side, and whether they differ by more than chance."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail import __version__
from vitrail.display.page import templates
from vitrail.errors import UserError
from vitrail.evaluation import metrics
from vitrail.model.cost import parameters
from vitrail.run.record import Record, read_run

CHANCE = 0.05  # below this, a difference is called more than chance; shared by all comparisons
COLUMNS = ("", "run", "data", "model", "parameters", "steps", "seconds", "validation", "test")
COLOURS, STYLES = ("blue", "ruby", "green", "amber", "violet"), ("-", "--", ":", "-.")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How a run stands to the best one of those it can be held against."""

    to: str  # that one, with the highest test accuracy
    points: float  # test accuracy less than its, from 0 to 1
    p: float | None  # chance that equally good models differ so much; None: not the same images
    images: int  # of the same test images
    more_than_chance: bool | None
    words: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    record: Record
    number: int  # by which curves name it
    parameters: int
    difference: Difference | None  # None for the best run, and where nothing can be said
    note: str  # what there is to say instead

    @property
    def words(self) -> str:
        return self.difference.words if self.difference else self.note

    @property
    def facts(self) -> dict[str, Any]:
        """As `--json` prints it."""
        record, numbers = self.record, self.record.metrics or {}
        against = None
        if self.difference:
            against = {k: v for k, v in vars(self.difference).items() if k != "words"}
        return {
            "run": str(record.folder),
            "data": record.name,
            "model": record.recipe.model,
            "parameters": self.parameters,
            **{key: numbers.get(key) for key in ("epochs", "steps", "seconds", "val", "test")},
            "against": against,
            "words": self.words,
        }


def compare(folders: Sequence[str | Path]) -> list[Entry]:
    """The runs in the order they were given, each held against the best with its test images."""
    if len(folders) < 2:
        raise UserError(f"{len(folders)} run was given; give at least two to compare")
    paths = [Path(folder).resolve() for folder in folders]
    if twice := [str(f) for f, p in zip(folders, paths, strict=True) if paths.count(p) > 1]:
        raise UserError(f"{twice[0]} is given twice; give different runs")
    records = [read_run(folder) for folder in folders]
    judged = [record for record in records if record.metrics and record.metrics["test"]]
    entries = []
    for number, record in enumerate(records, 1):
        difference, note = None, ""
        if record.metrics is None:
            note = "is not finished; `vitrail resume` goes on with it"
        elif not record.metrics["test"]:
            note = "has no test images, so nothing can be said"
        else:
            rivals = held_against(record, judged)
            best = max(rivals, key=test_accuracy)
            others = [test_images(other) for other in judged if other is not record]
            if record is not best:
                difference = differ(record, best, len(rivals) - 1)
            elif others and not {None, test_images(record)} & set(others):
                note = "is the only one with its test images"
            elif len(rivals) == len(judged):
                note = "is the best on test images"
            else:
                note = f"is the best of the {len(rivals)} runs with its test images"
        entries.append(
            Entry(
                record=record,
                number=number,
                parameters=parameters(record.recipe.vit),
                difference=difference,
                note=note,
            )
        )
    return entries


def test_accuracy(record: Record) -> float:
    return float(record.metrics["test"]["accuracy"]) if record.metrics else 0.0


def held_against(record: Record, judged: list[Record]) -> list[Record]:
    """The runs that answered the same test images, itself among them; without others, all runs."""
    mine = test_images(record)
    same = [other for other in judged if mine is not None and test_images(other) == mine]
    return same if len(same) > 1 else judged


def test_images(record: Record) -> str | None:
    """A checksum of them, where it is known."""
    return record.predictions.facts["same"].get("test") if record.predictions else None


def differ(record: Record, best: Record, comparisons: int) -> Difference:
    """McNemar's test on the same images; with several comparisons each must be surer."""
    points = test_accuracy(best) - test_accuracy(record)
    behind = f"{100 * points:.1f} points behind {best.folder}" if points else f"as {best.folder}"
    ours, theirs = record.predictions, best.predictions
    p, images, chance = None, 0, None
    if ours is None or theirs is None:
        lacking = record if ours is None else best
        said = f"{lacking.folder} kept no predictions; `vitrail report {lacking.folder}` makes them"
    elif test_images(record) != test_images(best):
        behind = f"cannot be compared with {best.folder}"
        said = "they saw other test images"
    else:
        seen, also = ours.splits["test"], theirs.splits["test"]
        p = metrics.mcnemar(seen.predicted, also.predicted, seen.labels)
        images, chance = len(seen), p < CHANCE / comparisons
        verdict = "more than chance" if chance else "could be chance"
        said = f"{verdict}: {p_value(p)}, on the same {images:,} test images"
        if comparisons > 1:
            bar = f"{CHANCE / comparisons:.2g}"
            said += f" (as one of {comparisons} comparisons it counts below {bar})"
    return Difference(
        to=str(best.folder),
        points=points,
        p=p,
        images=images,
        more_than_chance=chance,
        words=f"{behind}; {said}",
    )


def p_value(p: float) -> str:
    return f"p = {p:.2g}" if p >= 1e-4 else "p < 0.0001"


def page(entries: Sequence[Entry]) -> str:
    """The table and the curves of all runs as one HTML page that needs no network."""
    from vitrail.display import figures

    charts = [
        (words, figures.svg(figures.curves(chart(entries, key, what, key == "val_accuracy"))))
        for key, what, words in (
            ("val_accuracy", "right answers", "Right answers on validation images."),
            ("val_loss", "loss", "Loss on validation images."),
        )
    ]
    template = templates(Path(__file__).parent).get_template("compare.html")
    return template.render(
        version=__version__, entries=entries, charts=charts, columns=COLUMNS, row=row
    )


def chart(entries: Sequence[Entry], key: str, what: str, percent: bool) -> Any:
    """One curve for each run, over its time; named by the run's number."""
    from vitrail.display.figures import Chart, Curve

    longest = max((line["seconds"] for e in entries for line in e.record.epochs), default=0)
    unit, name = (60, "minutes") if longest > 180 else (1, "seconds")
    found = []
    for place, entry in enumerate(entries):
        lines = [line for line in entry.record.epochs if line.get(key) is not None]
        found.append(
            Curve(
                label=str(entry.number),
                x=[line["seconds"] / unit for line in lines],
                y=[line[key] for line in lines],
                colour=COLOURS[place % len(COLOURS)],
                style=STYLES[place // len(COLOURS) % len(STYLES)],
                dots=True,
            )
        )
    return Chart(curves=found, x=name, y=what, percent=percent)


def row(entry: Entry) -> list[str]:
    """What stands in a table: numbers as words, a dash where there is none."""
    numbers = entry.record.metrics
    steps, seconds, scores = "-", "-", ["-", "-"]
    if numbers:
        steps, seconds = f"{numbers['steps']:,}", f"{numbers['seconds']:,.0f}"
        scores = [score(numbers[split]) for split in ("val", "test")]
    return [
        str(entry.number),
        str(entry.record.folder),
        entry.record.name,
        entry.record.recipe.model,
        f"{entry.parameters:,}",
        steps,
        seconds,
        *scores,
    ]


def score(found: dict[str, Any] | None) -> str:
    if not found:
        return "-"
    low, high = found["interval"]
    return f"{100 * found['accuracy']:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
