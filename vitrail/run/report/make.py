"""Writes the report of a run: one HTML page that works offline, and its figures as PNG files."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from vitrail import files
from vitrail.arguments import check_arguments
from vitrail.data.loader import Loader
from vitrail.data.preprocess import preprocess
from vitrail.data.preview import choose_per_class, load_or_none, preview_augmentation
from vitrail.data.source import Source, Split, fingerprint, split_indices
from vitrail.data.sources.catalogue import DATASETS, is_present
from vitrail.data.split import keep_labels
from vitrail.display import figures
from vitrail.display.figures import Chart, Curve, Mark
from vitrail.display.page import pick_evenly
from vitrail.display.sheet import draw_sheet
from vitrail.display.text import printable
from vitrail.errors import UserError
from vitrail.evaluation.calibration import TrustQuality
from vitrail.insight import gallery
from vitrail.model.cost import count_macs
from vitrail.model.vit import ViT
from vitrail.run import auto
from vitrail.run.build import make_loader
from vitrail.run.dataset import open_run_data
from vitrail.run.report.explanations import explain_samples
from vitrail.run.report.gallery import MAX_TABLE_CLASSES
from vitrail.run.report.multi_label import evaluate_for_report
from vitrail.run.report.page import (
    ReportFigure,
    evaluated_split,
    reliability_bins,
    render_report,
    reproduction_command,
)
from vitrail.run.report.pretraining import draw_pretraining, render_pretraining
from vitrail.run.result import Run
from vitrail.run.storage.predictions import (
    Predictions,
    SplitPredictions,
    describe_predictions,
    predict_split,
    save_predictions,
)
from vitrail.run.storage.record import FIGURES, MODEL, REPORT, Record, read_run, read_trust
from vitrail.training.device import pick_device
from vitrail.training.learner import compute_dtype
from vitrail.zoo.file import load_model
from vitrail.zoo.metadata import Metadata

MAX_TRAINING_IMAGES = 10_000  # predicted for the training confusion matrix
MIN_TRAINING_IMAGES = 500  # predicted no matter how long it takes
CPU_SECONDS = 30.0  # for these predictions on a CPU; a slow model predicts fewer images
DISTANCE_IMAGES = 32  # validation images on which attention distance is measured

TrainedModel = tuple[ViT, Metadata]  # the best model so far, and its file's metadata


@dataclass(frozen=True, kw_only=True)
class Report:
    """The files of a report.

    >>> vitrail.report("runs/digits-1").path.name
    'report.html'
    """

    path: Path
    figures: list[Path]
    has_images: bool
    missing: str  # why the page shows no images; empty if it does

    def to_dict(self) -> dict[str, Any]:
        """The document that `vitrail report --json` prints.

        >>> vitrail.report("runs/digits-1").to_dict()["pictures"]
        True
        """
        return {
            "run": str(self.path.parent),
            "report": str(self.path),
            "figures": [str(path) for path in self.figures],
            "pictures": self.has_images,
        }


@check_arguments
def report(run: str | Path | Run) -> Report:
    """Writes the report of a run again, finished or not: `report.html` and `figures/`.

    A run is a folder or what `vitrail.train` returned. If its data is missing or has changed, the
    page has no images and says why.

    >>> vitrail.report("runs/digits-1").has_images
    True
    """
    return write_report(run.folder if isinstance(run, Run) else run)


def write_report(folder: str | Path, loader: Loader | None = None) -> Report:
    """Writes `report.html` and `figures/` of a run, finished or not.

    Without the `loader` of the run, opens the data again; if it is missing or has changed, the
    page has no images and says why.
    """
    record = read_run(folder)
    files.remove_temporary(record.folder, REPORT)
    files.remove_temporary(record.folder / FIGURES, "*.png")  # of a report that was killed
    weights = record.folder / MODEL
    trained = load_model(weights) if weights.is_file() else None
    source, missing = (loader.source, "") if loader is not None else reopen_data(record, trained)
    if record.recipe.pretrain is not None:
        return write_pretraining_report(record, trained, source, missing, loader)
    is_multi = record.recipe.data.labels == "multi"
    multi = evaluate_for_report(record, trained, source, loader) if is_multi else None
    predictions = None if is_multi else complete_predictions(record, trained, source, loader)
    drawn = draw_figures(record, trained, predictions)
    if multi is not None:
        drawn["cooccurrence"] = convert_figure("cooccurrence", multi.draw_cooccurrence())
    if trained is not None and record.metrics is not None:
        drawn |= draw_model_figures(trained[0], record, source)
    if source is not None and (augmented := draw_augmented_sheet(record, source)) is not None:
        drawn["augmented"] = ReportFigure(name="augmented", png=augmented)
    paths = []
    for figure in drawn.values():
        paths.append(record.folder / FIGURES / f"{figure.name}.png")
        files.write_file(paths[-1], figure.png)
    explanations = explain_predictions(trained, record, source, predictions)
    page = render_report(record, predictions, source, missing, drawn, explanations, multi)
    path = record.folder / REPORT
    files.write_file(path, page)
    return Report(path=path, figures=paths, has_images=source is not None, missing=missing)


def write_pretraining_report(
    record: Record,
    trained: TrainedModel | None,
    source: Source | None,
    missing: str,
    loader: Loader | None,
) -> Report:
    """The same for a run that learned without labels."""
    if loader is None and source is not None:
        loader = make_loader(record.recipe, source, pick_device("auto"))
    backbone = trained[0].to(loader.device) if trained and loader else None
    drawn, samples = draw_pretraining(record, backbone, loader)
    paths = []
    for figure in drawn.values():
        paths.append(record.folder / FIGURES / f"{figure.name}.png")
        files.write_file(paths[-1], figure.png)
    command = reproduction_command(record, trained[1].environment if trained else {})
    page = render_pretraining(record, source, missing, drawn, samples, command)
    path = record.folder / REPORT
    files.write_file(path, page)
    return Report(path=path, figures=paths, has_images=source is not None, missing=missing)


def reopen_data(record: Record, trained: TrainedModel | None) -> tuple[Source | None, str]:
    """The data of a run if it is present and unchanged; else None and the reason."""
    name = record.recipe.source
    if name in DATASETS and not is_present(name):
        return None, f"the data set {name} is not on this machine"
    try:
        data, pretraining = record.recipe.data, record.recipe.pretrain is not None
        source = open_run_data(name, data.columns, data.labels, pretraining)
        if not pretraining:
            source = keep_labels(source, data.labelled)
    except UserError as error:
        return None, str(error)
    if trained is not None and trained[1].data.fingerprint != fingerprint(source):
        return None, f"{name} has changed since this run"
    return source, ""


def complete_predictions(
    record: Record, trained: TrainedModel | None, source: Source | None, loader: Loader | None
) -> Predictions | None:
    """The predictions of the final model; computes and stores those that are missing."""
    stored = record.predictions
    if record.metrics is None or source is None or trained is None:
        return stored
    if stored and "train" in stored.splits:
        return stored
    loader = loader or make_loader(record.recipe, source, pick_device("auto"))
    model, metadata = copy.deepcopy(trained[0]).to(loader.device), trained[1]
    dtype = compute_dtype(record.recipe.train.precision, loader.device)
    temperature = metadata.temperature
    by_split: dict[Split, SplitPredictions] = dict(stored.splits) if stored else {}
    splits: list[Split] = ["train", "val"]
    if record.metrics["test"]:  # else the run was not evaluated on it
        splits.append("test")
    for split in splits:
        if split not in by_split and len(split_indices(source, split)):
            limit = training_image_limit(record, loader) if split == "train" else None
            outputs = predict_split(model, loader, split, dtype, limit)
            by_split[split] = outputs.to_predictions(temperature)
    checksum = metadata.data.fingerprint or ""
    described = describe_predictions(source, checksum, by_split, temperature)
    if metadata.environment:
        described["environment"] = metadata.environment
    described |= stored.metadata if stored else {}
    completed = Predictions(splits=by_split, metadata=described)
    save_predictions(record.folder, completed)
    return completed


def training_image_limit(record: Record, loader: Loader) -> int:
    """How many training images to predict, so that a CPU needs about CPU_SECONDS."""
    if loader.device.type != "cpu":
        return MAX_TRAINING_IMAGES
    macs = count_macs(record.recipe.vit)
    affordable = CPU_SECONDS * auto.CPU_RATE * torch.get_num_threads() / macs
    return int(min(MAX_TRAINING_IMAGES, max(MIN_TRAINING_IMAGES, affordable)))


def draw_figures(
    record: Record, trained: TrainedModel | None, predictions: Predictions | None
) -> dict[str, ReportFigure]:
    """Learning curves, confusion matrices and calibration; of an unfinished run only curves."""
    drawn = {}
    if record.lines:
        drawn["loss"] = figures.draw_curves(loss_chart(record))
    if record.epochs:
        drawn["accuracy"] = figures.draw_curves(accuracy_chart(record, trained))
    if predictions is not None:
        splits: tuple[Split, ...] = ("train", "val")
        for split in splits:
            if split in predictions.splits:
                matrix = predictions.confusion(split).numpy()
                drawn[f"confusion_{split}"] = figures.draw_confusion_matrix(
                    matrix, predictions.classes
                )
        bins = reliability_bins(predictions.splits[evaluated_split(predictions)])
        drawn["calibration"] = figures.draw_reliability_diagram(*bins)
    if (trust := read_trust(record)) is not None:
        drawn["risk_coverage"] = figures.draw_curves(risk_chart(trust))
    as_table = predictions is not None and len(predictions.classes) <= MAX_TABLE_CLASSES
    return {
        name: convert_figure(name, figure, svg=not (as_table and name.startswith("confusion")))
        for name, figure in drawn.items()
    }


def convert_figure(name: str, figure: Figure, *, svg: bool = True) -> ReportFigure:
    """A figure as a PNG, and as an SVG if the page shows it that way."""
    markup = figures.to_svg(figure) if svg else ""
    return ReportFigure(name=name, png=figures.to_png(figure), svg=markup)


def draw_model_figures(
    model: ViT, record: Record, source: Source | None
) -> dict[str, ReportFigure]:
    """Positions, patch filters and, if there are validation images, attention distance."""
    drawn, settings = {}, record.recipe.preprocess
    for draw in (gallery.positions_figure, gallery.filters_figure):
        try:
            learned = draw(model)
        except UserError:  # this architecture has none
            continue
        drawn[learned.name] = convert_figure(learned.name, learned.figure, svg=False)
    if source is None:
        return drawn
    items = pick_evenly(split_indices(source, "val"), DISTANCE_IMAGES)
    images = [load_or_none(source, item, settings.channels, settings.pixels) for item in items]
    if inputs := [preprocess(settings, image) for image in images if image is not None]:
        learned = gallery.distance_figure(model, torch.stack(inputs))
        drawn[learned.name] = convert_figure(learned.name, learned.figure, svg=False)
    return drawn


def explain_predictions(
    trained: TrainedModel | None,
    record: Record,
    source: Source | None,
    predictions: Predictions | None,
) -> list[dict[str, Any]]:
    """Heatmaps of a few predictions; empty if the run or its data is incomplete."""
    if trained is None or source is None or predictions is None or record.metrics is None:
        return []
    evaluated = predictions.splits[evaluated_split(predictions)]
    settings, classes = record.recipe.preprocess, tuple(predictions.classes)
    return explain_samples(trained[0], settings, source, evaluated, classes)


def loss_chart(record: Record) -> Chart:
    """Training loss of each epoch and, faintly, of single steps; and validation loss."""
    steps = [(line["step"], line["loss"]) for line in record.steps]
    train = epoch_points(record, "train_loss")
    val = epoch_points(record, "val_loss")
    if len(train) < 2:
        curves = [Curve(label="training", x=x_values(steps), y=y_values(steps))]
    else:
        curves = [Curve(label="", x=x_values(steps), y=y_values(steps), faint=True)]
        curves.append(Curve(label="training", x=x_values(train), y=y_values(train)))
    curves.append(validation_curve(val))
    return Chart(curves=curves, x="step", y="loss")


def accuracy_chart(record: Record, trained: TrainedModel | None) -> Chart:
    """Accuracy of each epoch; a ring marks the epoch whose weights were kept."""
    train, val = epoch_points(record, "train_accuracy"), epoch_points(record, "val_accuracy")
    best = trained[1].best if trained else None
    marks = [Mark(x=best.step, y=best.val_accuracy)] if best else []
    if record.recipe.data.labels == "multi":
        curves = [validation_curve(epoch_points(record, "val_map"))]
        return Chart(curves=curves, x="step", y="mAP", percent=True, marks=marks)
    curves = [Curve(label="training", x=x_values(train), y=y_values(train)), validation_curve(val)]
    return Chart(curves=curves, x="step", y="accuracy", percent=True, marks=marks)


def risk_chart(trust: TrustQuality) -> Chart:
    """The error rate of the answers against the fraction of images that are answered."""
    risk = trust.risk
    x = [answered / risk.images for answered in risk.answered]
    y = [wrong / answered for wrong, answered in zip(risk.errors, risk.answered, strict=True)]
    marks = []
    if trust.abstention is not None and trust.abstention.error is not None:
        marks.append(Mark(x=trust.abstention.answered, y=trust.abstention.error))
    curve = Curve(label="error", x=x, y=y)
    return Chart(curves=[curve], x="fraction answered", y="error", percent=True, marks=marks)


def validation_curve(points: Sequence[tuple[float, float]]) -> Curve:
    x, y = x_values(points), y_values(points)
    return Curve(label="validation", x=x, y=y, colour="amber", markers=True)


def epoch_points(record: Record, key: str) -> list[tuple[float, float]]:
    """Step and value of every epoch that has the value."""
    lines = record.epochs
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def x_values(points: Sequence[tuple[float, float]]) -> list[float]:
    return [point[0] for point in points]


def y_values(points: Sequence[tuple[float, float]]) -> list[float]:
    return [point[1] for point in points]


def draw_augmented_sheet(record: Record, source: Source) -> bytes | None:
    """A contact sheet of training images in the first epochs; None if none can be read."""
    recipe, usable = record.recipe, np.ones(len(source), bool)
    while items := choose_per_class(source, usable):
        channels = recipe.preprocess.channels
        broken = [item for item in items if load_or_none(source, item, channels) is None]
        if not broken:
            break
        usable[broken] = False
    if not items:
        return None
    batch = preview_augmentation(
        source, items, recipe.preprocess, recipe.data, seed=recipe.train.seed
    )
    return draw_sheet(
        batch.images,
        batch.targets,
        [printable(name) for name in source.classes],
        mean=recipe.preprocess.mean,
        std=recipe.preprocess.std,
        stretch=recipe.preprocess.pixels != "uint8",
    )
