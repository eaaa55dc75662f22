"""Draws the second chapter's figures: `python -m book.attention_figures WEIGHTS PHOTOS RUN`."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from torch import Tensor

import vitrail
from book.faithfulness import ExplainedPhotos, choose_photos, explain_photos
from book.figures import FIGURES, save_figure
from book.gallery import first_name
from vitrail.data.image import load_image
from vitrail.data.open import open_data
from vitrail.data.preprocess import resize_and_crop
from vitrail.data.source import split_indices
from vitrail.inference.classifier import Classifier
from vitrail.inference.torch_predictor import load_input
from vitrail.insight import learned
from vitrail.insight.canvas import GREY, INK, MAGNITUDE, PANE, SIMILARITY, SOFT, Canvas
from vitrail.insight.explain import explain
from vitrail.insight.maps import attention, patch_grid
from vitrail.insight.methods import METHODS
from vitrail.insight.overlay import overlay_heatmap, tile_maps, to_rgb

WIDTH, EDGE, GAP = 9.0, 0.1, 0.05  # inches: 1800 pixels, sharp at the 900 of a README
COLOURS = 256  # palette of a PNG, which halves its size
DOG, MONKEYS = 2, 4  # numbers of two of the ten photos
QUERIES = ((6, 7), (12, 3))  # row and column of a patch on the dog, and of one on the ground
LINES = {  # colours of Okabe and Ito, distinct for every kind of colour vision
    "relevance": "#0072b2",
    "occlusion": "#d55e00",
    "gradient-rollout": "#56b4e9",
    "grad-cam": "#e69f00",
    "attention": "#009e73",
    "rollout": "#cc79a7",
}

Maps = NDArray[np.floating[Any]]


class ChapterData:
    """The photos of the chapter with their explanations, and one digit per class."""

    def __init__(self, photos: ExplainedPhotos, digits: Classifier, digit_images: Sequence[Any]):
        self.photos, self.model, self.x = photos, photos.classifier.model, photos.x
        preprocess = photos.classifier.preprocess
        self.pixels = [resize_and_crop(preprocess, load_image(path, 3)) for path in photos.paths]
        self.labels = [one.label for one in photos.classifier.predict(photos.paths)]
        self.digits, self.digit_images = digits, digit_images
        self.digit_x = torch.stack([load_input(image, digits.preprocess) for image in digit_images])


def draw_cls_attention(data: ChapterData) -> Figure:
    """The attention of [CLS] in every layer and head, on one photo."""
    maps = torch.cat(attention(data.model, data.x[DOG : DOG + 1]))  # (L, h, 1, N)
    pictures = patch_grid(data.model, maps[:, :, 0]).transpose(0, 1)  # (h, L, r, c)
    heads, layers = pictures.shape[:2]
    side = 1.55
    cell = (WIDTH - side - 0.75 - EDGE) / layers
    canvas = Canvas(WIDTH, heads * cell + 0.32)
    canvas.add_image(data.pixels[DOG], EDGE, 0.27, side, side, interpolation="lanczos")
    x = side + 0.75
    page = tile_maps(rescale(pictures.numpy()), MAGNITUDE, GAP / cell)
    canvas.add_image(page, x, 0.27, layers * cell - GAP, heads * cell - GAP)
    for layer in range(layers):
        title = f"layer {layer}" if layer == 0 else str(layer)
        canvas.add_text(x + (layer + 0.46) * cell, 0.22, title, 8, ha="center", va="bottom")
    for head in range(heads):
        canvas.add_text(
            x - 0.08, 0.27 + (head + 0.46) * cell, f"head {head}", 8, ha="right", va="center"
        )
    return canvas.figure


def rescale(maps: Maps) -> Maps:
    """Each map scaled to [0, 1], where 1 is its 97.5th percentile."""
    high = np.quantile(maps, 0.975, axis=(-2, -1), keepdims=True, method="higher")
    scaled: Maps = (maps / np.maximum(high, 1e-30)).clip(0, 1)
    return scaled


def draw_patch_attention(data: ChapterData) -> Figure:
    """The attention of two patches in some layers, mean of the heads."""
    layers, columns, patch = (0, 2, 4, 6, 8, 11), data.model.config.grid[1], data.model.config.patch
    cell = (WIDTH - 2 * EDGE) / (1 + len(layers)) - GAP
    canvas = Canvas(WIDTH, len(QUERIES) * (cell + GAP) + 0.32)
    for number, (row, column) in enumerate(QUERIES):
        y = 0.27 + number * (cell + GAP)
        axes = canvas.add_image(data.pixels[DOG], EDGE, y, cell, cell)
        style: dict[str, Any] = {"ec": "#ffd23f", "fc": "none", "lw": 1.6}
        axes.add_patch(Rectangle((column * patch - 0.5, row * patch - 0.5), patch, patch, **style))
        per_layer = attention(
            data.model, data.x[DOG : DOG + 1], layers, rows=row * columns + column
        )
        for position, maps in enumerate(per_layer, 1):
            shown = patch_grid(data.model, maps.mean(dim=1)[0, 0]).numpy()
            x = EDGE + position * (cell + GAP)
            canvas.add_image(rescale(shown), x, y, cell, cell, cmap=MAGNITUDE)
    for position, title in enumerate(["query patch", *(f"layer {layer}" for layer in layers)]):
        middle = EDGE + position * (cell + GAP) + cell / 2
        canvas.add_text(middle, 0.22, title, 8, ha="center", va="bottom")
    return canvas.figure


def draw_distance(data: ChapterData) -> Figure:
    """The mean attention distance of each head, for the photo model and the digit model."""
    canvas = Canvas(WIDTH, 2.75)
    for x, title, model, images in (
        (0.6, "ViT-Ti/16, photos of 224 pixels", data.model, data.x),
        (5.35, "digit model, images of 8 pixels", data.digits.model, data.digit_x),
    ):
        distances = learned.attention_distance(model, images).numpy()
        axes = style_axes(canvas.add_axes(x, 0.35, 3.5, 1.9), title)
        uniform = uniform_distance(model, images)
        axes.axhline(uniform, color=GREY, lw=0.9, ls=(0, (4, 3)))
        style: dict[str, Any] = {"fontsize": 8, "color": SOFT, "ha": "left", "va": "bottom"}
        axes.text(-0.4, uniform * 1.02, "uniform attention", **style)
        layers = np.arange(len(distances))
        axes.scatter(
            layers.repeat(distances.shape[1]), distances.flatten(), s=26, color="#0072b2", lw=0
        )
        axes.set(xlim=(-0.5, len(distances) - 0.5), ylim=(0, 1.4 * uniform), xticks=layers)
        axes.set_xlabel("layer", fontsize=8, color=SOFT)
        axes.set_ylabel("attention distance, pixels", fontsize=8, color=SOFT)
    return canvas.figure


def uniform_distance(model: Any, images: Tensor) -> float:
    """The attention distance of a head that attends to all patches equally."""
    rows, columns = (torch.arange(side) * model.config.patch for side in model.grid(images))
    middles = torch.cartesian_prod(rows, columns).float()
    return torch.cdist(middles, middles).mean().item()


def style_axes(axes: Axes, title: str) -> Axes:
    axes.set_title(title, fontsize=9.5, weight="bold", color=INK, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c9c6be")
    axes.grid(axis="y", color=PANE, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, length=0, labelsize=8)
    return axes


def draw_norms(data: ChapterData) -> Figure:
    """Token norms of two photos, and the ratio of the maximum to the median per layer."""
    norms = torch.stack(learned.token_norms(data.model, data.x))  # (L, B, r, c)
    layers, cell = (3, 6, 7, 11), 1.12
    canvas = Canvas(WIDTH, 2 * (cell + GAP) + 0.45)
    low, high = norms.min().log(), norms.max().log()
    for row, photo in enumerate((DOG, MONKEYS)):
        y = 0.3 + row * (cell + GAP)
        canvas.add_image(data.pixels[photo], EDGE, y, cell, cell, interpolation="lanczos")
        for position, layer in enumerate(layers, 1):
            shown = (norms[layer, photo].log() - low) / (high - low)
            x = EDGE + position * (cell + GAP)
            canvas.add_image(shown.numpy(), x, y, cell, cell, cmap=MAGNITUDE, vmin=0, vmax=1)
    for position, layer in enumerate(layers, 1):
        middle = EDGE + position * (cell + GAP) + cell / 2
        canvas.add_text(middle, 0.25, f"after layer {layer}", 8, ha="center", va="bottom")
    axes = style_axes(canvas.add_axes(6.55, 0.3, 2.3, 1.95), "maximum / median norm")
    flat = norms.flatten(2)
    ratio = (flat.amax(dim=2) / flat.median(dim=2).values).numpy()  # (L, B)
    axes.plot(ratio, color="#0072b2", lw=0.9, alpha=0.6)
    axes.set(yscale="log", xticks=range(0, len(ratio), 2), yticks=[1, 2, 5, 10, 20, 50])
    axes.set_yticks([], minor=True)
    axes.set_yticklabels(["1", "2", "5", "10", "20", "50"])
    axes.set_xlabel("layer", fontsize=8, color=SOFT)
    return canvas.figure


def draw_positions_and_filters(data: ChapterData) -> Figure:
    """The similarity of all positions, and the principal components of the patch filters."""
    similarity = learned.position_similarity(data.model).numpy()
    side = 4.3
    canvas = Canvas(WIDTH, side + 0.5)
    canvas.add_text(EDGE, 0.12, "similarity of positions", 9.5, weight="bold")
    low, high = similarity.min(), similarity.max()
    shown = (similarity - low) / (high - low)
    canvas.add_image(tile_maps(shown, SIMILARITY, 0.1), EDGE, 0.4, side, side)
    canvas.add_colorbar(EDGE + side + 0.08, 0.4, side, SIMILARITY, f"{low:.1f}", f"{high:.0f}")
    left, columns = 5.1, 4
    canvas.add_text(left, 0.12, "principal components of the filters", 9.5, weight="bold")
    components = learned.patch_filters(data.model, columns * 4).numpy()
    cell = (WIDTH - EDGE - left) / columns
    for number, one in enumerate(components):
        tile = 0.5 + one.transpose(1, 2, 0) / np.abs(one).max() / 2
        x, y = left + number % columns * cell, 0.4 + number // columns * cell
        canvas.add_image(tile, x, y, cell - GAP, cell - GAP)
    caption = "16 x 16 pixels in red, green and blue; grey is 0;\nsorted by explained variance"
    canvas.add_text(left, 0.4 + columns * cell + 0.02, caption, 8, color=SOFT)
    return canvas.figure


def draw_digits(data: ChapterData) -> Figure:
    """Ten digits with predictions, relevance, occlusion, and attention of the average patch."""
    model, x = data.digits.model, data.digit_x
    predictions = data.digits.predict(list(data.digit_images))
    rows = {
        "relevance": explain(model, x, "relevance"),
        "occlusion": explain(model, x, "occlusion"),
        "attention": explain(model, x, "attention"),
    }
    left = 0.85
    cell = (WIDTH - left - EDGE) / len(x) - GAP
    canvas = Canvas(WIDTH, (1 + len(rows)) * (cell + GAP) + 0.35)
    images = [
        to_rgb(resize_and_crop(data.digits.preprocess, np.asarray(image)))
        for image in data.digit_images
    ]
    for number, (image, prediction) in enumerate(zip(images, predictions, strict=True)):
        x_left = left + number * (cell + GAP)
        title = f"{prediction.label}, {prediction.probability:.0%}".replace("%", " %")
        canvas.add_text(x_left + cell / 2, 0.24, title, 8, ha="center", va="bottom")
        canvas.add_image(image, x_left, 0.28, cell, cell)
        for row, heatmap in enumerate(rows.values(), 1):
            y = 0.28 + row * (cell + GAP)
            canvas.add_image(overlay_heatmap(image, heatmap[number].numpy()), x_left, y, cell, cell)
    for row, title in enumerate(["prediction", *rows]):
        middle = 0.28 + row * (cell + GAP) + cell / 2
        canvas.add_text(left - 0.08, middle, title, 8, ha="right", va="center")
    return canvas.figure


def draw_methods(data: ChapterData, photos: Sequence[int] = (1, DOG, MONKEYS)) -> Figure:
    """The six methods side by side, with the score of each on each photo."""
    faithfulness = data.photos.faithfulness
    order = sorted(METHODS, key=lambda method: -faithfulness[method].score.mean().item())
    cell = (WIDTH - 2 * EDGE) / (1 + len(order)) - GAP
    height = cell + 0.26
    canvas = Canvas(WIDTH, len(photos) * height + 0.32)
    for position, title in enumerate(["prediction", *order]):
        middle = EDGE + position * (cell + GAP) + cell / 2
        canvas.add_text(middle, 0.22, title, 8.5, ha="center", va="bottom", weight="bold")
    for row, photo in enumerate(photos):
        y = 0.27 + row * height
        canvas.add_image(data.pixels[photo], EDGE, y, cell, cell, interpolation="lanczos")
        label = first_name(data.labels[photo])
        canvas.add_text(EDGE + cell / 2, y + cell + 0.04, label, 8, ha="center", color=SOFT)
        for position, method in enumerate(order, 1):
            heatmap = data.photos.heatmaps[method][photo].numpy()
            x = EDGE + position * (cell + GAP)
            canvas.add_image(overlay_heatmap(data.pixels[photo], heatmap), x, y, cell, cell)
            score = f"{faithfulness[method].score[photo]:.2f}"
            canvas.add_text(x + cell / 2, y + cell + 0.04, score, 8, ha="center", color=SOFT)
    return canvas.figure


def draw_faithfulness(data: ChapterData) -> Figure:
    """Deletion and insertion curves, mean of all photos."""
    faithfulness = data.photos.faithfulness
    canvas = Canvas(WIDTH, 2.75)
    for x, title, curve, done in (
        (0.6, "deletion, most relevant patches first", "deletion", "deleted"),
        (5.1, "insertion, most relevant patches first", "insertion", "inserted"),
    ):
        axes = style_axes(canvas.add_axes(x, 0.35, 3.75, 1.9), title)
        for method, color in LINES.items():
            mean = getattr(faithfulness[method], curve).mean(dim=0)
            axes.plot(faithfulness[method].fractions * 100, mean, color=color, lw=1.6, label=method)
        random = faithfulness["relevance"].random.mean(dim=0)
        random = random if curve == "deletion" else random.flip(0)
        percent = faithfulness["relevance"].fractions * 100
        axes.plot(percent, random, color=GREY, lw=1.1, ls=(0, (4, 3)), label="random order")
        axes.set(xlim=(0, 100), ylim=(0, None))
        axes.set_xlabel(f"% of the patches {done}", fontsize=8, color=SOFT)
        axes.set_ylabel("probability of the class", fontsize=8, color=SOFT)
        if curve == "deletion":
            axes.legend(frameon=False, fontsize=7.5, loc="upper right")
    return canvas.figure


@torch.no_grad()
def draw_figures(data: ChapterData, folder: Path) -> list[Path]:
    """Writes all figures, those with many photos as JPEG."""
    figures: Mapping[str, Figure] = {
        "cls-attention.png": draw_cls_attention(data),
        "patch-attention.png": draw_patch_attention(data),
        "distance.png": draw_distance(data),
        "norms.png": draw_norms(data),
        "positions-and-filters.png": draw_positions_and_filters(data),
        "digits.png": draw_digits(data),
        "methods.jpg": draw_methods(data),
        "faithfulness.png": draw_faithfulness(data),
    }
    return [
        # the filters need more colours than a palette has
        save_figure(figure, folder / file, None if "filters" in file else COLOURS)
        for file, figure in figures.items()
    ]


def first_test_digits(count: int = 10) -> list[Any]:
    """The first test image of each class."""
    source = open_data("digits")
    first: dict[Any, Any] = {}
    for item in split_indices(source, "test"):
        first.setdefault(source[item].label, source[item].content)
    return [first[label] for label in sorted(first)][:count]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", help="the published Ti/16 of the chapter")
    parser.add_argument("photos", type=Path, help="folder of photos, of which every 30th is used")
    parser.add_argument("run", help="run folder of the digit model")
    parser.add_argument("--out", type=Path, default=FIGURES, help="output folder")
    options = parser.parse_args(arguments)
    photos = explain_photos(options.weights, choose_photos(options.photos))
    data = ChapterData(photos, vitrail.load(options.run), first_test_digits())
    for path in draw_figures(data, options.out):
        print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
