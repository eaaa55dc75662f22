"""Accuracy under common corruptions of the images: which hurt, how much, and which class most."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitrail import __version__, files
from vitrail.arguments import check_arguments
from vitrail.data.config import CorruptionScope
from vitrail.data.corruptions import COMMON, CORRUPTIONS, STRENGTHS, corrupt_image
from vitrail.data.image import load_image
from vitrail.data.preprocess import normalise, resize_and_crop
from vitrail.data.source import Source, split_indices
from vitrail.display import page
from vitrail.display.figures import Chart, Curve, draw_curves, to_svg
from vitrail.display.progress import progress_bar
from vitrail.display.text import format_percent, printable
from vitrail.errors import UserError
from vitrail.inference.predictor import BATCH, Predictor

QUICK_IMAGES, QUICK_STRENGTHS = 100, (2, 4)  # of the scope "quick"
FULL_IMAGES = 1000  # at most, of the scope "full"
EXAMPLE_SIDE, EXAMPLE_GAP = 112, 6  # pixels of the pictures on the page, and between them


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Robustness:
    """Accuracy under corruptions; `save` writes a page with curves and pictures."""

    images: int
    strengths: tuple[int, ...]
    clean: float  # accuracy on the same images without corruption
    mean: float  # mean corruption accuracy, over the 15 common corruptions and all strengths
    accuracy: dict[str, tuple[float, ...]]  # of each corruption, by strength
    worst: str  # the corruption with the lowest mean accuracy
    worst_class: str | None  # the class whose recall falls most, on average
    class_drop: dict[str, float]  # recall without corruption minus mean recall with it
    examples: dict[str, NDArray[np.uint8]] = field(default_factory=dict)  # strengths side by side

    def to_dict(self) -> dict[str, Any]:
        """The entry `corruptions` of `evaluate --json`."""
        document = asdict(self)
        del document["examples"]
        return document

    def __repr__(self) -> str:
        lines = [
            f"Robustness on {self.images:,} images: {self.clean:.1%} without corruption, "
            f"{self.mean:.1%} on average with it"
        ]
        for name, values in self.accuracy.items():
            cells = "  ".join(f"{value:6.1%}" for value in values)
            lines.append(f"  {name.replace('_', ' '):<20} {cells}")
        return "\n".join(lines)

    @check_arguments
    def save(self, path: str | Path) -> Path:
        """Writes the page: one HTML file with table, curves and pictures that works offline."""
        target = files.expand_user(path)
        files.write_file(target, render_robustness(self))
        return target


def measure_robustness(
    predictor: Predictor,
    source: Source,
    split: Literal["train", "val", "test", "all"],
    scope: CorruptionScope,
) -> Robustness:
    """Corrupts evenly spaced images of a split and evaluates each kind and strength."""
    strengths = QUICK_STRENGTHS if scope == "quick" else STRENGTHS
    pixels, labels = read_labelled_images(
        predictor, source, split, QUICK_IMAGES if scope == "quick" else FULL_IMAGES
    )
    clean = classify(predictor, pixels)
    predicted: dict[str, list[NDArray[np.int64]]] = {}
    total = len(CORRUPTIONS) * len(strengths) * len(pixels)
    with progress_bar("evaluating corruptions", total) as advance:
        for name in CORRUPTIONS:
            predicted[name] = []
            for strength in strengths:
                corrupted = [
                    corrupt_image(image, name, strength, item) for item, image in enumerate(pixels)
                ]
                predicted[name].append(classify(predictor, corrupted))
                advance(len(pixels))
    accuracy = {
        name: tuple(float((one == labels).mean()) for one in rows)
        for name, rows in predicted.items()
    }
    common = [one for name in COMMON for one in predicted[name]]
    drops = class_drops(clean, common, labels, predictor.classes)
    return Robustness(
        images=len(pixels),
        strengths=tuple(strengths),
        clean=float((clean == labels).mean()),
        mean=float(np.mean([accuracy[name] for name in COMMON])),
        accuracy=accuracy,
        worst=min(accuracy, key=lambda name: float(np.mean(accuracy[name]))),
        worst_class=max(drops, key=lambda name: drops[name]) if drops else None,
        class_drop=drops,
        examples={name: draw_examples(pixels[0], name) for name in CORRUPTIONS},
    )


def read_labelled_images(
    predictor: Predictor, source: Source, split: Literal["train", "val", "test", "all"], limit: int
) -> tuple[list[NDArray[np.uint8]], NDArray[np.int64]]:
    """Evenly spaced images of a split at the model's input size; unreadable ones are skipped."""
    images, labels = [], []
    for item in page.pick_evenly(split_indices(source, split), limit):
        try:
            pixels = load_image(source[item].content, predictor.preprocess.channels)
        except UserError:
            continue
        images.append(np.asarray(resize_and_crop(predictor.preprocess, pixels)))
        labels.append(int(source.labels[item]))
    if not images:
        raise UserError(f"{source.name} has no {split} images that can be read")
    if images[0].dtype != np.uint8:
        raise UserError("corruptions are defined for images of 8 bits per channel only")
    return images, np.array(labels)


