"""Renders a run's `report.html`: the values that its template shows."""

import io
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

from vitrail import __version__
from vitrail.data.config import Augment
from vitrail.data.source import SPLITS, Source, Split, split_indices
from vitrail.display.page import data_uri, encode_image, load_templates, script_hash
from vitrail.display.text import (
    format_count,
    format_duration,
    format_parameters,
    format_percent,
)
from vitrail.evaluation import metrics
from vitrail.evaluation.calibration import TrustQuality
from vitrail.model.cost import count_parameters
from vitrail.run.recipe import recipe_to_toml
from vitrail.run.report.gallery import (
    IMAGES_PER_CELL,
    MAX_TABLE_CLASSES,
    Card,
    Cell,
    ThumbnailAlbum,
    confusion_cells,
    round_robin,
)
from vitrail.run.report.multi_label import MultiLabelResults
from vitrail.run.storage.predictions import Predictions, SplitPredictions
from vitrail.run.storage.record import RECIPE, REPORT, Record, read_trust

MAX_ERRORS = 24  # shown as images
MAX_SET_ROWS = 20  # classes whose coverage is listed, lowest first
THUMBNAIL_BUDGET = 3_600_000  # characters of data URIs and paths
MODEL_FIGURES = ("positions", "filters", "attention_distance")
# A contact sheet of more bytes is embedded as a JPEG of this width in pixels.
MAX_SHEET_BYTES, SHEET_WIDTH = 400_000, 1400
SPLIT_NAMES: dict[Split, str] = {"train": "training", "val": "validation", "test": "test"}


@dataclass(frozen=True, kw_only=True)
class ReportFigure:
    """A figure as a PNG file, and as an SVG if the page shows it."""

    name: str
    png: bytes
    svg: str = ""


def render_report(
    record: Record,
    predictions: Predictions | None,
    source: Source | None,
    missing: str,
    figures: dict[str, ReportFigure],
    explanations: list[dict[str, Any]],
    multi: MultiLabelResults | None = None,
) -> str:
    """The whole page; without a `source` it has no images, and `missing` says why."""
    here = Path(__file__).parent
    script = (here / "page.js").read_text(encoding="utf-8")
    album = ThumbnailAlbum(source, THUMBNAIL_BUDGET)
    train, augment = record.recipe.train, record.recipe.data.augment
    results: dict[str, Any] = {"matrices": [], "errors": [], "scores": []}
    if predictions:
        results["errors"] = error_cards(predictions, album)
        results["matrices"] = confusion_sections(predictions, album, figures)
        results["scores"] = class_scores(predictions)
        results["calibration"] = summarise_calibration(predictions)
    return (
        load_templates(here)
        .get_template("page.html")
        .render(
            **{"calibration": None, "trust": summarise_trust(read_trust(record)), **results},
            version=__version__,
            script=script,
            script_hash=script_hash(script),
            name=record.name,
            model=record.recipe.model,
            folder=record.folder.resolve(),
            missing=missing,
            headline=None if multi else summarise_accuracy(record, predictions),
            progress=describe_progress(record),
            summary=summarise_run(record, predictions, source),
            charts={name: figure.svg for name, figure in figures.items()},
            regularised=bool(train.smoothing or augment.mixup or augment.cutmix),
            evaluated=SPLIT_NAMES[evaluated_split(predictions)] if predictions else "",
            explanations=multi.explanations if multi else explanations,
            multi=multi.template_values() if multi else None,
            model_figures=[embed_sheet(figures[k].png) for k in MODEL_FIGURES if k in figures],
            augmented=embed_sheet(figures["augmented"].png) if "augmented" in figures else None,
            reasons=record.reasons,
            settings=recipe_to_toml(record.recipe),
            environment=describe_provenance(record, predictions),
            command=reproduction_command(record, read_environment(record.predictions)),
            augments=augment != Augment(),
            files=sorted({REPORT} | {p.name for p in record.folder.iterdir() if p.name[0] != "."}),
        )
    )


def evaluated_split(predictions: Predictions) -> Split:
    """The split of the run's accuracy: test if it was evaluated, else validation."""
    return "test" if "test" in predictions.splits else "val"


