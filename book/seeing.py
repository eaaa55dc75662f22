"""Draws the second chapter's pictures: `python -m book.seeing WEIGHTS PHOTOS DIGITS`."""

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
from book.faithfulness import Trial, some, tried
from book.figures import FIGURES, save
from book.gallery import name
from vitrail.data.image import load_image
from vitrail.data.open import open_data
from vitrail.data.preprocess import resize_and_crop
from vitrail.data.source import split_indices
from vitrail.insight import learned
from vitrail.insight.canvas import GREY, INK, MAGNITUDE, PANE, SIMILARITY, SOFT, Canvas
from vitrail.insight.explain import explain
from vitrail.insight.maps import attention, patch_grid
from vitrail.insight.methods import METHODS
from vitrail.insight.overlay import overlay_heatmap, tile_maps, to_rgb
from vitrail.run.classifier import Classifier

WIDTH, EDGE, GAP = 9.0, 0.1, 0.05  # inches: 1800 pixels, sharp at the 900 of a README
COLOURS = 256  # of a PNG: half the bytes
DOG, MONKEYS = 2, 4  # of the ten photos
ASKING = ((6, 7), (12, 3))  # row and column of a patch on the dog, and of one on the ground
LINES = {  # after Okabe and Ito: apart for every kind of colour vision
    "relevance": "#0072b2",
    "occlusion": "#d55e00",
    "gradient-rollout": "#56b4e9",
    "attention": "#009e73",
    "rollout": "#cc79a7",
}

Maps = NDArray[np.floating[Any]]


class Seen:
    """What the chapter looks at: some photos with all that was found out about them, and digits."""

    def __init__(self, trial: Trial, digits: Classifier, each: Sequence[Any]):
        self.trial, self.model, self.x = trial, trial.classifier.model, trial.x
        self.pixels = [
            resize_and_crop(trial.classifier.view, load_image(path, 3)) for path in trial.paths
        ]
        self.labels = [one.label for one in trial.classifier.predict(trial.paths)]
        self.digits, self.contents = digits, each
        self.tiny = torch.stack([digits.tensor(content) for content in each])


def looking(seen: Seen) -> Figure:
    """[CLS] in every layer and head, on one photo."""
    maps = torch.cat(attention(seen.model, seen.x[DOG : DOG + 1]))  # (L, h, 1, N)
    pictures = patch_grid(seen.model, maps[:, :, 0]).transpose(0, 1)  # (h, L, r, c)
    heads, layers = pictures.shape[:2]
    side = 1.55
    cell = (WIDTH - side - 0.75 - EDGE) / layers
    canvas = Canvas(WIDTH, heads * cell + 0.32)
    canvas.add_image(seen.pixels[DOG], EDGE, 0.27, side, side, interpolation="lanczos")
    x = side + 0.75
    page = tile_maps(relative(pictures.numpy()), MAGNITUDE, GAP / cell)
    canvas.add_image(page, x, 0.27, layers * cell - GAP, heads * cell - GAP)
    for layer in range(layers):
        words = f"layer {layer}" if layer == 0 else str(layer)
        canvas.add_text(x + (layer + 0.46) * cell, 0.22, words, 8, ha="center", va="bottom")
    for head in range(heads):
        canvas.add_text(
            x - 0.08, 0.27 + (head + 0.46) * cell, f"head {head}", 8, ha="right", va="center"
        )
    return canvas.figure


def relative(maps: Maps) -> Maps:
    """Each map from 0 to 1, where 1 is what one patch in forty exceeds."""
    high = np.quantile(maps, 0.975, axis=(-2, -1), keepdims=True, method="higher")
    shares: Maps = (maps / np.maximum(high, 1e-30)).clip(0, 1)
    return shares


