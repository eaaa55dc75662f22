"""Several runs side by side, and whether their test accuracies differ significantly."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitrail import __version__, files
from vitrail.arguments import check_arguments
from vitrail.display.page import load_templates
from vitrail.display.text import format_accuracy, format_count, printable
from vitrail.errors import UserError
from vitrail.evaluation import metrics
from vitrail.model.cost import count_parameters
from vitrail.run.recipe import Recipe
from vitrail.run.result import Run
from vitrail.run.storage.folder import DATA
from vitrail.run.storage.record import Record, read_run

if TYPE_CHECKING:
    from vitrail.display.figures import Chart

SIGNIFICANCE = 0.05  # of a single comparison; several share it (Bonferroni)
SMALLEST_P = 1e-4  # smaller p-values are shown as "p < 0.0001"
COLUMNS = (
    "",
    "run",
    "data",
    "model",
    "parameters",
    "steps",
    "seconds",
    "validation accuracy",
    "test accuracy",
)
FEATURES = ("method", "loss", "rank", "probe")  # results of a pretraining
UNPAIRED = "two-proportion z-test, as the predictions of probes are not stored"
COLOURS, STYLES = ("blue", "ruby", "green", "amber", "violet"), ("-", "--", ":", "-.")
MAX_SECONDS = 180  # of training; curves of longer runs are drawn over minutes


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far a run is behind the best run on the same images.

    Pretrainings are compared by their linear probes, on validation images.
    """

    to: str  # folder of that run
    points: float  # by which that run's accuracy is higher, from 0 to 1
    p: float | None  # p-value of McNemar's test, or for probes of a two-proportion z-test
    images: int  # in that test; without the same images 0, and `p` is None
    more_than_chance: bool | None  # whether the difference is significant


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run of a comparison."""

    record: Record
    number: int  # that labels the run on the page and its curves
    parameters: int
    difference: Difference | None  # None for the best run, and where no comparison is possible
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """The run's entry in `vitrail compare --json`."""
        record, numbers = self.record, self.record.metrics or {}
        return {
            "run": str(record.folder),
            "data": record.name,
            "model": record.recipe.model,
            "parameters": self.parameters,
            **{key: numbers.get(key) for key in ("epochs", "steps", "seconds", "val", "test")},
            **{key: numbers[key] for key in FEATURES if "method" in numbers},
            "against": asdict(self.difference) if self.difference else None,
            "words": self.verdict,
        }

    def to_row(self) -> list[str]:
        """The run's cells in a table of COLUMNS; a dash for what an unfinished run lacks."""
        numbers = self.record.metrics
        steps, seconds, accuracies = "-", "-", ["-", "-"]
        if numbers:
            steps, seconds = f"{numbers['steps']:,}", f"{numbers['seconds']:,.0f}"
            accuracies = [describe_score(numbers.get(split)) for split in ("val", "test")]
        return [
            str(self.number),
            str(self.record.folder),
            self.record.name,
            self.record.recipe.model,
            f"{self.parameters:,}",
            steps,
            seconds,
            *accuracies,
        ]