def summarise_accuracy(record: Record, predictions: Predictions | None) -> dict[str, Any] | None:
    """The accuracy with its confidence interval; None if the run is not finished."""
    if record.metrics is None:
        return None
    split: Split = "test" if record.metrics["test"] else "val"
    score = record.metrics[split]
    if not score:
        return None
    low, high = score["interval"]
    summary: dict[str, Any] = {
        "accuracy": format_percent(score["accuracy"]),
        "split": SPLIT_NAMES[split],
        "low": f"{100 * low:.1f}",
        "high": format_percent(high),
        "bar": (100 * low, 100 * high, 100 * score["accuracy"]),
        "images": None,
        "expected": describe_expected(record.metrics.get("expected")),
    }
    if predictions:
        counts = predictions.confusion(split).sum(dim=1)
        summary["images"] = f"{len(predictions.splits[split]):,}"
        summary["errors"] = int((~predictions.splits[split].correct).sum())
        summary["baseline"] = 100 * float(counts.max() / counts.sum())  # always the largest class
    return summary


def describe_expected(expected: dict[str, Any] | None) -> str:
    """What accuracy the frozen features had before the first step; empty from scratch."""
    if not expected:
        return ""
    low, high = expected["interval"]
    reached = f"{format_percent(expected['accuracy'])} ({100 * low:.1f} to {format_percent(high)})"
    return f"{expected['method']} {reached} by cross-validation"


def describe_progress(record: Record) -> str:
    """The progress of a run that is not finished; empty if it is."""
    if record.metrics is not None:
        return ""
    step = record.lines[-1]["step"] if record.lines else 0
    return f"{step:,} of {record.recipe.train.steps:,} steps"


def summarise_run(
    record: Record, predictions: Predictions | None, source: Source | None
) -> list[tuple[str, str]]:
    """The numbers at the top of the page."""
    vit = record.recipe.vit
    counts = None
    if predictions:
        counts = predictions.metadata["images"]
    elif source is not None:
        counts = {split: len(split_indices(source, split)) for split in SPLITS}
    summary = [("classes", f"{vit.classes:,}")]
    if counts:
        numbers = " / ".join(f"{counts[split]:,}" for split in SPLITS)
        summary = [(f"{format_count(vit.classes, 'class')}, train / val / test", numbers)]
    parameters = format_parameters(count_parameters(vit))
    summary.append(("model", f"{record.recipe.model}, {parameters} parameters"))
    height, width = vit.size
    summary.append(("input", f"{width} x {height}, {format_count(vit.patches, 'patch')}"))
    if record.metrics:
        steps, epochs = record.metrics["steps"], record.metrics["epochs"]
        length = f"{format_count(steps, 'step')}, {format_count(epochs, 'epoch')}"
        summary.append(("training", length))
        summary.append(("time", format_duration(record.metrics["seconds"])))
    elif rates := [line["images_per_s"] for line in record.steps[1:]]:
        summary.append(("images per second", f"{median(rates):,.0f}"))
    return summary


def error_cards(predictions: Predictions, album: ThumbnailAlbum) -> list[Card]:
    """The most confident errors on the evaluated split."""
    outputs = predictions.splits[evaluated_split(predictions)]
    errors = metrics.most_confident_errors(
        outputs.calibrated, outputs.predicted, outputs.labels, MAX_ERRORS
    )
    album.add([int(outputs.items[error.index]) for error in errors])
    return [prediction_card(outputs, error.index, predictions, album) for error in errors]


def prediction_card(
    outputs: SplitPredictions, index: int, predictions: Predictions, album: ThumbnailAlbum
) -> Card:
    """One image with its label, its predicted class and the confidence."""
    item = int(outputs.items[index])
    empty = {"path": "", "image": None, "tiny": False}
    return {
        **album.cards.get(item, empty),
        "label": predictions.classes[int(outputs.labels[index])],
        "predicted": predictions.classes[int(outputs.predicted[index])],
        "correct": bool(outputs.correct[index]),
        "confidence": f"{100 * float(outputs.calibrated[index]):.0f} %",
    }


def confusion_sections(
    predictions: Predictions, album: ThumbnailAlbum, figures: dict[str, ReportFigure]
) -> list[dict[str, Any]]:
    """The confusion matrices of validation and training images, with the images behind them."""
    splits = [split for split in ("val", "train") if split in predictions.splits]
    classes = len(predictions.classes)
    cells = {split: confusion_cells(predictions.splits[split], classes) for split in splits}
    groups = [
        [int(predictions.splits[split].items[index]) for index in cell.indices[:IMAGES_PER_CELL]]
        for split in splits
        for cell in cells[split]
    ]
    album.add(round_robin(groups, IMAGES_PER_CELL))
    return [confusion_section(split, cells[split], predictions, album, figures) for split in splits]