def asking(seen: Seen) -> Figure:
    """Where two patches look, by the mean of heads, in some layers."""
    layers, columns, patch = (0, 2, 4, 6, 8, 11), seen.model.config.grid[1], seen.model.config.patch
    cell = (WIDTH - 2 * EDGE) / (1 + len(layers)) - GAP
    canvas = Canvas(WIDTH, len(ASKING) * (cell + GAP) + 0.32)
    for number, (row, column) in enumerate(ASKING):
        y = 0.27 + number * (cell + GAP)
        axes = canvas.add_image(seen.pixels[DOG], EDGE, y, cell, cell)
        style: dict[str, Any] = {"ec": "#ffd23f", "fc": "none", "lw": 1.6}
        axes.add_patch(Rectangle((column * patch - 0.5, row * patch - 0.5), patch, patch, **style))
        asked = attention(seen.model, seen.x[DOG : DOG + 1], layers, rows=row * columns + column)
        for place, maps in enumerate(asked, 1):
            shown = patch_grid(seen.model, maps.mean(dim=1)[0, 0]).numpy()
            x = EDGE + place * (cell + GAP)
            canvas.add_image(relative(shown), x, y, cell, cell, cmap=MAGNITUDE)
    for place, words in enumerate(["who asks", *(f"layer {layer}" for layer in layers)]):
        middle = EDGE + place * (cell + GAP) + cell / 2
        canvas.add_text(middle, 0.22, words, 8, ha="center", va="bottom")
    return canvas.figure


def distance(seen: Seen) -> Figure:
    """How far each head looks, of the photos' model and of the digits'."""
    canvas = Canvas(WIDTH, 2.75)
    for x, title, model, images in (
        (0.6, "ViT-Ti/16, photos of 224 pixels", seen.model, seen.x),
        (5.35, "the digits' model, 8 pixels", seen.digits.model, seen.tiny),
    ):
        found = learned.attention_distance(model, images).numpy()
        axes = plain(canvas.add_axes(x, 0.35, 3.5, 1.9), title)
        alike = even(model, images)
        axes.axhline(alike, color=GREY, lw=0.9, ls=(0, (4, 3)))
        words: dict[str, Any] = {"fontsize": 8, "color": SOFT, "ha": "left", "va": "bottom"}
        axes.text(-0.4, alike * 1.02, "all patches alike", **words)
        layers = np.arange(len(found))
        axes.scatter(layers.repeat(found.shape[1]), found.flatten(), s=26, color="#0072b2", lw=0)
        axes.set(xlim=(-0.5, len(found) - 0.5), ylim=(0, 1.4 * alike), xticks=layers)
        axes.set_xlabel("layer", fontsize=8, color=SOFT)
        axes.set_ylabel("pixels", fontsize=8, color=SOFT)
    return canvas.figure


def even(model: Any, images: Tensor) -> float:
    """The distance of a head that looks at all patches alike."""
    rows, columns = (torch.arange(side) * model.config.patch for side in model.grid(images))
    middles = torch.cartesian_prod(rows, columns).float()
    return torch.cdist(middles, middles).mean().item()


