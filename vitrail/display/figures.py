"""Plots shared by all pages: curves, confusion matrices, reliability diagrams; as PNG or SVG."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ft2font import FT2Font
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from vitrail.display.style import default_style
from vitrail.display.text import truncate

PALETTE = {  # `look.css` in light mode; `to_svg` replaces the colours with its variables
    "ink": "#22242c",
    "soft": "#646978",
    "line": "#e4e1d9",
    "blue": "#2b5ea7",
    "amber": "#c98a14",
    "ruby": "#b3273e",
    "green": "#2c7a55",
    "violet": "#6b4a9c",
}
MAX_NAMED_CLASSES = 30  # with more classes, a confusion matrix shows no class names
MAX_COUNTED_CLASSES = 15  # with more classes, it shows no numbers in its cells
MAX_CELLS = 125  # rows of a drawn matrix; neighbouring classes of a larger one are summed
MAX_MARKERS = 40  # curves with more points have no markers
MAX_LABEL = 18  # characters of a class name
# Parts of matplotlib's SVG that a page does not need.
SVG_EXTRAS = r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>"


class CalibrationBin(Protocol):
    """One bin of a reliability diagram: mean confidence, accuracy and number of predictions."""

    @property
    def confidence(self) -> float: ...

    @property
    def accuracy(self) -> float: ...

    @property
    def count(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Curve:
    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = "blue"  # a key of PALETTE
    style: str = "-"
    markers: bool = False
    faint: bool = False


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A ring around a point of a curve."""

    x: float
    y: float
    colour: str = "amber"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Several curves on the same axes."""

    curves: Sequence[Curve]
    x: str  # label of the horizontal axis
    y: str  # label of the vertical axis
    percent: bool = False  # y is a fraction from 0 to 1, shown in percent
    whole: bool = False  # x has ticks at whole numbers only
    marks: Sequence[Mark] = field(default_factory=tuple)


@default_style()
def draw_curves(chart: Chart, size: tuple[float, float] = (5.6, 3.3)) -> Figure:
    """Labels each curve at its end, in its colour, instead of a legend."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for curve in chart.curves:
        axes.plot(
            curve.x,
            curve.y,
            color=PALETTE[curve.colour],
            linestyle=curve.style,
            linewidth=0.9 if curve.faint else 1.8,
            alpha=0.35 if curve.faint else 1.0,
            marker="o"
            if len(curve.x) == 1 or (curve.markers and len(curve.x) <= MAX_MARKERS)
            else "",
            markersize=3.5,
        )
    for mark in chart.marks:
        axes.plot(mark.x, mark.y, "o", color=PALETTE[mark.colour], markersize=8, fillstyle="none")
    axes.set_xlim(left=0)
    if chart.percent:
        low, high = axes.get_ylim()
        axes.set_ylim(max(0.0, low), min(1.0, high) + 0.02 * (high - low))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    style_axes(axes, chart.x, chart.y)
    if chart.whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label_curve_ends(axes, [curve for curve in chart.curves if curve.label and len(curve.x)])
    return figure


def label_curve_ends(axes: Axes, curves: Sequence[Curve]) -> None:
    """Puts labels beside the last points, moved up or down where they would overlap."""
    low, high = axes.get_ylim()
    gap = 0.085 * (high - low)
    order = sorted(curves, key=lambda curve: curve.y[-1])
    heights: list[float] = []
    for curve in order:
        end = min(max(float(curve.y[-1]), low), high)
        heights.append(max(end, heights[-1] + gap) if heights else end)
    overflow = max(0.0, heights[-1] - high) if heights else 0.0
    for curve, height in zip(order, heights, strict=True):
        axes.annotate(
            curve.label,
            (curve.x[-1], height - overflow),
            xytext=(6, 0),
            textcoords="offset points",
            color=PALETTE[curve.colour],
            fontsize=9,
            va="center",
            annotation_clip=False,
            parse_math=False,
        )