def confusion_section(
    split: Split,
    cells: list[Cell],
    predictions: Predictions,
    album: ThumbnailAlbum,
    figures: dict[str, ReportFigure],
) -> dict[str, Any]:
    """One matrix: a table for few classes, else a plot and a list of confused pairs."""
    outputs, images = predictions.splits[split], predictions.metadata["images"][split]
    panels = [cell_panel(split, cell, predictions, album) for cell in cells]
    panels = [panel for panel in panels if panel["cards"]]
    anchors = {panel["anchor"] for panel in panels}
    table = len(predictions.classes) <= MAX_TABLE_CLASSES
    return {
        "split": split,
        "name": SPLIT_NAMES[split],
        "images": f"{len(outputs):,}",
        "of": f"{images:,}" if len(outputs) < images else "",
        "accuracy": format_percent(outputs.accuracy),
        "errors": int((~outputs.correct).sum()),
        "panels": panels,
        "without_images": len(cells) - len(panels),
        "rows": confusion_rows(split, predictions, anchors) if table else [],
        "pairs": [] if table else [pair_row(split, cell, predictions, album) for cell in cells],
        "plot": "" if table else figures[f"confusion_{split}"].svg,
    }


def confusion_rows(
    split: Split, predictions: Predictions, anchors: set[str]
) -> list[dict[str, Any]]:
    """The rows of the table; a cell with a larger share of its row has a stronger colour."""
    matrix = predictions.confusion(split)
    totals = matrix.sum(dim=1).clamp(min=1).tolist()
    rows = []
    for label, counts in enumerate(matrix.tolist()):
        cells = []
        for predicted, count in enumerate(counts):
            share = count / totals[label]
            strength = share if label == predicted else share**0.5
            anchor = f"{split}-{label}-{predicted}"
            cells.append(
                {
                    "count": count,
                    "strength": round(100 * strength),
                    "correct": label == predicted,
                    "predicted": predictions.classes[predicted],
                    "anchor": anchor if anchor in anchors else "",
                }
            )
        rows.append({"name": predictions.classes[label], "cells": cells})
    return rows


def cell_panel(
    split: Split, cell: Cell, predictions: Predictions, album: ThumbnailAlbum
) -> dict[str, Any]:
    """The images of one cell, as far as the thumbnail budget allows."""
    outputs = predictions.splits[split]
    indices = [k for k in cell.indices[:IMAGES_PER_CELL] if int(outputs.items[k]) in album.cards]
    return {
        "anchor": f"{split}-{cell.label}-{cell.predicted}",
        "label": predictions.classes[cell.label],
        "predicted": predictions.classes[cell.predicted],
        "correct": cell.correct,
        "count": len(cell.indices),
        "cards": [prediction_card(outputs, index, predictions, album) for index in indices],
        "more": len(cell.indices) - len(indices),
    }


def pair_row(
    split: Split, cell: Cell, predictions: Predictions, album: ThumbnailAlbum
) -> dict[str, Any]:
    """A pair of confused classes, with its share of the images of the true class."""
    total = int((predictions.splits[split].labels == cell.label).sum())
    panel = cell_panel(split, cell, predictions, album)
    return {**panel, "share": format_percent(len(cell.indices) / total), "total": total}


def class_scores(predictions: Predictions) -> list[dict[str, Any]]:
    """A row for each class with images, the lowest recall first."""
    matrix = predictions.confusion(evaluated_split(predictions))
    rows = []
    for number, score in enumerate(metrics.score_classes(matrix)):
        if not score.count:
            continue
        low, high = metrics.wilson_interval(score.recall, score.count)
        others = matrix[number].clone()
        others[number] = 0
        errors = int(others.max())
        rows.append(
            {
                "name": predictions.classes[number],
                "count": score.count,
                "recall": score.recall,
                "interval": f"{100 * low:.0f} to {100 * high:.0f} %",
                "precision": score.precision,
                "f1": score.f1,
                "errors": errors,
                "confused_with": predictions.classes[int(others.argmax())] if errors else "",
            }
        )
    return sorted(rows, key=lambda row: (row["recall"], row["f1"]))