@dataclass(frozen=True, repr=False)
class Comparison:
    """Several runs compared; `print` shows a table and what differs significantly.

    >>> comparison = vitrail.compare("runs/digits-1", "runs/digits-2")
    >>> len(comparison.runs)
    2
    """

    runs: tuple[ComparedRun, ...]  # in the order they were given

    def to_dict(self) -> dict[str, Any]:
        """The document that `vitrail compare --json` prints.

        >>> comparison = vitrail.compare("runs/digits-1", "runs/digits-2")
        >>> [run["model"] for run in comparison.to_dict()["runs"]]
        ['Pico/2', 'Pico/2']
        """
        return {"runs": [run.to_dict() for run in self.runs]}

    @check_arguments
    def write_page(self, path: str | Path) -> None:
        """Writes an HTML page with the table and the learning curves.

        >>> vitrail.compare("runs/digits-1", "runs/digits-2").write_page("compare.html")
        """
        files.write_file(path, render_comparison(self))

    def feature_rows(self) -> list[list[str]]:
        """A table of what the pretrainings reached, a column for each; empty without any.

        >>> vitrail.compare("runs/digits-1", "runs/digits-2").feature_rows()
        []
        """
        return list_features(self.runs)

    def __repr__(self) -> str:
        lines = align_columns([COLUMNS, *(run.to_row() for run in self.runs)])
        lines += align_columns(self.feature_rows())
        lines += [f"{run.number}: {printable(run.verdict)}" for run in self.runs]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        runs = make_table([COLUMNS, *(run.to_row() for run in self.runs)])
        features = make_table(self.feature_rows())
        verdicts = "".join(f"<li>{escape(printable(run.verdict))}</li>" for run in self.runs)
        return f"{runs}{features}<ol>{verdicts}</ol>"


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def make_table(rows: Sequence[Sequence[str]]) -> str:
    """A table as HTML, with its first row as the head; empty without rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(printable(name))}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(printable(cell))}</td>" for cell in row) + "</tr>"
        for row in rows[1:]
    )
    return f"<table><tr>{head}</tr>{body}</table>"


@check_arguments
def compare(*runs: str | Path | Run) -> Comparison:
    """Compares at least two runs, each with the best run on the same test images.

    A run is a folder or what `vitrail.train` returned. Whether accuracies differ significantly is
    decided by McNemar's exact test; it says nothing about other random seeds. Pretrainings are
    compared by their linear probes on the same validation images, with a two-proportion z-test.

    >>> vitrail.compare("runs/digits-1", "runs/digits-2").runs[0].number
    1
    """
    folders = [run.folder if isinstance(run, Run) else run for run in runs]
    if len(folders) < 2:
        raise UserError(f"got {format_count(len(folders), 'run')}; give at least two to compare")
    paths = [Path(folder).resolve() for folder in folders]
    if repeated := [str(f) for f, p in zip(folders, paths, strict=True) if paths.count(p) > 1]:
        raise UserError(f"{repeated[0]} is listed twice; give different runs")
    records = [read_run(folder) for folder in folders]
    evaluated = [record for record in records if record.metrics and record.metrics.get("test")]
    compared = []
    for number, record in enumerate(records, 1):
        if record.metrics is not None and "method" in record.metrics:
            difference, verdict = compare_probes(record, records)
        else:
            difference, verdict = compare_with_best(record, evaluated)
        compared.append(
            ComparedRun(
                record=record,
                number=number,
                parameters=count_parameters(record.recipe.vit),
                difference=difference,
                verdict=verdict,
            )
        )
    return Comparison(tuple(compared))


def compare_with_best(record: Record, evaluated: list[Record]) -> tuple[Difference | None, str]:
    """The difference to the best comparable run, if there is one, and a verdict in words."""
    if record.metrics is None:
        return None, "is not finished; continue it with `vitrail resume`"
    if not record.metrics["test"]:
        return None, "has no test images, so it cannot be compared"
    comparable = comparable_runs(record, evaluated)
    best = max(comparable, key=accuracy_on_test)
    if record is not best:
        return measure_difference(record, best, len(comparable) - 1)
    others = {checksum_test_images(other) for other in evaluated if other is not record}
    if others and not {None, checksum_test_images(record)} & others:
        return None, "is the only run with these test images"
    if len(comparable) == len(evaluated):
        return None, "has the highest test accuracy"
    return None, f"has the highest test accuracy of the {len(comparable)} runs with its test images"


def describe_features(numbers: dict[str, Any]) -> str:
    """What a pretraining reached, which has no accuracy of its own."""
    probe = numbers["probe"]
    rank = f"learned without labels: effective rank {numbers['rank']:.1f}"
    if probe is None:
        return f"{rank}, held-out loss {numbers['loss']:.4f}"
    return f"{rank}, linear probe {format_accuracy(probe['linear'], probe['interval'])}"


def compare_probes(record: Record, records: list[Record]) -> tuple[Difference | None, str]:
    """The difference to the best linear probe on the same validation images, and a verdict."""
    assert record.metrics is not None
    summary, checksum = describe_features(record.metrics), read_data_checksum(record)
    if record.metrics["probe"] is None:
        return None, summary
    probed = [other for other in records if other.metrics and other.metrics.get("probe")]
    same = [other for other in probed if checksum and read_data_checksum(other) == checksum]
    if len(probed) == 1:
        return None, summary
    if len(same) < 2:
        return None, f"{summary}; the only pretraining with these validation images"
    best = max(same, key=accuracy_of_probe)
    if record is best:
        return None, f"{summary}, the highest of the {len(same)} pretrainings with these images"
    difference = measure_probes(record, best, len(same) - 1)
    assert difference.p is not None
    result = describe_result(difference.more_than_chance)
    return difference, (
        f"{summary}, {100 * difference.points:.1f} percentage points below {best.folder}; "
        f"{result}: {describe_p_value(difference.p)}, on the same {difference.images:,} "
        f"validation images ({UNPAIRED})"
    )


def measure_probes(record: Record, best: Record, comparisons: int) -> Difference:
    """How two linear probes differ; several comparisons share the significance level."""
    assert record.metrics is not None
    ours, theirs = accuracy_of_probe(record), accuracy_of_probe(best)
    images = int(record.metrics["probe"]["images"])
    p = metrics.two_proportion_test(ours, theirs, images)
    return Difference(
        to=str(best.folder),
        points=theirs - ours,
        p=p,
        images=images,
        more_than_chance=p < SIGNIFICANCE / comparisons,
    )


def accuracy_of_probe(record: Record) -> float:
    return float(record.metrics["probe"]["linear"]) if record.metrics else 0.0


def read_data_checksum(record: Record) -> str | None:
    """The checksum of the images, labels and splits of a run; None if its file is missing."""
    path = record.folder / DATA
    return path.read_text(encoding="utf-8").partition("\n")[0] if path.is_file() else None


def list_features(runs: Sequence[ComparedRun]) -> list[list[str]]:
    """Rows of what the finished pretrainings reached; the first row has the numbers of the runs."""
    pairs = [(run, run.record.metrics) for run in runs]
    done = [(run, numbers) for run, numbers in pairs if numbers and "method" in numbers]
    if not done:
        return []
    rows = [["pretraining", *(str(run.number) for run, _ in done)]]
    rows.append(["method", *(str(numbers["method"]) for _, numbers in done)])
    rows.append(["held-out loss", *(f"{numbers['loss']:.4f}" for _, numbers in done)])
    rows.append(["effective rank", *(f"{numbers['rank']:.1f}" for _, numbers in done)])
    scores = [score_probe(numbers["probe"]) for _, numbers in done]
    names = dict.fromkeys(name for score in scores for name in score)
    return rows + [[name, *(score.get(name, "-") for score in scores)] for name in names]


def score_probe(probe: dict[str, Any] | None) -> dict[str, str]:
    """The accuracies that measure features, by name; empty without labels."""
    if probe is None:
        return {}
    scores = {
        "k-NN": format_accuracy(probe["knn"], probe.get("knn_interval")),
        "linear probe": format_accuracy(probe["linear"], probe["interval"]),
    }
    for kind, start in (("fractions", "linear probe"), ("trained", "fine-tuned")):
        for row in probe.get(kind, []):
            if kind == "trained" or row["fraction"] < 1:
                name = f"{start}, {100 * row['fraction']:.0f} % of the labels"
                scores[name] = format_accuracy(row["accuracy"], row["interval"])
    return scores


def accuracy_on_test(record: Record) -> float:
    return float(record.metrics["test"]["accuracy"]) if record.metrics else 0.0


def comparable_runs(record: Record, evaluated: list[Record]) -> list[Record]:
    """The runs evaluated on the same test images, with this one; all runs if no other was."""
    checksum = checksum_test_images(record)
    same = [
        other
        for other in evaluated
        if checksum is not None and checksum_test_images(other) == checksum
    ]
    return same if len(same) > 1 else evaluated


def checksum_test_images(record: Record) -> str | None:
    """A checksum of the run's test images; None if its predictions are missing."""
    if record.predictions is None:
        return None
    checksum: str | None = record.predictions.metadata["checksums"].get("test")
    return checksum