def classify(predictor: Predictor, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.int64]:
    """The predicted class of images at the model's input size."""
    rows = []
    for start in range(0, len(images), BATCH):
        batch = np.stack(images[start : start + BATCH]).transpose(0, 3, 1, 2)
        x = normalise(predictor.preprocess, torch.from_numpy(np.ascontiguousarray(batch)))
        rows.append(predictor.logits(x.numpy()).argmax(axis=1))
    return np.concatenate(rows)


def class_drops(
    clean: NDArray[np.int64],
    corrupted: Sequence[NDArray[np.int64]],
    labels: NDArray[np.int64],
    classes: Sequence[str],
) -> dict[str, float]:
    """How far the recall of each class that has images falls, largest first."""
    drops = {}
    for index in np.unique(labels):
        inside = labels == index
        after = np.mean([(one[inside] == index).mean() for one in corrupted])
        drops[classes[index]] = float((clean[inside] == index).mean() - after)
    return dict(sorted(drops.items(), key=lambda pair: -pair[1]))


def draw_examples(pixels: NDArray[np.uint8], name: str) -> NDArray[np.uint8]:
    """One image at every strength, side by side."""
    return np.concatenate([corrupt_image(pixels, name, one, 0) for one in STRENGTHS], axis=1)


def embed_strip(pixels: NDArray[np.uint8]) -> str:
    """A row of images for the page, with gaps; small ones enlarged without smoothing."""
    images = [page.to_pil(one) for one in np.split(pixels, len(STRENGTHS), axis=1)]
    scale = EXAMPLE_SIDE / images[0].height
    method = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BICUBIC
    width = round(images[0].width * scale)
    strip = Image.new(
        "RGB", (len(images) * (width + EXAMPLE_GAP) - EXAMPLE_GAP, EXAMPLE_SIDE), "white"
    )
    for number, image in enumerate(images):
        strip.paste(
            image.resize((width, EXAMPLE_SIDE), method), (number * (width + EXAMPLE_GAP), 0)
        )
    return page.data_uri(page.encode_image(strip, "JPEG", quality=85), "jpeg")


def render_robustness(result: Robustness) -> str:
    """The page of the corruptions."""
    curves = []
    for name in result.accuracy:
        x = [0.0, *map(float, result.strengths)]
        colour = "ruby" if name == result.worst else "blue"
        label = name.replace("_", " ") if name == result.worst else ""
        y = [result.clean, *result.accuracy[name]]
        curves.append(Curve(label=label, x=x, y=y, colour=colour, faint=name != result.worst))
    means = [float(np.mean([result.accuracy[n][i] for n in COMMON])) for i in range(len(y) - 1)]
    curves.append(Curve(label="mean", x=x, y=[result.clean, *means], colour="amber"))
    chart = Chart(curves=curves, x="strength", y="accuracy", percent=True, whole=True)
    here = Path(__file__).parent
    return (
        page.load_templates(here)
        .get_template("robustness.html")
        .render(
            version=__version__,
            clean=format_percent(result.clean),
            mean=format_percent(result.mean),
            images=f"{result.images:,}",
            strengths=result.strengths,
            worst=result.worst.replace("_", " "),
            worst_class=result.worst_class,
            drop=f"{100 * next(iter(result.class_drop.values()), 0.0):.1f}",
            chart=to_svg(draw_curves(chart, (7.0, 3.8))),
            rows=[
                {
                    "name": name.replace("_", " "),
                    "cells": [format_percent(value) for value in values],
                    "mean": format_percent(float(np.mean(values))),
                    "picture": embed_strip(result.examples[name]),
                }
                for name, values in result.accuracy.items()
            ],
            classes=[
                {"name": printable(name), "drop": f"{100 * value:.1f}"}
                for name, value in list(result.class_drop.items())[:20]
            ],
        )
    )