def reliability_bins(outputs: SplitPredictions) -> tuple[list[metrics.Bin], list[metrics.Bin]]:
    """The bins of a reliability diagram, before and after temperature scaling."""
    before = metrics.bin_confidences(outputs.probability, outputs.correct)
    return before, metrics.bin_confidences(outputs.calibrated, outputs.correct)


def summarise_calibration(predictions: Predictions) -> dict[str, Any]:
    """Mean confidence and calibration error (ECE), before and after temperature scaling."""
    split = evaluated_split(predictions)
    outputs = predictions.splits[split]
    before, after = map(metrics.calibration_error, reliability_bins(outputs))
    temperature = predictions.metadata["temperature"]
    return {
        "images": f"{len(outputs):,}",
        "confidence_before": format_percent(float(outputs.probability.double().mean())),
        "confidence_after": format_percent(float(outputs.calibrated.double().mean())),
        "accuracy": format_percent(outputs.accuracy),
        "ece_before": f"{before:.3f}",
        "ece_after": f"{after:.3f}",
        "temperature": f"{temperature:.2f}" if temperature else "",
        "fitted_here": split == "val",
    }


def summarise_trust(trust: TrustQuality | None) -> dict[str, Any] | None:
    """Sets, abstention and odd images in the words of the page."""
    if trust is None:
        return None
    sets, answers = trust.sets, trust.abstention
    summary: dict[str, Any] = {"sets": None, "answers": None, "odd": None, "classes": []}
    if sets is not None:
        low, high = sets.interval
        summary["sets"] = {
            "promised": format_percent(sets.promised),
            "coverage": format_percent(sets.coverage),
            "interval": f"{format_percent(low)} to {format_percent(high)}",
            "size": f"{sets.mean_size:.2f}",
            "single": format_percent(sets.single),
        }
        worst = sorted(sets.per_class.items(), key=lambda pair: pair[1].coverage)
        summary["classes"] = [
            {"name": name, "coverage": format_percent(one.coverage), "size": f"{one.mean_size:.2f}"}
            for name, one in worst[:MAX_SET_ROWS]
        ]
    if answers is not None:
        summary["answers"] = {
            "promised": format_percent(answers.promised),
            "answered": format_percent(answers.answered),
            "error": "none" if answers.error is None else f"{answers.error:.2%}",
        }
    if trust.odd is not None:
        summary["odd"] = format_percent(trust.odd)
    return summary


def read_environment(predictions: Predictions | None) -> Mapping[str, Any]:
    """Versions and machine of the process that made the predictions."""
    found: Mapping[str, Any] = predictions.metadata.get("environment", {}) if predictions else {}
    return found


def describe_provenance(record: Record, predictions: Predictions | None) -> list[tuple[str, str]]:
    """Data, seed, versions, machine and time of the run."""
    provenance = [("data", record.recipe.source), ("seed", str(record.recipe.train.seed))]
    if record.recipe.weights:
        provenance.append(("weights", record.recipe.weights))
    environment = read_environment(predictions)
    provenance += [(name, str(value)) for name, value in environment.items() if value != "none"]
    if record.metrics:
        provenance.append(("seconds", f"{record.metrics['seconds']:,.1f}"))
    return provenance


def reproduction_command(record: Record, environment: Mapping[str, Any]) -> str:
    """The shell command that repeats the run, with the processes of its `environment`."""
    folder = record.folder.resolve()
    recipe, out = shlex.quote(str(folder / RECIPE)), shlex.quote(f"{folder}-again")
    processes = environment.get("processes", 1)
    start = f"torchrun --nproc-per-node {processes} -m vitrail" if processes > 1 else "vitrail"
    verb = "train" if record.recipe.pretrain is None else "pretrain"
    return f"{start} {verb} --recipe {recipe} --out {out}"


def embed_sheet(png: bytes) -> str:
    """A contact sheet for the page: unchanged, or a smaller JPEG if it is large."""
    if len(png) <= MAX_SHEET_BYTES:
        return data_uri(png, "png")
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.thumbnail((SHEET_WIDTH, 10 * SHEET_WIDTH), Image.Resampling.BICUBIC, reducing_gap=3.0)
    return data_uri(encode_image(image, "JPEG", quality=82), "jpeg")