def measure_difference(record: Record, best: Record, comparisons: int) -> tuple[Difference, str]:
    """McNemar's test on the same images; several comparisons share the significance level."""
    points = accuracy_on_test(best) - accuracy_on_test(record)
    gap = f"{100 * points:.1f} percentage points below" if points else "same test accuracy as"
    summary = f"{gap} {best.folder}"
    p, images, significant = None, 0, None
    mine, theirs = record.predictions, best.predictions
    if mine is None or theirs is None:
        folder = (record if mine is None else best).folder
        detail = f"{folder} has no predictions; `vitrail report {folder}` creates them"
    elif checksum_test_images(record) != checksum_test_images(best):
        summary = f"cannot be compared with {best.folder}"
        detail = "the test images differ"
    else:
        a, b = mine.splits["test"], theirs.splits["test"]
        p = metrics.mcnemar(a.correct, b.correct, torch.ones(len(a), dtype=torch.bool))
        level = SIGNIFICANCE / comparisons
        images, significant = len(a), p < level
        result = describe_result(significant)
        detail = f"{result}: {describe_p_value(p)}, on the same {images:,} test images"
        if comparisons > 1:
            detail += f" ({comparisons} comparisons: significant below {level:.2g})"
    difference = Difference(
        to=str(best.folder), points=points, p=p, images=images, more_than_chance=significant
    )
    return difference, f"{summary}; {detail}"


