"""A run as one HTML page that needs no network: what was learned, how sure that is, and why."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from vitrail import files
from vitrail.data.loader import Loader
from vitrail.data.open import open_data
from vitrail.data.preprocess import preprocess
from vitrail.data.preview import one_of_each, preview, try_load
from vitrail.data.source import Source, Split, fingerprint, indices
from vitrail.data.sources.catalogue import SETS, present
from vitrail.display import figures
from vitrail.display.figures import Chart, Curve, Mark
from vitrail.display.page import evenly
from vitrail.display.sheet import sheet
from vitrail.display.text import printable
from vitrail.errors import UserError
from vitrail.model.cost import macs
from vitrail.model.vit import ViT
from vitrail.run import auto, predictions
from vitrail.run.build import make_loader, pick_device
from vitrail.run.predictions import Predictions, Seen, ask
from vitrail.run.record import FIGURES, MODEL, REPORT, Record, read_run
from vitrail.run.report.gallery import DETAILED
from vitrail.run.report.page import Drawing, calibration_curves, judging, page
from vitrail.training.learner import computed_in
from vitrail.zoo.file import load_model

MOST = 10_000  # training images that are looked at once more for their confusion matrix
LOOKING = 30.0  # seconds that this may take on a CPU, and then of fewer images
LOOKED_AT = 32  # validation images on which the heads are watched
LEAST = 500  # images that are looked at however long it takes


Kept = tuple[ViT, dict[str, Any]]  # the best weights so far, and what their file says of them


@dataclass(frozen=True, kw_only=True)
class Made:
    path: Path
    figures: list[Path]
    pictures: bool  # whether the images could be shown
    why: str  # if not, why not


def make(folder: str | Path, loader: Loader | None = None) -> Made:
    """Writes `report.html` and `figures/` of a run, finished or not.

    Without the `loader` of the run the data is opened again; if it is gone or has changed, the
    page has no pictures and says so.
    """
    record = read_run(folder)
    weights = record.folder / MODEL
    kept = load_model(weights) if weights.is_file() else None
    source, why = (loader.source, "") if loader is not None else data_of(record, kept)
    answers = complete(record, kept, source, loader)
    drawn = drawings(record, kept, answers)
    if kept is not None and record.metrics is not None:
        drawn |= learned(kept[0], record, source)
    if source is not None and (augmented := augmentation(record, source)) is not None:
        drawn["augmented"] = Drawing(name="augmented", png=augmented)
    written = []
    for one in drawn.values():
        written.append(record.folder / FIGURES / f"{one.name}.png")
        files.write(written[-1], one.png)
    path = record.folder / REPORT
    looked = why_so(kept, record, source, answers)
    files.write(path, page(record, answers, source, why, drawn, looked))
    return Made(path=path, figures=written, pictures=source is not None, why=why)


def data_of(record: Record, kept: Kept | None) -> tuple[Source | None, str]:
    """The data of a run if it is still there and the same; else why it is not used."""
    name = record.recipe.source
    if name in SETS and not present(name):
        return None, f"the set {name} is not on this machine"
    try:
        source = open_data(name, columns=record.recipe.data.columns)
    except UserError as error:
        return None, str(error)
    if kept is not None and kept[1]["data"]["fingerprint"] != fingerprint(source):
        return None, f"{name} is not the data of this run any more"
    return source, ""


def complete(
    record: Record, kept: Kept | None, source: Source | None, loader: Loader | None
) -> Predictions | None:
    """What the final weights say of all splits; they are asked where an answer is missing."""
    known = record.predictions
    if record.metrics is None or source is None or kept is None:
        return known
    if known and "train" in known.splits:
        return known
    loader = loader or make_loader(record.recipe, source, pick_device("auto"))
    model, facts = copy.deepcopy(kept[0]).to(loader.device), kept[1]
    dtype = computed_in(record.recipe.train.precision, loader.device)
    temperature = facts["temperature"]
    seen: dict[Split, Seen] = dict(known.splits) if known else {}
    splits: list[Split] = ["train", "val"]
    if record.metrics["test"]:  # else the run was not to look at them
        splits.append("test")
    for split in splits:
        if split not in seen and len(indices(source, split)):
            most = most_training_images(record, loader) if split == "train" else None
            seen[split] = ask(model, loader, split, dtype, most).judged(temperature)
    about = predictions.about(source, facts["data"]["fingerprint"], seen, temperature)
    about |= {"made": facts["made"]} if "made" in facts else {}
    whole = Predictions(splits=seen, facts={**about, **(known.facts if known else {})})
    predictions.keep(record.folder, whole)
    return whole


def most_training_images(record: Record, loader: Loader) -> int:
    if loader.device.type != "cpu":
        return MOST
    fitting = LOOKING * auto.CPU_RATE * torch.get_num_threads() / macs(record.recipe.vit)
    return int(min(MOST, max(LEAST, fitting)))


def drawings(record: Record, kept: Kept | None, answers: Predictions | None) -> dict[str, Drawing]:
    """Every figure by its name; of an unfinished run the curves alone."""
    made = {}
    if record.lines:
        made["loss"] = figures.curves(loss_chart(record))
    if record.epochs:
        made["accuracy"] = figures.curves(accuracy_chart(record, kept))
    if answers is not None:
        splits: tuple[Split, ...] = ("train", "val")
        for split in splits:
            if split in answers.splits:
                matrix = answers.confusion(split).numpy()
                made[f"confusion_{split}"] = figures.confusion(matrix, answers.classes)
        seen = answers.splits[judging(answers)]
        made["calibration"] = figures.calibration(*calibration_curves(seen))
    tabled = len(answers.classes) <= DETAILED if answers is not None else False
    return {
        name: drawing(name, figure, page=not (tabled and name.startswith("confusion")))
        for name, figure in made.items()
    }


def drawing(name: str, figure: Figure, *, page: bool = True) -> Drawing:
    """A figure as a file, and for the `page` as lines that follow its light and dark."""
    svg = figures.svg(figure) if page else ""
    return Drawing(name=name, png=figures.png(figure), svg=svg)


def learned(model: ViT, record: Record, source: Source | None) -> dict[str, Drawing]:
    """What the weights themselves show; how far heads look is measured on validation images."""
    from vitrail.insight import gallery

    found, view = {}, record.recipe.view
    for make in (gallery.positions, gallery.filters):
        try:
            picture = make(model)
        except UserError:  # this architecture has none
            continue
        found[picture.name] = drawing(picture.name, picture.figure, page=False)
    items = [] if source is None else evenly(indices(source, "val"), LOOKED_AT)
    images = [] if source is None else [try_load(source, item, view.channels) for item in items]
    if seen := [preprocess(view, image) for image in images if image is not None]:
        picture = gallery.distance(model, torch.stack(seen))
        found[picture.name] = drawing(picture.name, picture.figure, page=False)
    return found


def why_so(
    kept: Kept | None, record: Record, source: Source | None, answers: Predictions | None
) -> list[dict[str, Any]]:
    """What spoke for a few answers; nothing while there are none, or no images to show."""
    if kept is None or source is None or answers is None or record.metrics is None:
        return []
    from vitrail.run.report.why import reasons

    seen, classes = answers.splits[judging(answers)], tuple(answers.classes)
    return reasons(kept[0], record.recipe.view, source, seen, classes)


def loss_chart(record: Record) -> Chart:
    """Of single steps, faint beside that of epochs where there are several; and validation."""
    steps = [(line["step"], line["loss"]) for line in record.steps]
    train = points(record, "train_loss")
    val = points(record, "val_loss")
    if len(train) < 2:
        found = [Curve(label="training", x=x(steps), y=y(steps))]
    else:
        found = [Curve(label="", x=x(steps), y=y(steps), faint=True)]
        found.append(Curve(label="training", x=x(train), y=y(train)))
    found.append(Curve(label="validation", x=x(val), y=y(val), colour="amber", dots=True))
    return Chart(curves=found, x="step", y="loss")


def accuracy_chart(record: Record, kept: Kept | None) -> Chart:
    """A ring around the epoch whose weights were kept."""
    train, val = points(record, "train_accuracy"), points(record, "val_accuracy")
    best = kept[1].get("best") if kept else None
    marks = [Mark(x=best["step"], y=best["val_accuracy"])] if best else []
    found = [Curve(label="training", x=x(train), y=y(train))]
    found.append(Curve(label="validation", x=x(val), y=y(val), colour="amber", dots=True))
    return Chart(curves=found, x="step", y="right answers", percent=True, marks=marks)


def points(record: Record, key: str) -> list[tuple[float, float]]:
    """Step and value of every epoch that has one."""
    lines = record.epochs
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def x(points: Sequence[tuple[float, float]]) -> list[float]:
    return [point[0] for point in points]


def y(points: Sequence[tuple[float, float]]) -> list[float]:
    return [point[1] for point in points]


def augmentation(record: Record, source: Source) -> bytes | None:
    """A sheet of training images as the first epochs show them; None if none can be read."""
    recipe, usable = record.recipe, np.ones(len(source), bool)
    while items := one_of_each(source, usable):
        channels = recipe.view.channels
        broken = [item for item in items if try_load(source, item, channels) is None]
        if not broken:
            break
        usable[broken] = False
    if not items:
        return None
    batch = preview(source, items, recipe.view, recipe.data, seed=recipe.train.seed)
    return sheet(
        batch.images,
        batch.targets,
        [printable(name) for name in source.classes],
        mean=recipe.view.mean,
        std=recipe.view.std,
    )
