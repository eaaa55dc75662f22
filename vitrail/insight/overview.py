"""Figures of one explanation: an overview, one heatmap, attention by layer and head."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vitrail.display.style import default_style
from vitrail.display.text import format_percent, printable, truncate
from vitrail.insight.arrays import ExplanationArrays
from vitrail.insight.canvas import (
    BLUE,
    EDGE,
    GAP,
    GREY,
    HEATMAP,
    INK,
    MAGNITUDE,
    PANE,
    SOFT,
    WIDTH,
    Canvas,
)
from vitrail.insight.methods import METHODS, SIMILARITY_SUMMARY
from vitrail.insight.overlay import (
    colorbar_labels,
    is_smooth,
    overlay_heatmap,
    tile_maps,
    to_rgb,
)

SCORE = (
    "Score: insertion AUC minus deletion AUC (Petsiuk et al., 2018); "
    "0 for a random order of patches, 1 at most."
)


@default_style()
def draw_overview(one: ExplanationArrays) -> Figure:
    """Image, prediction, heatmaps with their faithfulness, and attention maps in one figure."""
    large = 3.1 / max(1.0, one.aspect)
    small = min(2.4, 2.4 / one.aspect, (WIDTH - 2 * EDGE) / len(one.heatmaps) - 0.2)
    heads = HeadGrid(one, one.layers, WIDTH - 2 * EDGE - 1.5)
    tops = np.cumsum([1.4, large * one.aspect + 1.05, small * one.aspect + 1.35])
    canvas = Canvas(WIDTH, tops[2] + heads.height + 0.35)
    _add_heading(canvas, one)
    _add_input(canvas, one, EDGE, tops[0], large)
    bars_width = WIDTH - 2 * large - 2.45
    _add_bars(canvas, one, EDGE + large + 0.4, tops[0], bars_width, large * one.aspect)
    _add_heatmap(canvas, one, WIDTH - large - 1.2, tops[0], large)
    _add_methods(canvas, one, tops[1], small)
    heads.draw(canvas, tops[2])
    return canvas.figure


@default_style()
def draw_overlay(one: ExplanationArrays, method: str) -> Figure:
    """One heatmap over the image, with its colour bar."""
    heatmap, side = one.heatmaps[method], 4.2
    height = side * one.aspect
    canvas = Canvas(side + 1.05, height + 0.85)
    title = f"{method}: {_shorten(one.target, 34)}" if one.target else method
    summary = METHODS[method].summary if method in METHODS else SIMILARITY_SUMMARY
    canvas.add_text(0.15, 0.12, title, 11, weight="bold")
    canvas.add_text(0.15, 0.38, summary, 8, color=SOFT)
    canvas.add_image(overlay_heatmap(one.pixels, heatmap), 0.15, 0.68, side, height)
    canvas.add_colorbar(side + 0.25, 0.68, height, HEATMAP, *colorbar_labels(heatmap))
    return canvas.figure


@default_style()
def draw_heads(one: ExplanationArrays, layers: Sequence[int]) -> Figure:
    """The attention maps of the shown heads in some layers."""
    grid = HeadGrid(one, layers, WIDTH - 2 * EDGE - 1.5)
    canvas = Canvas(max(6.0, grid.width + 2 * EDGE + 1.5), grid.height + 1.2)
    grid.draw(canvas, 1.0)
    return canvas.figure


class HeadGrid:
    """The attention maps of each head and layer; the longer of the two runs across."""

    def __init__(self, one: ExplanationArrays, layers: Sequence[int], width: float):
        self.query = one.query
        maps = np.stack([one.attention_maps(layer)[list(one.heads)] for layer in layers])
        rows, columns = [f"layer {n}" for n in layers], [f"head {n}" for n in one.heads]
        if len(layers) > len(one.heads):
            maps, rows, columns = maps.swapaxes(0, 1), columns, rows
        self.maps, self.rows, self.columns = maps, rows, columns
        self.cell_width = min(1.4, width / len(columns) - GAP)
        self.cell_height = self.cell_width * one.aspect
        self.width = len(columns) * (self.cell_width + GAP)
        self.height = len(rows) * (self.cell_height + GAP)

    def draw(self, canvas: Canvas, y: float) -> None:
        subtitle = "One map per head and layer; each is scaled to its own maximum."
        canvas.add_title(y - 0.8, f"Attention of {self.query}", subtitle)
        x = EDGE + 0.6
        relative = self.maps / np.maximum(self.maps.max(axis=(2, 3), keepdims=True), 1e-30)
        tiles = tile_maps(relative, MAGNITUDE, GAP / self.cell_width)
        canvas.add_image(tiles, x, y, self.width - GAP, self.height - GAP)
        style: dict[str, Any] = {"size": 8, "color": SOFT}
        for number, name in enumerate(self.columns):
            centre = x + number * (self.cell_width + GAP) + self.cell_width / 2
            canvas.add_text(centre, y - 0.05, name, ha="center", va="bottom", **style)
        for number, name in enumerate(self.rows):
            centre = y + number * (self.cell_height + GAP) + self.cell_height / 2
            canvas.add_text(x - 0.08, centre, name, ha="right", va="center", **style)
        height = max(0.6, self.cell_height)
        canvas.add_colorbar(x + self.width + 0.06, y, height, MAGNITUDE, "0", "max")


def _shorten(text: str, length: int) -> str:
    return truncate(printable(text), length)


def _add_heading(canvas: Canvas, one: ExplanationArrays) -> None:
    label, probability = one.top[0]
    prediction = f"{_shorten(label, 50)}, {format_percent(probability)}"
    canvas.add_text(EDGE, 0.3, prediction, 19, weight="bold")
    subtitle = _shorten(one.name, 80)
    if one.target_given and one.target != label:
        target = f"{_shorten(one.target, 40)}, {format_percent(one.probability)}"
        subtitle = f"Explained class: {target}   {subtitle}"
    canvas.add_text(EDGE, 0.7, subtitle, 10, color=SOFT)


def _add_input(canvas: Canvas, one: ExplanationArrays, x: float, y: float, side: float) -> None:
    """The image with thin lines between its patches."""
    (height, width), (rows, columns) = one.pixels.shape[:2], one.grid
    caption = f"Input: {width} x {height} pixels, {columns} x {rows} patches"
    canvas.add_text(x, y - 0.24, caption, 8.5, color=SOFT)
    axes = canvas.add_image(to_rgb(one.pixels), x, y, side, side * height / width)
    style: dict[str, Any] = {"colors": "white", "linewidth": 0.4, "alpha": 0.45}
    axes.vlines(np.arange(1, columns) * width / columns - 0.5, -0.5, height - 0.5, **style)
    axes.hlines(np.arange(1, rows) * height / rows - 0.5, -0.5, width - 0.5, **style)


def _add_bars(
    canvas: Canvas, one: ExplanationArrays, x: float, y: float, width: float, height: float
) -> None:
    """The most likely classes, and the explained one."""
    canvas.add_text(x, y - 0.24, "Prediction", 8.5, color=SOFT)
    classes = list(one.top)
    if one.target not in [label for label, _ in classes]:
        classes[4:] = [(one.target, one.probability)]
    step = min(0.56, height / len(classes))
    axes = canvas.add_axes(x, y, width, step * len(classes))
    axes.axis("off")
    axes.set(xlim=(0, 1), ylim=(len(classes), 0))
    for number, (label, probability) in enumerate(classes):
        is_target = label == one.target
        axes.barh(number + 0.6, 1, 0.16, color=PANE)
        axes.barh(number + 0.6, probability, 0.16, color=BLUE if is_target else GREY)
        style: dict[str, Any] = {"fontsize": 9, "parse_math": False, "va": "bottom", "color": INK}
        weight = "bold" if is_target else "normal"
        axes.text(0, number + 0.46, _shorten(label, int(width * 9)), weight=weight, **style)
        axes.text(1, number + 0.46, format_percent(probability), ha="right", **style)


def _add_heatmap(canvas: Canvas, one: ExplanationArrays, x: float, y: float, side: float) -> None:
    """The heatmap of the chosen method, large, with its colour bar."""
    smoothing = "interpolated" if is_smooth(one.grid) else "per patch"
    caption = f"Heatmap for {_shorten(one.target, 24)}: {one.method}, {smoothing}"
    canvas.add_text(x, y - 0.24, caption, 8.5, color=SOFT)
    height = side * one.aspect
    canvas.add_image(overlay_heatmap(one.pixels, one.heatmap), x, y, side, height)
    canvas.add_colorbar(x + side + 0.1, y, height, HEATMAP, *colorbar_labels(one.heatmap))


def _add_methods(canvas: Canvas, one: ExplanationArrays, y: float, side: float) -> None:
    """The heatmap of every method with its score, the best first."""
    canvas.add_title(y - 0.62, "Faithfulness of each method", SCORE)
    height = side * one.aspect
    for number, (method, score) in enumerate(one.scores.items()):
        x = EDGE + number * (side + 0.2)
        canvas.add_image(overlay_heatmap(one.pixels, one.heatmaps[method]), x, y, side, height)
        weight = "bold" if method == one.method else "normal"
        canvas.add_text(x, y + height + 0.06, f"{method}  {score:.2f}", 9, weight=weight)
