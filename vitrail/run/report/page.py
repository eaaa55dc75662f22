"""What stands on the page of a run: every word and number of `report.html`."""

import io
import shlex
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

from vitrail import __version__
from vitrail.data.config import Augment
from vitrail.data.source import Source, Split, indices
from vitrail.display.page import checksum, packed, templates, uri
from vitrail.evaluation import metrics
from vitrail.model.cost import parameters
from vitrail.run.live import duration
from vitrail.run.predictions import Predictions, Seen
from vitrail.run.recipe import write_toml
from vitrail.run.record import RECIPE, REPORT, Record
from vitrail.run.report.gallery import DETAILED, EACH, Album, Card, Cell, cells, in_turn

MISTAKES = 24  # shown with pictures
ROOM = 3_600_000  # characters of thumbnails
LEARNED = ("positions", "filters", "attention_distance")  # figures that show the weights
HEAVY, WIDE = 400_000, 1400  # bytes of a sheet from which on it becomes a JPEG, so many pixels wide
SPLITS: tuple[Split, ...] = ("train", "val", "test")
WORDS: dict[Split, str] = {"train": "training", "val": "validation", "test": "test"}


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure: a file of the run, and where it is drawn by lines, a part of the page."""

    name: str
    png: bytes
    svg: str = ""


def page(
    record: Record,
    answers: Predictions | None,
    source: Source | None,
    why: str,
    drawn: dict[str, Drawing],
    looked: list[dict[str, Any]],
) -> str:
    """The whole page; `why` there are no pictures, if there is no `source`."""
    here = Path(__file__).parent
    script = (here / "page.js").read_text(encoding="utf-8")
    album = Album(source, ROOM)
    train, augment = record.recipe.train, record.recipe.data.augment
    context: dict[str, Any] = {"matrices": [], "mistakes": [], "scores": [], "calibration": None}
    if answers:
        context["mistakes"] = mistakes(answers, album)
        context["matrices"] = matrices(answers, album, drawn)
        context["scores"] = class_scores(answers)
        context["calibration"] = calibration(answers)
    return (
        templates(here)
        .get_template("page.html")
        .render(
            **context,
            version=__version__,
            script=script,
            checksum=checksum(script),
            name=record.name,
            model=record.recipe.model,
            folder=record.folder.resolve(),
            why=why,
            headline=headline(record, answers),
            progress=progress(record),
            facts=facts(record, answers, source),
            charts={name: one.svg for name, one in drawn.items()},
            harder=bool(train.smoothing or augment.mixup or augment.cutmix),
            judged=WORDS[judging(answers)] if answers else "",
            looked=looked,
            learned=[shrunk(drawn[name].png) for name in LEARNED if name in drawn],
            augmented=shrunk(drawn["augmented"].png) if "augmented" in drawn else None,
            reasons=record.reasons,
            settings=write_toml(record.recipe),
            origin=origin(record, answers),
            command=command(record),
            varied=augment != Augment(),
            files=sorted({REPORT} | {p.name for p in record.folder.iterdir() if p.name[0] != "."}),
        )
    )


def judging(answers: Predictions) -> Split:
    """The split whose accuracy is the run's: test, where there is one."""
    return "test" if "test" in answers.splits else "val"


def percent(rate: float) -> str:
    """A share with one digit; with two where one would claim perfection."""
    digits = 2 if 0 < min(rate, 1 - rate) < 0.0005 else 1
    return f"{100 * rate:.{digits}f} %"


def headline(record: Record, answers: Predictions | None) -> dict[str, Any] | None:
    """The accuracy in words, with how sure it is; None while there is none."""
    if record.metrics is None:
        return None
    split: Split = "test" if record.metrics["test"] else "val"
    score = record.metrics[split]
    if not score:
        return None
    low, high = score["interval"]
    told: dict[str, Any] = {
        "rate": percent(score["accuracy"]),
        "split": WORDS[split],
        "low": f"{100 * low:.1f}",
        "high": percent(high),
        "bar": (100 * low, 100 * high, 100 * score["accuracy"]),
        "images": None,
    }
    if answers:
        seen = answers.splits[split]
        counts = answers.confusion(split).sum(dim=1)
        told["images"] = f"{len(seen):,}"
        told["wrong"] = int((~seen.right).sum())
        told["guess"] = 100 * float(counts.max() / counts.sum())
    return told


