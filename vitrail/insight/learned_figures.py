"""Figures of what a model has learned, from the arrays that `learned` computes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitrail.display.style import default_style
from vitrail.insight.canvas import (
    BLUE,
    EDGE,
    GAP,
    GREY,
    INK,
    MAGNITUDE,
    PANE,
    RUBY,
    SIMILARITY,
    SOFT,
    WIDTH,
    Canvas,
)
from vitrail.insight.overlay import Bytes, Floats, tile_maps, to_rgb
from vitrail.model.config import PositionKind

MAX_POSITIONS = 14  # rows and columns of positions that are compared with all
SIDE = 6.2  # inches of a figure that has no fixed number of columns
POSITION_TITLES: dict[PositionKind, str] = {
    "learned": "Position embeddings (learned)",
    "sincos": "Position embeddings (fixed sine-cosine)",
    "rotary": "Position embeddings (rotary)",
}


@default_style()
def draw_positions(similarity: Floats, kind: PositionKind) -> Figure:
    """Each position compared with all (Dosovitskiy et al., 2021, figure 7).

    `similarity` has shape (rows, columns, rows, columns).
    """
    rows, columns = similarity.shape[:2]
    shown_rows, shown_columns = (evenly_spaced(side) for side in (rows, columns))
    maps = similarity[np.ix_(shown_rows, shown_columns)]
    low, high = float(maps.min()), float(maps.max())
    height = SIDE * len(shown_rows) * rows / (len(shown_columns) * columns)
    canvas = Canvas(SIDE + 2 * EDGE + 0.7, height + 1.25)
    subtitle = f"Cosine similarity of each of {columns} x {rows} positions with all positions"
    if len(shown_rows) < rows or len(shown_columns) < columns:
        subtitle += f" ({len(shown_columns)} x {len(shown_rows)} shown)"
    canvas.add_title(0.25, POSITION_TITLES[kind], subtitle)
    relative = (maps - low) / max(high - low, 1e-30)
    canvas.add_image(tile_maps(relative, SIMILARITY, 0.1), EDGE, 0.9, SIDE, height)
    x = EDGE + SIDE + 0.12
    canvas.add_colorbar(x, 0.9, height, SIMILARITY, f"{low:.2f}", f"{high:.2f}\ncosine")
    return canvas.figure


def evenly_spaced(side: int) -> list[int]:
    """Rows or columns of positions to show, both ends included."""
    indices = np.linspace(0, side - 1, min(side, MAX_POSITIONS)).round().astype(int)
    spaced: list[int] = indices.tolist()
    return spaced


@default_style()
def draw_filters(components: Floats) -> Figure:
    """Principal components of the patch embedding, (count, C, p, p)."""
    count = len(components)
    columns = min(count, 14 if count > 28 else 7)
    rows = -(-count // columns)
    shown = components[:, :3] if components.shape[1] >= 3 else components[:, :1].repeat(3, axis=1)
    largest = np.abs(shown).max(axis=(1, 2, 3), keepdims=True)
    shown = (0.5 + shown / np.maximum(largest, 1e-30) / 2).transpose(0, 2, 3, 1)
    size = min(1.2, SIDE / columns)
    canvas = Canvas(SIDE + 2 * EDGE, rows * size + 1.2)
    subtitle = "Principal components of the patch embedding, the strongest first; grey is zero"
    canvas.add_title(0.25, "Patch embedding filters", subtitle)
    for number, one in enumerate(shown):
        x, y = EDGE + number % columns * size, 0.9 + number // columns * size
        axes = canvas.add_image(one, x, y, size - GAP, size - GAP)
        axes.axis("on")
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(color=GREY, linewidth=0.5)
    return canvas.figure


@default_style()
def draw_attention_distance(distance: Floats, size: tuple[int, int]) -> Figure:
    """The mean attention distance of each head in pixels, (L, h); `size` is the image's."""
    subtitle = f"Pixels between a patch and what it attends to, images of {size[1]} x {size[0]}"
    return draw_heads_by_layer(distance, "Mean attention distance", subtitle, "pixels")