@default_style()
def draw_confusion_matrix(matrix: NDArray[np.int64], names: Sequence[str]) -> Figure:
    """True classes down, predicted classes across; correct predictions in blue, errors in ruby."""
    classes = len(matrix)
    side = min(7.5, max(3.4, 2.0 + 0.34 * classes))
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    coarse = sum_blocks(matrix, MAX_CELLS)
    axes.imshow(colour_cells(coarse), interpolation="nearest", extent=(0, classes, classes, 0))
    style_axes(axes, "predicted", "true class", grid=False)
    if classes <= MAX_NAMED_CLASSES:
        labels = [tick_label(name, number) for number, name in enumerate(names)]
        centres = np.arange(classes) + 0.5
        rotation = 0 if max(map(len, labels)) <= 3 else 90
        size = 9 if classes <= MAX_COUNTED_CLASSES else 7
        axes.set_xticks(centres, labels, rotation=rotation, fontsize=size, parse_math=False)
        axes.set_yticks(centres, labels, fontsize=size, parse_math=False)
        axes.tick_params(length=0)
    if classes <= MAX_COUNTED_CLASSES:
        for (row, column), count in np.ndenumerate(matrix):
            if count:
                strong = count > 0.6 * max(1, matrix[row].sum())
                colour = "white" if strong else PALETTE["ink"]
                centre = column + 0.5, row + 0.5
                axes.text(*centre, f"{count}", color=colour, fontsize=8, ha="center", va="center")
    return figure


def sum_blocks(matrix: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Sums neighbouring rows and columns, so that at most `limit` of each remain."""
    step = -(-len(matrix) // limit)
    starts = np.arange(0, len(matrix), step)
    summed: NDArray[np.int64] = np.add.reduceat(
        np.add.reduceat(matrix, starts, axis=0), starts, axis=1
    )
    return summed


def colour_cells(matrix: NDArray[np.int64]) -> NDArray[np.float64]:
    """RGBA of each cell; the square root keeps rare errors visible."""
    share = matrix / np.maximum(1, matrix.sum(axis=1, keepdims=True))
    correct = np.eye(len(matrix), dtype=bool)[:, :, None]
    colour = np.where(correct, to_rgb(PALETTE["blue"]), to_rgb(PALETTE["ruby"]))
    opacity = np.where(correct[:, :, 0], share, np.sqrt(share))
    return np.concatenate([colour, opacity[:, :, None]], axis=2)


@default_style()
def draw_reliability_diagram(
    before: Sequence[CalibrationBin], after: Sequence[CalibrationBin]
) -> Figure:
    """Accuracy against confidence, before and after temperature scaling; below, the counts."""
    figure = Figure(figsize=(4.6, 4.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    upper.plot([0, 1], [0, 1], color=PALETTE["soft"], linewidth=1, linestyle=(0, (2, 3)))
    series = (
        ("raw softmax", before, "ruby", "o", "-", -0.012),
        ("with temperature", after, "blue", "s", "--", 0.012),
    )
    for label, bins, colour, marker, style, shift in series:
        x, y = [bin.confidence for bin in bins], [bin.accuracy for bin in bins]
        rgb = PALETTE[colour]
        upper.plot(x, y, style, color=rgb, marker=marker, markersize=4.5, linewidth=1.6)
        lower.bar(np.array(x) + shift, [bin.count for bin in bins], width=0.022, color=rgb)
        upper.plot([], [], style, color=rgb, marker=marker, markersize=4.5, label=label)
    upper.legend(frameon=False, fontsize=9, labelcolor=PALETTE["ink"], loc="upper left")
    upper.set_xlim(0, 1.02)
    upper.set_ylim(0, 1.04)
    for axes in (upper, lower):
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    upper.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    style_axes(upper, "", "accuracy")
    style_axes(lower, "confidence", "images")
    return figure


def style_axes(axes: Axes, x: str, y: str, *, grid: bool = True) -> None:
    """The style of every plot: thin lines, axis labels, no box."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(PALETTE["soft"])
    axes.spines["bottom"].set_visible(grid)
    axes.set_xlabel(x, color=PALETTE["soft"], fontsize=9)
    axes.set_ylabel(y, color=PALETTE["soft"], fontsize=9)
    axes.tick_params(colors=PALETTE["soft"], labelsize=8.5, width=0.8)
    axes.patch.set_alpha(0.0)
    if grid:
        axes.grid(axis="y", color=PALETTE["line"], linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_locator(MaxNLocator(6))


def tick_label(name: str, number: int) -> str:
    """A class name, truncated; its index if the font lacks one of its characters."""
    font: FT2Font = get_font(_font_file())
    if not name or any(font.get_char_index(ord(letter)) == 0 for letter in name):
        return str(number)
    return truncate(name, MAX_LABEL)


def _font_file() -> str:
    return findfont(FontProperties(family="DejaVu Sans"))


@default_style()
def to_png(figure: Figure, dpi: int = 160) -> bytes:
    """On a white background, for paper and slides."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, facecolor="white")
    return stream.getvalue()


@default_style()
def to_svg(figure: Figure) -> str:
    """For a page that defines the palette as CSS variables, in light and dark mode."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(SVG_EXTRAS, "", text, flags=re.DOTALL)
    for name, colour in PALETTE.items():
        text = text.replace(colour, f"var(--{name})")
    return text
