"""The report of a pretraining: rebuilt images, patch colours, neighbours, and probes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail import __version__
from vitrail.data.loader import Loader
from vitrail.data.source import Source, is_labelled, label_names, split_indices
from vitrail.display import figures
from vitrail.display.figures import Chart, Curve
from vitrail.display.page import data_uri, encode_image, load_templates, make_thumbnail
from vitrail.display.sheet import denormalise
from vitrail.display.text import (
    format_accuracy,
    format_count,
    format_duration,
    format_interval,
    format_parameters,
    format_percent,
)
from vitrail.evaluation.loop import eval_mode
from vitrail.insight.learned import feature_pca
from vitrail.model.cost import count_parameters
from vitrail.model.vit import ViT
from vitrail.pretraining.objective import PatchFeatures
from vitrail.run.quality import (
    RANKED_IMAGES,
    SEARCHED,
    describe_collapse,
    describe_few_images,
)
from vitrail.run.rebuilt import HIDDEN, IMAGES, REBUILT, TRUE, join_strip, list_strips
from vitrail.run.recipe import Recipe, recipe_to_toml
from vitrail.run.report.page import ReportFigure, describe_progress
from vitrail.run.storage.record import REPORT, Line, Record

QUERIES, NEAREST = 8, 5  # images whose neighbours are shown, and how many of them
STRIP_HEIGHT = 96  # pixels, at least, of an image in a strip
CURVES = {"loss": ("train_loss", "val_loss"), "rank": ("val_rank",), "knn": ("val_knn",)}
NAMES = {"train_loss": "training", "val_loss": "validation", "val_rank": "rank", "val_knn": "k-NN"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """Validation images as the model receives them, with what it makes of them."""

    images: Tensor  # (B, C, H, W), normalised
    pixels: NDArray[np.uint8]  # the same for people, (B, H, W, 3)
    features: Tensor  # (B, D)
    items: NDArray[np.int64]


def draw_pretraining(
    record: Record, backbone: ViT | None, loader: Loader | None
) -> tuple[dict[str, ReportFigure], Samples | None]:
    """Curves, strips of rebuilt images and patch colours; and the images behind them."""
    drawn = {
        name: ReportFigure(name=name, png=figures.to_png(figure), svg=figures.to_svg(figure))
        for name, keys in CURVES.items()
        if (figure := draw_curve(record, name, keys)) is not None
    }
    samples = None
    if backbone is not None and loader is not None:
        samples = collect_samples(backbone, loader)
        png = encode_image(draw_colours(backbone, samples), "PNG")
        drawn["colours"] = ReportFigure(name="colours", png=png)
    if strips := read_strips(record.folder / REBUILT):
        rows = [np.asarray(enlarge(Image.open(path))) for _, path in strips]
        sheet = Image.fromarray(np.concatenate(rows))
        drawn["rebuilt"] = ReportFigure(name="rebuilt", png=encode_image(sheet, "PNG"))
    return drawn, samples


def draw_curve(record: Record, name: str, keys: tuple[str, ...]) -> Any:
    """One chart over the steps; None if the log has no such numbers."""
    curves = []
    if name == "loss" and record.steps:
        steps, losses = ([line[key] for line in record.steps] for key in ("step", "loss"))
        curves.append(Curve(label="", x=steps, y=losses, faint=True))
    if name == "rank" and (random_rank := find_random_rank(record)) is not None:
        last = max((line["step"] for line in record.epochs), default=0)
        baseline = Curve(
            label="random", x=[0, last], y=[random_rank] * 2, colour="amber", style="--"
        )
        curves.append(baseline)
    for key, colour in zip(keys, ("blue", "amber"), strict=False):
        lines = [line for line in record.epochs if line.get(key) is not None]
        x, y = [line["step"] for line in lines], [line[key] for line in lines]
        if lines:
            curves.append(Curve(label=NAMES[key], x=x, y=y, colour=colour, markers=True))
    if not curves:
        return None
    label = {"loss": "loss", "rank": "effective rank", "knn": "accuracy"}[name]
    return figures.draw_curves(Chart(curves=curves, x="step", y=label, percent=name == "knn"))


def find_random_rank(record: Record) -> float | None:
    """The effective rank of random weights; None in a run of an older version."""
    if record.metrics is not None:
        return record.metrics.get("random_rank")
    lines = list_evaluations(record)
    return lines[-1]["random_rank"] if lines else None


def list_evaluations(record: Record) -> list[Line]:
    """The lines of the log that tell of a collapse."""
    keys = ("val_rank", "val_spread", "random_rank")
    return [line for line in record.epochs if all(line.get(key) is not None for key in keys)]


def find_collapse(record: Record, source: Source | None) -> str | None:
    """The warning of a collapse; of an unfinished run, at its last evaluation."""
    if record.metrics is not None:
        return record.metrics.get("collapsed")
    assert record.recipe.pretrain is not None
    lines, method = list_evaluations(record), record.recipe.pretrain.method
    if not lines:
        return None
    images = RANKED_IMAGES if source is None else len(split_indices(source, "val"))
    return describe_collapse(lines[-1], method, images, lines[-1]["random_rank"])


@torch.no_grad()
def collect_samples(backbone: ViT, loader: Loader) -> Samples:
    """Evenly spaced validation images, and their features."""
    single, extractor = loader.as_single_process(), PatchFeatures(backbone)
    batches = list(single.evaluation("val", limit=SEARCHED))
    with eval_mode(backbone):
        features = torch.cat([extractor(batch.images).float().cpu() for batch in batches])
    images = torch.cat([batch.images.cpu() for batch in batches])
    stretch = loader.preprocess.pixels != "uint8"
    pixels = denormalise(images, loader.preprocess.mean, loader.preprocess.std, stretch)
    items = np.concatenate([batch.items for batch in batches])
    return Samples(images=images, pixels=pixels, features=features, items=items)


def choose_samples(samples: Samples, count: int) -> list[int]:
    """Evenly spaced rows."""
    rows = np.linspace(0, len(samples.items) - 1, min(count, len(samples.items)))
    return sorted(set(rows.round().astype(int).tolist()))


def draw_colours(backbone: ViT, samples: Samples) -> Image.Image:
    """A strip of images above the colours of their patches."""
    rows = choose_samples(samples, IMAGES)
    device = next(backbone.parameters()).device
    colours = feature_pca(backbone, samples.images[rows].to(device), positions=False)
    patches = (255 * colours.cpu().numpy()).round().astype(np.uint8)  # (B, rows, columns, 3)
    patch = backbone.config.patch
    patches = patches.repeat(patch, axis=1).repeat(patch, axis=2)
    strips = [enlarge(join_strip(strip)) for strip in (samples.pixels[rows], patches)]
    return Image.fromarray(np.concatenate([np.asarray(strip) for strip in strips]))


def enlarge(strip: Image.Image) -> Image.Image:
    """A strip of small images enlarged without smoothing."""
    scale = -(-STRIP_HEIGHT // strip.height)
    size = strip.width * scale, strip.height * scale
    return strip.resize(size, Image.Resampling.NEAREST)


def read_strips(folder: Path) -> list[tuple[str, Path]]:
    """The strips of a run with their names: masked, each step, original. Empty without any."""
    if not (folder / TRUE).is_file():
        return []
    steps = [(f"step {number:,}", path) for number, path in list_strips(folder)]
    return [("masked", folder / HIDDEN), *steps, ("original", folder / TRUE)]


def find_neighbours(source: Source, samples: Samples) -> list[list[dict[str, Any]]]:
    """Rows of cards: an image, then those with the most similar features."""
    x = torch.nn.functional.normalize(samples.features, dim=1)
    rows = []
    for query in choose_samples(samples, QUERIES):
        order = (x @ x[query]).argsort(descending=True).tolist()
        nearest = [row for row in order if row != query][:NEAREST]
        rows.append([describe_sample(source, samples, row) for row in [query, *nearest]])
    return rows


def describe_sample(source: Source, samples: Samples, row: int) -> dict[str, Any]:
    item = int(samples.items[row])
    label = label_names(source, item) if is_labelled(source) else ""
    return {**make_thumbnail(samples.pixels[row]), "label": label, "path": source.ids[item]}


def render_pretraining(
    record: Record,
    source: Source | None,
    missing: str,
    drawn: dict[str, ReportFigure],
    samples: Samples | None,
    command: str,
) -> str:
    """The whole page; without a `source` it has no neighbours, and `missing` says why."""
    strips = [
        (name, data_uri(encode_image(enlarge(Image.open(path)), "PNG"), "png"))
        for name, path in read_strips(record.folder / REBUILT)
    ]
    colours = drawn.get("colours")
    return (
        load_templates(Path(__file__).parent)
        .get_template("pretraining.html")
        .render(
            version=__version__,
            name=record.name,
            model=record.recipe.model,
            method=describe_method(record.recipe),
            folder=record.folder.resolve(),
            missing=missing,
            progress=describe_progress(record),
            collapsed=find_collapse(record, source),
            random_rank=find_random_rank(record),
            few_images=describe_few_images(len(split_indices(source, "val"))) if source else None,
            probe=summarise_probe(record),
            summary=summarise_pretraining(record, source),
            charts={name: figure.svg for name, figure in drawn.items() if figure.svg},
            strips=strips,
            colours=data_uri(colours.png, "png") if colours else None,
            neighbours=find_neighbours(source, samples) if source and samples else [],
            reasons=record.reasons,
            settings=recipe_to_toml(record.recipe),
            command=command,
            files=sorted({REPORT} | {p.name for p in record.folder.iterdir() if p.name[0] != "."}),
        )
    )


def describe_method(recipe: Recipe) -> str:
    assert recipe.pretrain is not None
    views = recipe.pretrain.views + recipe.pretrain.local_views
    return {
        "masked": f"reconstructing the masked {recipe.pretrain.mask:.0%} of the patches",
        "teacher": "distilling the features of a teacher",
        "views": f"mapping {views} views to equal features",
    }[recipe.pretrain.method]


def summarise_probe(record: Record) -> dict[str, Any] | None:
    """What a linear classifier and k-NN read from the features; None without labels."""
    probe = (record.metrics or {}).get("probe")
    if probe is None:
        return None
    random = probe["random"]
    low, high = probe["interval"]
    return {
        "linear": format_percent(probe["linear"]),
        "low": f"{100 * low:.1f}",
        "high": format_percent(high),
        "bar": (100 * low, 100 * high, 100 * probe["linear"]),
        "baseline": 100 * random["linear"],
        "random": format_percent(random["linear"]),
        "knn": format_accuracy(probe["knn"], probe.get("knn_interval")),
        "random_knn": format_accuracy(random["knn"], random.get("knn_interval")),
        "images": f"{probe['images']:,}",
        "fractions": [
            {**summarise_row(row), **summarise_baseline(zero["accuracy"], zero["interval"])}
            for row, zero in zip(probe["fractions"], random["fractions"], strict=True)
        ],
        "steps": format_count(probe["steps"], "step"),
        "trained": [
            {**summarise_row(row), **summarise_baseline(row["scratch"], row["scratch_interval"])}
            for row in probe["trained"]
        ],
    }


def summarise_row(row: dict[str, Any]) -> dict[str, Any]:
    """An accuracy of the pretrained weights with a part of the labels."""
    return {
        "fraction": f"{row['fraction']:.0%}".replace("%", " %"),
        "labels": f"{row['labels']:,}",
        "pretrained": format_percent(row["accuracy"]),
        "interval": format_interval(row["interval"]),
        "share": 100 * row["accuracy"],
    }


def summarise_baseline(accuracy: float, interval: list[float]) -> dict[str, Any]:
    """What random weights reach with the same labels."""
    return {"baseline": format_percent(accuracy), "baseline_interval": format_interval(interval)}


def summarise_pretraining(record: Record, source: Source | None) -> list[tuple[str, str]]:
    """The numbers at the top of the page."""
    vit, metrics = record.recipe.vit, record.metrics
    summary = []
    if source is not None:
        counts = " / ".join(f"{len(split_indices(source, s)):,}" for s in ("train", "val"))
        summary.append(("images, train / val", counts))
    parameters = format_parameters(count_parameters(vit))
    summary.append(("model", f"{record.recipe.model}, {parameters} parameters"))
    height, width = vit.size
    summary.append(("input", f"{width} x {height}, {format_count(vit.patches, 'patch')}"))
    if metrics:
        steps, epochs = metrics["steps"], metrics["epochs"]
        length = f"{format_count(steps, 'step')}, {format_count(epochs, 'epoch')}"
        summary.append(("training", f"{length}, {format_duration(metrics['seconds'])}"))
        summary.append(("held-out loss", f"{metrics['loss']:.4f}"))
        rank = f"{metrics['rank']:.1f} of {vit.width}"
        if (random_rank := find_random_rank(record)) is not None:
            rank += f", random weights {random_rank:.1f}"
        summary.append(("effective rank", rank))
    return summary
