"""Curves, confusion matrices and calibration as figures: for paper as PNG, for pages as SVG."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font
from matplotlib.ft2font import FT2Font
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

PALETTE = {  # the names and values of a page in daylight; `svg` puts the names back
    "ink": "#22242c",
    "soft": "#646978",
    "line": "#e4e1d9",
    "blue": "#2b5ea7",
    "amber": "#c98a14",
    "ruby": "#b3273e",
    "green": "#2c7a55",
    "violet": "#6b4a9c",
}
NAMED = 30  # classes up to which a matrix has their names
COUNTED = 15  # classes up to which it has its numbers
FINEST = 125  # rows and columns of a matrix at most; more are put together
DOTTED = 40  # points up to which a curve has dots
LONGEST = 18  # letters of a name
USELESS = r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>"  # in a page, of an SVG


class Bin(Protocol):
    """One bin of a reliability diagram."""

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
    colour: str = "blue"  # a name of the palette
    style: str = "-"
    dots: bool = False
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
    x: str  # what is across
    y: str  # what is up
    percent: bool = False  # y is a share of 1
    marks: Sequence[Mark] = field(default_factory=tuple)


def curves(chart: Chart, size: tuple[float, float] = (5.6, 3.3)) -> Figure:
    """Each curve is named at its end, in its colour: no legend to look up."""
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
            marker="o" if len(curve.x) == 1 or (curve.dots and len(curve.x) <= DOTTED) else "",
            markersize=3.5,
        )
    for mark in chart.marks:
        axes.plot(mark.x, mark.y, "o", color=PALETTE[mark.colour], markersize=8, fillstyle="none")
    axes.set_xlim(left=0)
    if chart.percent:
        low, high = axes.get_ylim()
        axes.set_ylim(max(0.0, low), min(1.0, high) + 0.02 * (high - low))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    house(axes, chart.x, chart.y)
    name_ends(axes, [curve for curve in chart.curves if curve.label and len(curve.x)])
    return figure


def name_ends(axes: Axes, named: Sequence[Curve]) -> None:
    """Labels beside the last points, moved up or down where they would touch."""
    low, high = axes.get_ylim()
    gap = 0.085 * (high - low)
    order = sorted(named, key=lambda curve: curve.y[-1])
    heights: list[float] = []
    for curve in order:
        wanted = min(max(float(curve.y[-1]), low), high)
        heights.append(max(wanted, heights[-1] + gap) if heights else wanted)
    over = max(0.0, heights[-1] - high) if heights else 0.0
    for curve, height in zip(order, heights, strict=True):
        axes.annotate(
            curve.label,
            (curve.x[-1], height - over),
            xytext=(6, 0),
            textcoords="offset points",
            color=PALETTE[curve.colour],
            fontsize=9,
            va="center",
            annotation_clip=False,
            parse_math=False,
        )


def confusion(matrix: NDArray[np.int64], names: Sequence[str]) -> Figure:
    """How often each class (down) was taken for each (across): right in blue, wrong in ruby."""
    classes = len(matrix)
    side = min(7.5, max(3.4, 2.0 + 0.34 * classes))
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    seen = together(matrix, FINEST)
    axes.imshow(coloured(seen), interpolation="nearest", extent=(0, classes, classes, 0))
    house(axes, "taken for", "is", grid=False)
    if classes <= NAMED:
        labels = [drawable(name, number) for number, name in enumerate(names)]
        middle = np.arange(classes) + 0.5
        turn = 0 if max(map(len, labels)) <= 3 else 90
        size = 9 if classes <= COUNTED else 7
        axes.set_xticks(middle, labels, rotation=turn, fontsize=size, parse_math=False)
        axes.set_yticks(middle, labels, fontsize=size, parse_math=False)
        axes.tick_params(length=0)
    if classes <= COUNTED:
        for (row, column), count in np.ndenumerate(matrix):
            if count:
                strong = count > 0.6 * max(1, matrix[row].sum())
                colour = "white" if strong else PALETTE["ink"]
                place = column + 0.5, row + 0.5
                axes.text(*place, f"{count}", color=colour, fontsize=8, ha="center", va="center")
    return figure


def together(matrix: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """A matrix of at most so many rows and columns: neighbours are added up."""
    step = -(-len(matrix) // most)
    starts = np.arange(0, len(matrix), step)
    summed: NDArray[np.int64] = np.add.reduceat(
        np.add.reduceat(matrix, starts, axis=0), starts, axis=1
    )
    return summed


def coloured(matrix: NDArray[np.int64]) -> NDArray[np.float64]:
    """Red, green, blue and opacity of each cell; a few mistakes among many can still be seen."""
    share = matrix / np.maximum(1, matrix.sum(axis=1, keepdims=True))
    right = np.eye(len(matrix), dtype=bool)[:, :, None]
    colour = np.where(right, to_rgb(PALETTE["blue"]), to_rgb(PALETTE["ruby"]))
    opacity = np.where(right[:, :, 0], share, np.sqrt(share))
    return np.concatenate([colour, opacity[:, :, None]], axis=2)


def calibration(before: Sequence[Bin], after: Sequence[Bin]) -> Figure:
    """How sure the model is against how often it is right; below, how many answers are so sure."""
    figure = Figure(figsize=(4.6, 4.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    upper.plot([0, 1], [0, 1], color=PALETTE["soft"], linewidth=1, linestyle=(0, (2, 3)))
    told = (("as it is", before, "ruby", "o", "-"), ("with temperature", after, "blue", "s", "--"))
    for label, found, colour, marker, style in told:
        x, y = [bin.confidence for bin in found], [bin.accuracy for bin in found]
        ink = PALETTE[colour]
        upper.plot(x, y, style, color=ink, marker=marker, markersize=4.5, linewidth=1.6)
        counts = [bin.count for bin in found]
        shift = -0.012 if colour == "ruby" else 0.012
        lower.bar(np.array(x) + shift, counts, width=0.022, color=ink)
        upper.plot([], [], style, color=ink, marker=marker, markersize=4.5, label=label)
    upper.legend(frameon=False, fontsize=9, labelcolor=PALETTE["ink"], loc="upper left")
    upper.set_xlim(0, 1.02)
    upper.set_ylim(0, 1.04)
    for axes in (upper, lower):
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    upper.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    house(upper, "", "answers that are right")
    house(lower, "how sure the model is", "answers")
    return figure


def house(axes: Axes, x: str, y: str, *, grid: bool = True) -> None:
    """Quiet axes: thin lines, no box."""
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


def drawable(name: str, number: int) -> str:
    """A class name cut to size; its number where the font lacks a letter of it."""
    font: FT2Font = get_font(_font_file())
    if not name or any(font.get_char_index(ord(letter)) == 0 for letter in name):
        return str(number)
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _font_file() -> str:
    from matplotlib.font_manager import FontProperties, findfont

    return findfont(FontProperties(family="DejaVu Sans"))


def png(figure: Figure, dpi: int = 160) -> bytes:
    """On white, for paper and slides."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, facecolor="white")
    return stream.getvalue()


def svg(figure: Figure) -> str:
    """For a page that defines the palette as CSS variables: follows its light and dark."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(USELESS, "", text, flags=re.DOTALL)
    for name, colour in PALETTE.items():
        text = text.replace(colour, f"var(--{name})")
    return text