def plain(axes: Axes, title: str) -> Axes:
    axes.set_title(title, fontsize=9.5, weight="bold", color=INK, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c9c6be")
    axes.grid(axis="y", color=PANE, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, length=0, labelsize=8)
    return axes


def norms(seen: Seen) -> Figure:
    """How long tokens are: of two photos, and the longest against the median by layer."""
    found = torch.stack(learned.token_norms(seen.model, seen.x))  # (L, B, r, c)
    layers, cell = (3, 6, 7, 11), 1.12
    canvas = Canvas(WIDTH, 2 * (cell + GAP) + 0.45)
    low, high = found.min().log(), found.max().log()
    for row, photo in enumerate((DOG, MONKEYS)):
        y = 0.3 + row * (cell + GAP)
        canvas.add_image(seen.pixels[photo], EDGE, y, cell, cell, interpolation="lanczos")
        for place, layer in enumerate(layers, 1):
            shown = (found[layer, photo].log() - low) / (high - low)
            x = EDGE + place * (cell + GAP)
            canvas.add_image(shown.numpy(), x, y, cell, cell, cmap=MAGNITUDE, vmin=0, vmax=1)
    for place, layer in enumerate(layers, 1):
        middle = EDGE + place * (cell + GAP) + cell / 2
        canvas.add_text(middle, 0.25, f"after layer {layer}", 8, ha="center", va="bottom")
    axes = plain(canvas.add_axes(6.55, 0.3, 2.3, 1.95), "longest token over the median")
    flat = found.flatten(2)
    ratio = (flat.amax(dim=2) / flat.median(dim=2).values).numpy()  # (L, B)
    axes.plot(ratio, color="#0072b2", lw=0.9, alpha=0.6)
    axes.set(yscale="log", xticks=range(0, len(ratio), 2), yticks=[1, 2, 5, 10, 20, 50])
    axes.set_yticks([], minor=True)
    axes.set_yticklabels(["1", "2", "5", "10", "20", "50"])
    axes.set_xlabel("layer", fontsize=8, color=SOFT)
    return canvas.figure


def places(seen: Seen) -> Figure:
    """Every position against all; and the main directions of the patch filters."""
    similarity = learned.position_similarity(seen.model).numpy()
    side = 4.3
    canvas = Canvas(WIDTH, side + 0.5)
    canvas.add_text(EDGE, 0.12, "positions: each against all", 9.5, weight="bold")
    low, high = similarity.min(), similarity.max()
    shown = (similarity - low) / (high - low)
    canvas.add_image(tile_maps(shown, SIMILARITY, 0.1), EDGE, 0.4, side, side)
    canvas.add_colorbar(EDGE + side + 0.08, 0.4, side, SIMILARITY, f"{low:.1f}", f"{high:.0f}")
    left, across = 5.1, 4
    canvas.add_text(left, 0.12, "filters: the main directions", 9.5, weight="bold")
    components = learned.patch_filters(seen.model, across * 4).numpy()
    cell = (WIDTH - EDGE - left) / across
    for number, one in enumerate(components):
        tile = 0.5 + one.transpose(1, 2, 0) / np.abs(one).max() / 2
        x, y = left + number % across * cell, 0.4 + number // across * cell
        canvas.add_image(tile, x, y, cell - GAP, cell - GAP)
    words = "red, green and blue of 16 x 16 pixels;\ngrey is zero, the strongest first"
    canvas.add_text(left, 0.4 + across * cell + 0.02, words, 8, color=SOFT)
    return canvas.figure


def digits(seen: Seen) -> Figure:
    """Ten digits: what the model says, relevance, occlusion, and where the average patch looks."""
    model, x = seen.digits.model, seen.tiny
    said = seen.digits.predict(list(seen.contents))
    rows = {
        "relevance": explain(model, x, "relevance"),
        "occlusion": explain(model, x, "occlusion"),
        "attention": explain(model, x, "attention"),
    }
    left = 0.85
    cell = (WIDTH - left - EDGE) / len(x) - GAP
    canvas = Canvas(WIDTH, (1 + len(rows)) * (cell + GAP) + 0.35)
    views = [
        to_rgb(resize_and_crop(seen.digits.view, np.asarray(content))) for content in seen.contents
    ]
    for number, (view, answer) in enumerate(zip(views, said, strict=True)):
        at = left + number * (cell + GAP)
        words = f"{answer.label}, {answer.probability:.0%}".replace("%", " %")
        canvas.add_text(at + cell / 2, 0.24, words, 8, ha="center", va="bottom")
        canvas.add_image(view, at, 0.28, cell, cell)
        for row, heat in enumerate(rows.values(), 1):
            y = 0.28 + row * (cell + GAP)
            canvas.add_image(overlay_heatmap(view, heat[number].numpy()), at, y, cell, cell)
    for row, words in enumerate(["it says", *rows]):
        middle = 0.28 + row * (cell + GAP) + cell / 2
        canvas.add_text(left - 0.08, middle, words, 8, ha="right", va="center")
    return canvas.figure


def methods(seen: Seen, photos: Sequence[int] = (1, DOG, MONKEYS)) -> Figure:
    """The five methods side by side, with the score of each on that photo."""
    judged = seen.trial.judged
    order = sorted(METHODS, key=lambda method: -judged[method].score.mean().item())
    cell = (WIDTH - 2 * EDGE) / (1 + len(order)) - GAP
    tall = cell + 0.26
    canvas = Canvas(WIDTH, len(photos) * tall + 0.32)
    for place, words in enumerate(["what it says", *order]):
        middle = EDGE + place * (cell + GAP) + cell / 2
        canvas.add_text(middle, 0.22, words, 8.5, ha="center", va="bottom", weight="bold")
    for row, photo in enumerate(photos):
        y = 0.27 + row * tall
        canvas.add_image(seen.pixels[photo], EDGE, y, cell, cell, interpolation="lanczos")
        words = name(seen.labels[photo])
        canvas.add_text(EDGE + cell / 2, y + cell + 0.04, words, 8, ha="center", color=SOFT)
        for place, method in enumerate(order, 1):
            heat = seen.trial.heats[method][photo].numpy()
            x = EDGE + place * (cell + GAP)
            canvas.add_image(overlay_heatmap(seen.pixels[photo], heat), x, y, cell, cell)
            words = f"{judged[method].score[photo]:.2f}"
            canvas.add_text(x + cell / 2, y + cell + 0.04, words, 8, ha="center", color=SOFT)
    return canvas.figure


def trust(seen: Seen) -> Figure:
    """Deletion and insertion, the mean of all photos."""
    judged = seen.trial.judged
    canvas = Canvas(WIDTH, 2.75)
    for x, title, curve in (
        (0.6, "deletion: the hottest go first", "deletion"),
        (5.1, "insertion: the hottest come first", "insertion"),
    ):
        axes = plain(canvas.add_axes(x, 0.35, 3.75, 1.9), title)
        for method, color in LINES.items():
            mean = getattr(judged[method], curve).mean(dim=0)
            axes.plot(judged[method].fractions * 100, mean, color=color, lw=1.6, label=method)
        chance = judged["relevance"].random.mean(dim=0)
        chance = chance if curve == "deletion" else chance.flip(0)
        shares = judged["relevance"].fractions * 100
        axes.plot(shares, chance, color=GREY, lw=1.1, ls=(0, (4, 3)), label="random order")
        axes.set(xlim=(0, 100), ylim=(0, None))
        axes.set_xlabel("% of the patches", fontsize=8, color=SOFT)
        axes.set_ylabel("probability of the class", fontsize=8, color=SOFT)
        if curve == "deletion":
            axes.legend(frameon=False, fontsize=7.5, loc="upper right")
    return canvas.figure


@torch.no_grad()
def draw(seen: Seen, folder: Path) -> list[Path]:
    """All figures; those with many photos as JPEG."""
    figures: Mapping[str, Figure] = {
        "looking.png": looking(seen),
        "asking.png": asking(seen),
        "distance.png": distance(seen),
        "norms.png": norms(seen),
        "places.png": places(seen),
        "digits.png": digits(seen),
        "methods.jpg": methods(seen),
        "trust.png": trust(seen),
    }
    return [
        save(figure, folder / file, None if file == "places.png" else COLOURS)  # filters need all
        for file, figure in figures.items()
    ]


def of_each_class(count: int = 10) -> list[Any]:
    """The first test digit of each class."""
    source = open_data("digits")
    first: dict[Any, Any] = {}
    for item in split_indices(source, "test"):
        first.setdefault(source[item].label, source[item].content)
    return [first[label] for label in sorted(first)][:count]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", help="the published Ti/16 of the chapter")
    parser.add_argument("photos", type=Path, help="folder of photos, of which each 30th is taken")
    parser.add_argument("digits", help="run of `vitrail demo`")
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder for the pictures")
    choice = parser.parse_args(arguments)
    trial = tried(choice.weights, some(choice.photos))
    seen = Seen(trial, vitrail.load(choice.digits), of_each_class())
    for path in draw(seen, choice.out):
        print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