def describe_result(significant: bool | None) -> str:
    return "a significant difference" if significant else "not a significant difference"


def describe_p_value(p: float) -> str:
    return f"p = {p:.2g}" if p >= SMALLEST_P else "p < 0.0001"


def describe_score(score: dict[str, Any] | None) -> str:
    return format_accuracy(score["accuracy"], score["interval"]) if score else "-"


def render_comparison(comparison: Comparison) -> str:
    """The table and the learning curves as one HTML page that works offline."""
    from vitrail.display import figures  # imports matplotlib, which is slow

    charts = [
        (caption, figures.to_svg(figures.draw_curves(chart)))
        for caption, chart in list_charts(comparison.runs)
        if chart.curves
    ]
    template = load_templates(Path(__file__).parent).get_template("compare.html")
    return template.render(
        version=__version__,
        runs=comparison.runs,
        charts=charts,
        columns=COLUMNS,
        features=comparison.feature_rows(),
        trained=any("method" not in (run.record.metrics or {}) for run in comparison.runs),
    )


def list_charts(runs: Sequence[ComparedRun]) -> Iterator[tuple[str, "Chart"]]:
    """The learning curves with their captions; losses share a chart only if they are comparable."""
    yield "Validation accuracy.", learning_curves(runs, "val_accuracy", "accuracy")
    kinds = [describe_loss(run.record.recipe) for run in runs]
    for kind in dict.fromkeys(kinds):
        caption = f"Held-out loss of pretraining, {kind}." if kind else "Validation loss."
        same = [run for run, other in zip(runs, kinds, strict=True) if other == kind]
        yield caption, learning_curves(same, "val_loss", "loss")
    yield "k-NN accuracy of pretrained features.", learning_curves(runs, "val_knn", "accuracy")
    yield "Effective rank of pretrained features.", learning_curves(runs, "val_rank", "rank")


def describe_loss(recipe: Recipe) -> str:
    """The method and what its loss depends on; equal for comparable losses, "" with labels."""
    config = recipe.pretrain
    if config is None:
        return ""
    kind = f"method {config.method}"
    if config.method == "masked":
        kind += f", mask {config.mask:g}, hog {config.hog:g}{', normalised' * config.normalise}"
    elif config.method == "views":
        kind += f", {config.views} views and {config.local_views} local ones"
    elif recipe.teacher is not None:
        kind += f" {recipe.teacher.weights}"
    return kind


def learning_curves(runs: Sequence[ComparedRun], key: str, label: str) -> "Chart":
    """A curve for each run with such values, over its training time, labelled with its number."""
    from vitrail.display.figures import Chart, Curve

    longest = max((line["seconds"] for run in runs for line in run.record.epochs), default=0)
    unit, name = (60, "minutes") if longest > MAX_SECONDS else (1, "seconds")
    curves = []
    for run in runs:
        lines = [line for line in run.record.epochs if line.get(key) is not None]
        if not lines:
            continue
        index = run.number - 1
        curves.append(
            Curve(
                label=str(run.number),
                x=[line["seconds"] / unit for line in lines],
                y=[line[key] for line in lines],
                colour=COLOURS[index % len(COLOURS)],
                style=STYLES[index // len(COLOURS) % len(STYLES)],
                markers=True,
            )
        )
    return Chart(curves=curves, x=name, y=label, percent=label == "accuracy")