@default_style()
def draw_attention_entropy(entropy: Floats, tokens: int, dead: NDArray[np.bool_]) -> Figure:
    """The attention entropy of each head in nats, and which heads are dead: both (L, h)."""
    top = float(np.log(tokens))
    subtitle = f"{top:.2f} is uniform attention over all {tokens} tokens, 0 a single token"
    figure = draw_heads_by_layer(entropy, "Attention entropy", subtitle, "nats")
    axes = figure.axes[0]
    axes.axhline(top, color=GREY, lw=0.8, ls=(0, (4, 3)))
    axes.set_ylim(0, top * 1.06)
    if dead.any():
        layers, heads = np.nonzero(dead)
        style: dict[str, Any] = {
            "facecolors": "none",
            "edgecolors": RUBY,
            "linewidths": 1.4,
            "zorder": 4,
        }
        label = "dead: output near zero"
        axes.scatter(layers, entropy[layers, heads], s=90, label=label, **style)
        axes.legend(frameon=False, fontsize=8.5, loc="best")
    return figure


@default_style()
def draw_heads_by_layer(values: Floats, title: str, subtitle: str, unit: str) -> Figure:
    """One point for each head, and the mean of each layer."""
    layers, count = values.shape
    canvas = Canvas(7.2, 4.6)
    canvas.add_title(0.25, title, subtitle)
    axes = canvas.add_axes(0.95, 0.95, 5.95, 2.95)
    numbers = np.arange(layers)
    style: dict[str, Any] = {
        "color": BLUE,
        "alpha": 0.75,
        "s": 34,
        "linewidths": 0,
        "clip_on": False,
    }
    axes.scatter(numbers.repeat(count), values.flatten(), zorder=3, **style)
    axes.plot(numbers, values.mean(axis=1), color=INK, lw=1, alpha=0.6, label="mean over heads")
    axes.set_xlabel("layer", color=SOFT)
    axes.set_ylabel(unit, color=SOFT)
    axes.set_xticks(numbers if layers <= 16 else numbers[::2])
    axes.set_xlim(-0.5, layers - 0.5)
    axes.set_ylim(0, float(values.max()) * 1.08 or 1)
    axes.grid(axis="y", color=PANE, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c9c6be")
    axes.tick_params(colors=SOFT, length=0, labelsize=9)
    axes.legend(frameon=False, fontsize=8.5, loc="best")
    return canvas.figure


@default_style()
def draw_token_norms(
    images: Sequence[Bytes], norms: Sequence[Floats], layers: Sequence[int]
) -> Figure:
    """The norms of patch tokens, for each layer (images, rows, columns), on a logarithmic scale."""
    low, high = min(one.min() for one in norms), max(one.max() for one in norms)
    subtitle = (
        f"L2 norm of each patch token, {low:.3g} to {high:.3g} on a logarithmic scale; "
        "outliers are artifacts (Darcet et al., 2024)"
    )
    log_range = max(float(np.log(high / low)), 1e-30)
    relative = [np.log(one / low) / log_range for one in norms]
    cmap = colormaps[MAGNITUDE]
    shown = [[cmap(maps[i], bytes=True)[..., :3] for maps in relative] for i in range(len(images))]
    return draw_image_rows("Token norms", subtitle, images, shown, layers)


@default_style()
def draw_feature_pca(
    images: Sequence[Bytes], components: Sequence[Floats], layers: Sequence[int]
) -> Figure:
    """Principal components of patch features, for each layer (images, rows, columns, 3)."""
    subtitle = "The first three principal components of the patch features as red, green and blue"
    shown = [[maps[i] for maps in components] for i in range(len(images))]
    return draw_image_rows("PCA of patch features", subtitle, images, shown, layers)


@default_style()
def draw_image_rows(
    title: str,
    subtitle: str,
    images: Sequence[Bytes],
    shown: Sequence[Sequence[Any]],
    layers: Sequence[int],
) -> Figure:
    """One row per image: the image itself, then one map for each layer."""
    names = ["image", *(f"layer {layer}" for layer in layers)]
    cell = min(1.6, (WIDTH - 2 * EDGE) / len(names) - GAP)
    height = cell * images[0].shape[0] / images[0].shape[1]
    width = max(7.2, len(names) * (cell + GAP) + 2 * EDGE)
    canvas = Canvas(width, len(images) * (height + GAP) + 1.4)
    canvas.add_title(0.25, title, subtitle)
    for column, name in enumerate(names):
        x = EDGE + column * (cell + GAP)
        canvas.add_text(x + cell / 2, 1.02, name, 8, color=SOFT, ha="center", va="bottom")
        for row, image in enumerate(images):
            one = to_rgb(image) if column == 0 else shown[row][column - 1]
            canvas.add_image(one, x, 1.07 + row * (height + GAP), cell, height)
    return canvas.figure