def progress(record: Record) -> str:
    """How far an unfinished run is."""
    if record.metrics is not None:
        return ""
    done = record.lines[-1]["step"] if record.lines else 0
    return f"{done:,} of {record.recipe.train.steps:,} steps"


def facts(
    record: Record, answers: Predictions | None, source: Source | None
) -> list[tuple[str, str]]:
    """The numbers at the top."""
    vit = record.recipe.vit
    counts = None
    if answers:
        counts = answers.facts["images"]
    elif source is not None:
        counts = {split: len(indices(source, split)) for split in SPLITS}
    told = []
    if counts:
        numbers = " / ".join(f"{counts[split]:,}" for split in SPLITS)
        told.append((f"{vit.classes:,} classes, train / val / test", numbers))
    else:
        told.append(("classes", f"{vit.classes:,}"))
    told.append(("model", f"{record.recipe.model}, {short(parameters(vit))} parameters"))
    height, width = vit.size
    told.append(("sees", f"{width} x {height}, {vit.patches} patches"))
    if record.metrics:
        steps, epochs = record.metrics["steps"], record.metrics["epochs"]
        passes = "1 epoch" if epochs == 1 else f"{epochs:,} epochs"
        told.append(("trained", f"{steps:,} steps, {passes}"))
        told.append(("time", duration(record.metrics["seconds"])))
    elif rates := [line["images_per_s"] for line in record.steps[1:]]:
        told.append(("images a second", f"{median(rates):,.0f}"))
    return told


def short(number: int) -> str:
    if number < 1_000_000:
        return f"{number / 1000:.0f} k"
    return f"{number / 1e6:.1f} M"


def mistakes(answers: Predictions, album: Album) -> list[Card]:
    """The surest wrong answers of the split that is judged."""
    seen = answers.splits[judging(answers)]
    found = metrics.surest_mistakes(seen.probability, seen.predicted, seen.labels, MISTAKES)
    album.add([int(seen.items[mistake.index]) for mistake in found])
    return [card(seen, mistake.index, answers, album) for mistake in found]


def card(seen: Seen, place: int, answers: Predictions, album: Album) -> Card:
    """One image: what it is, what it was called, and how surely."""
    item = int(seen.items[place])
    empty = {"path": "", "image": None, "tiny": False}
    return {
        **album.cards.get(item, empty),
        "label": answers.classes[int(seen.labels[place])],
        "predicted": answers.classes[int(seen.predicted[place])],
        "right": bool(seen.right[place]),
        "sure": f"{100 * float(seen.probability[place]):.0f} %",
    }


def matrices(answers: Predictions, album: Album, drawn: dict[str, Drawing]) -> list[dict[str, Any]]:
    """Validation and training images: what was taken for what, and the images behind it."""
    splits = [split for split in ("val", "train") if split in answers.splits]
    found = {split: cells(answers.splits[split], len(answers.classes)) for split in splits}
    groups = [
        [int(answers.splits[split].items[place]) for place in cell.places[:EACH]]
        for split in splits
        for cell in found[split]
    ]
    album.add(in_turn(groups, EACH))
    made = []
    for split in splits:
        seen, images = answers.splits[split], answers.facts["images"][split]
        panels = [panel(split, cell, answers, album) for cell in found[split]]
        panels = [one for one in panels if one["cards"]]
        small = len(answers.classes) <= DETAILED
        made.append(
            {
                "split": split,
                "words": WORDS[split],
                "images": f"{len(seen):,}",
                "of": f"{images:,}" if len(seen) < images else "",
                "rate": percent(seen.accuracy),
                "wrong": int((~seen.right).sum()),
                "panels": panels,
                "lacking": len(found[split]) - len(panels),
                "rows": rows(split, answers, {one["anchor"] for one in panels}) if small else [],
                "pairs": []
                if small
                else [pair(split, cell, answers, album) for cell in found[split]],
                "picture": "" if small else drawn[f"confusion_{split}"].svg,
            }
        )
    return made


def rows(split: Split, answers: Predictions, shown: set[str]) -> list[dict[str, Any]]:
    """A confusion matrix for a table; stronger colour where a class lost or kept more images."""
    matrix = answers.confusion(split)
    totals = matrix.sum(dim=1).clamp(min=1).tolist()
    made = []
    for label, counts in enumerate(matrix.tolist()):
        line = []
        for predicted, count in enumerate(counts):
            share = count / totals[label]
            strength = share if label == predicted else share**0.5
            anchor = f"{split}-{label}-{predicted}"
            line.append(
                {
                    "count": count,
                    "strength": round(100 * strength),
                    "right": label == predicted,
                    "predicted": answers.classes[predicted],
                    "anchor": anchor if anchor in shown else "",
                }
            )
        made.append({"name": answers.classes[label], "cells": line})
    return made


def panel(split: Split, cell: Cell, answers: Predictions, album: Album) -> dict[str, Any]:
    """The images of one cell, as far as there was room for them."""
    seen = answers.splits[split]
    places = [p for p in cell.places[:EACH] if int(seen.items[p]) in album.cards]
    return {
        "anchor": f"{split}-{cell.label}-{cell.predicted}",
        "label": answers.classes[cell.label],
        "predicted": answers.classes[cell.predicted],
        "right": cell.right,
        "count": len(cell.places),
        "cards": [card(seen, place, answers, album) for place in places],
        "more": len(cell.places) - len(places),
    }


def pair(split: Split, cell: Cell, answers: Predictions, album: Album) -> dict[str, Any]:
    total = int((answers.splits[split].labels == cell.label).sum())
    shown = panel(split, cell, answers, album)
    return {**shown, "share": percent(len(cell.places) / total), "total": total}


def class_scores(answers: Predictions) -> list[dict[str, Any]]:
    """A row for each class with images, those found least often first."""
    matrix = answers.confusion(judging(answers))
    made = []
    for number, score in enumerate(metrics.per_class(matrix)):
        if not score.count:
            continue
        low, high = metrics.interval(score.recall, score.count)
        others = matrix[number].clone()
        others[number] = 0
        missed = int(others.max())
        made.append(
            {
                "name": answers.classes[number],
                "count": score.count,
                "recall": score.recall,
                "interval": f"{100 * low:.0f} to {100 * high:.0f} %",
                "precision": score.precision,
                "f1": score.f1,
                "missed": missed,
                "mostly": answers.classes[int(others.argmax())] if missed else "",
            }
        )
    return sorted(made, key=lambda row: (row["recall"], row["f1"]))


def calibration_curves(seen: Seen) -> tuple[list[metrics.Bin], list[metrics.Bin]]:
    """As the model is, and with its temperature."""
    return metrics.binned(seen.probability, seen.right), metrics.binned(seen.calibrated, seen.right)


def calibration(answers: Predictions) -> dict[str, Any]:
    """How far its confidence can be believed, before and after temperature."""
    split = judging(answers)
    seen = answers.splits[split]
    before, after = map(metrics.calibration_error, calibration_curves(seen))
    heat = answers.facts["temperature"]
    return {
        "images": f"{len(seen):,}",
        "sure": percent(float(seen.probability.double().mean())),
        "cooled": percent(float(seen.calibrated.double().mean())),
        "right": percent(seen.accuracy),
        "before": f"{before:.3f}",
        "after": f"{after:.3f}",
        "temperature": f"{heat:.2f}" if heat else "",
        "own": split == "val",
    }


def origin(record: Record, answers: Predictions | None) -> list[tuple[str, str]]:
    """What made the run: versions, machine, time."""
    told = [("data", record.recipe.source), ("seed", str(record.recipe.train.seed))]
    if record.recipe.weights:
        told.append(("from weights", record.recipe.weights))
    made = answers.facts.get("made", {}) if answers else {}
    told += [(name, str(value)) for name, value in made.items() if value != "none"]
    if record.metrics:
        told.append(("seconds", f"{record.metrics['seconds']:,.1f}"))
    return told


def command(record: Record) -> str:
    """What repeats the run, as a shell reads it."""
    folder = record.folder.resolve()
    recipe, out = shlex.quote(str(folder / RECIPE)), shlex.quote(f"{folder}-again")
    made = record.predictions.facts.get("made", {}) if record.predictions else {}
    together = made.get("processes", 1)
    start = f"torchrun --nproc-per-node {together} -m vitrail" if together > 1 else "vitrail"
    return f"{start} train --recipe {recipe} --out {out}"


def shrunk(png: bytes) -> str:
    """A sheet as the page holds it: as it is, or smaller where it weighs much."""
    if len(png) <= HEAVY:
        return uri(png, "png")
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.thumbnail((WIDE, 10 * WIDE), Image.Resampling.BICUBIC, reducing_gap=3.0)
    return uri(packed(image, "JPEG", quality=82), "jpeg")
