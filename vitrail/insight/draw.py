"""Arrays as pictures: overlays, heads side by side, and what a model learned."""

import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from vitrail.display.text import printable

if TYPE_CHECKING:
    from vitrail.insight.explanation import Explanation

Floats = NDArray[np.floating[Any]]
Bytes = NDArray[np.uint8]

DPI = 200  # 11 inches become 2200 pixels: sharp at the 1100 that a page shows
WIDTH = 11.0  # inches of a large picture
EDGE, GAP = 0.4, 0.06  # inches around it, and between small maps
SIDE = 448  # pixels of an overlay, at least
SMOOTH = 8  # rows and columns of patches from which an overlay is smoothed
QUERIES = 14  # rows and columns of positions that are compared with all

# Perceptually uniform, and readable with every kind of colour vision.
HEAT = "inferno"  # explanations, laid over the image
LOOK = "viridis"  # attention and other amounts
ALIKE = "cividis"  # similarities
INK, SOFT, PANE = "#22242c", "#646978", "#f1efe8"
BLUE, RUBY, GREY = "#2b5ea7", "#b3273e", "#9aa0ad"

WORDS = {  # what each method shows
    "relevance": "attention weighted by what it does for the class",
    "gradient-rollout": "attention that helps the class, followed through all layers",
    "rollout": "attention followed through all layers; knows no class",
    "attention": "attention of the last layer; knows no class",
    "occlusion": "what the class loses when a patch is hidden",
}


def png(figure: Figure, dpi: int = DPI) -> bytes:
    """The picture as a file; letters that the font does not have become boxes."""
    stream = io.BytesIO()
    quick = {"compress_level": 2}  # an overview in 0.25 s and 1.9 MB; by default 0.6 s and 1.6 MB
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(stream, format="png", dpi=dpi, facecolor="white", pil_kwargs=quick)
    return stream.getvalue()


class Sheet:
    """A white page measured in inches from its upper left corner."""

    def __init__(self, width: float, height: float):
        self.width, self.height = width, height
        self.figure = Figure((width, height), dpi=DPI, facecolor="white")

    def panel(self, x: float, y: float, width: float, height: float) -> Axes:
        low = self.height - y - height
        place = (x / self.width, low / self.height, width / self.width, height / self.height)
        return self.figure.add_axes(place)

    def image(
        self, pixels: Any, x: float, y: float, width: float, height: float, **how: Any
    ) -> Axes:
        axes = self.panel(x, y, width, height)
        axes.axis("off")
        axes.imshow(pixels, **{"aspect": "auto", "interpolation": "nearest", **how})
        return axes

    def write(self, x: float, y: float, words: str, size: float = 9, **style: Any) -> None:
        style = {"color": INK, "ha": "left", "va": "top", "parse_math": False, **style}
        self.figure.text(x / self.width, 1 - y / self.height, words, fontsize=size, **style)

    def title(self, y: float, title: str, words: str) -> None:
        self.write(EDGE, y, title, 12, weight="bold")
        self.write(EDGE, y + 0.25, words, 8.5, color=SOFT)

    def scale(self, x: float, y: float, height: float, colours: str, low: str, high: str) -> None:
        """A bar of colours with what its ends mean, to its right."""
        self.image(np.linspace(1, 0, 256)[:, None], x, y, 0.13, height, cmap=colours)
        self.write(x + 0.19, y, high, 8, color=SOFT)
        self.write(x + 0.19, y + height, low, 8, color=SOFT, va="bottom")


# --- one image ------------------------------------------------------------------------------------


def overview(one: "Explanation") -> Figure:
    """All on one page: what was seen, said and looked at, and how far to trust that."""
    shape = proportion(one)
    large = 3.1 / max(1.0, shape)
    small = min(2.4, 2.4 / shape, (WIDTH - 2 * EDGE) / len(one.heats) - 0.2)
    looking = Grid(one, one.layers, WIDTH - 2 * EDGE - 1.5)
    tops = np.cumsum([1.4, large * shape + 1.05, small * shape + 1.35])
    sheet = Sheet(WIDTH, tops[2] + looking.height + 0.35)
    heading(sheet, one)
    picture(sheet, one, EDGE, tops[0], large)
    bars(sheet, one, EDGE + large + 0.4, tops[0], WIDTH - 2 * large - 2.45, large * shape)
    answer(sheet, one, WIDTH - large - 1.2, tops[0], large)
    methods(sheet, one, tops[1], small)
    looking.draw(sheet, tops[2])
    return sheet.figure


def overlay(one: "Explanation", method: str) -> Figure:
    """One explanation alone, for a paper."""
    heat, side = one.heats[method], 4.2
    tall = side * proportion(one)
    sheet = Sheet(side + 1.05, tall + 0.85)
    sheet.write(0.15, 0.12, f"{method}: {short(one.target, 34)}", 11, weight="bold")
    sheet.write(0.15, 0.38, WORDS[method], 8, color=SOFT)
    sheet.image(overlaid(one.pixels, heat), 0.15, 0.68, side, tall)
    sheet.scale(side + 0.25, 0.68, tall, HEAT, *shares(heat))
    return sheet.figure


def heads(one: "Explanation", layers: Sequence[int]) -> Figure:
    """The drawn heads of some layers alone, for a paper."""
    grid = Grid(one, layers, WIDTH - 2 * EDGE - 1.5)
    sheet = Sheet(max(6.0, grid.width + 2 * EDGE + 1.5), grid.height + 1.2)
    grid.draw(sheet, 1.0)
    return sheet.figure


def heading(sheet: Sheet, one: "Explanation") -> None:
    label, probability = one.top[0]
    sheet.write(EDGE, 0.3, f"{short(label, 50)}, {percent(probability)}", 19, weight="bold")
    words = short(one.name, 80)
    if one.asked and one.target != label:
        asked = f"{short(one.target, 40)}, {percent(one.probability)}"
        words = f"Why not {asked}?   {words}"
    sheet.write(EDGE, 0.7, words, 10, color=SOFT)


def picture(sheet: Sheet, one: "Explanation", x: float, y: float, side: float) -> None:
    """The image with faint lines between its patches."""
    (height, width), (rows, columns) = one.pixels.shape[:2], one.grid
    words = f"What it sees: {width} x {height} pixels, {columns} x {rows} patches"
    sheet.write(x, y - 0.24, words, 8.5, color=SOFT)
    axes = sheet.image(colour(one.pixels), x, y, side, side * height / width)
    style: dict[str, Any] = {"colors": "white", "linewidth": 0.4, "alpha": 0.45}
    axes.vlines(np.arange(1, columns) * width / columns - 0.5, -0.5, height - 0.5, **style)
    axes.hlines(np.arange(1, rows) * height / rows - 0.5, -0.5, width - 0.5, **style)


def bars(sheet: Sheet, one: "Explanation", x: float, y: float, width: float, tall: float) -> None:
    """The most likely classes, and the one that was asked for."""
    sheet.write(x, y - 0.24, "What it says", 8.5, color=SOFT)
    guesses = list(one.top)
    if one.target not in [label for label, _ in guesses]:
        guesses[4:] = [(one.target, one.probability)]
    step = min(0.56, tall / len(guesses))
    axes = sheet.panel(x, y, width, step * len(guesses))
    axes.axis("off")
    axes.set(xlim=(0, 1), ylim=(len(guesses), 0))
    for number, (label, probability) in enumerate(guesses):
        mine = label == one.target
        axes.barh(number + 0.6, 1, 0.16, color=PANE)
        axes.barh(number + 0.6, probability, 0.16, color=BLUE if mine else GREY)
        style: dict[str, Any] = {"fontsize": 9, "parse_math": False, "va": "bottom", "color": INK}
        weight = "bold" if mine else "normal"
        axes.text(0, number + 0.46, short(label, int(width * 9)), weight=weight, **style)
        axes.text(1, number + 0.46, percent(probability), ha="right", **style)


def answer(sheet: Sheet, one: "Explanation", x: float, y: float, side: float) -> None:
    """The explanation to begin with, large, with its scale."""
    smoothed = "smoothed" if smooth(one.grid) else "patch by patch"
    words = f"Why {short(one.target, 24)}: {one.method}, {smoothed}"
    sheet.write(x, y - 0.24, words, 8.5, color=SOFT)
    tall = side * proportion(one)
    sheet.image(overlaid(one.pixels, one.heat), x, y, side, tall)
    sheet.scale(x + side + 0.1, y, tall, HEAT, *shares(one.heat))


def methods(sheet: Sheet, one: "Explanation", y: float, side: float) -> None:
    """Every method with its score, the best first."""
    words = (
        "Score: how likely the class is while the brightest patches come first, less how likely it "
        "is while they go first; 0 is chance, 1 the most."
    )
    sheet.title(y - 0.62, "Which explanation to trust", words)
    tall = side * proportion(one)
    for number, (method, score) in enumerate(one.scores.items()):
        x = EDGE + number * (side + 0.2)
        sheet.image(overlaid(one.pixels, one.heats[method]), x, y, side, tall)
        weight = "bold" if method == one.method else "normal"
        sheet.write(x, y + tall + 0.06, f"{method}  {score:.2f}", 9, weight=weight)


class Grid:
    """The reader's attention, a small map for each head of each layer; the longer goes across."""

    def __init__(self, one: "Explanation", layers: Sequence[int], room: float):
        self.one = one
        maps = np.stack([one.maps(layer)[list(one.heads)] for layer in layers])
        beside, above = [f"layer {n}" for n in layers], [f"head {n}" for n in one.heads]
        if len(layers) > len(one.heads):
            maps, beside, above = maps.swapaxes(0, 1), above, beside
        self.maps, self.beside, self.above = maps, beside, above
        self.cell = min(1.4, room / len(above) - GAP)
        self.tall = self.cell * proportion(one)
        self.width, self.height = len(above) * (self.cell + GAP), len(beside) * (self.tall + GAP)

    def draw(self, sheet: Sheet, y: float) -> None:
        words = "One map for each head; a square is a patch, each map by its own brightest one."
        sheet.title(y - 0.8, f"Where {self.one.reader} looks", words)
        x = EDGE + 0.6
        shares = self.maps / np.maximum(self.maps.max(axis=(2, 3), keepdims=True), 1e-30)
        page = montage(shares, LOOK, GAP / self.cell)
        sheet.image(page, x, y, self.width - GAP, self.height - GAP)
        style: dict[str, Any] = {"size": 8, "color": SOFT}
        for number, name in enumerate(self.above):
            place = x + number * (self.cell + GAP) + self.cell / 2
            sheet.write(place, y - 0.05, name, ha="center", va="bottom", **style)
        for number, name in enumerate(self.beside):
            place = y + number * (self.tall + GAP) + self.tall / 2
            sheet.write(x - 0.08, place, name, ha="right", va="center", **style)
        sheet.scale(x + self.width + 0.06, y, max(0.6, self.tall), LOOK, "0", "most")


def overlaid(pixels: Bytes, heat: Floats) -> Bytes:
    """The image, paler and darker, under the colours of the heat: the hotter, the denser."""
    height, width = pixels.shape[:2]
    times = max(1, -(-SIDE // max(height, width)))
    size = (width * times, height * times)
    way = Image.Resampling.BICUBIC if smooth(heat.shape) else Image.Resampling.NEAREST
    low, high = ends(heat)
    share = ((heat - low) / max(high - low, 1e-30)).clip(0, 1).astype(np.float32)
    fine = np.asarray(Image.fromarray(share).resize(size, way)).clip(0, 1)
    image = np.asarray(Image.fromarray(colour(pixels)).resize(size, Image.Resampling.NEAREST))
    grey = image.mean(axis=2, keepdims=True)
    under = 0.7 * (0.6 * grey + 0.4 * image)
    dense = 0.85 * fine[:, :, None] ** 0.8
    over = colormaps[HEAT](fine)[:, :, :3] * 255
    mixed: Bytes = ((1 - dense) * under + dense * over).round().astype(np.uint8)
    return mixed


def montage(maps: Floats, colours: str, between: float) -> Bytes:
    """Maps (rows, columns, height, width) from 0 to 1, `between` of a width apart."""
    rows, columns, height, width = maps.shape
    times = max(1, -(-96 // max(height, width)))
    fine = maps.repeat(times, axis=2).repeat(times, axis=3)
    gap = max(1, round(between * times * width))
    page = np.full((rows, height * times + gap, columns, width * times + gap, 3), 255, np.uint8)
    painted = colormaps[colours](fine, bytes=True)[..., :3].transpose(0, 2, 1, 3, 4)
    page[:, : height * times, :, : width * times] = painted
    flat = page.reshape(rows * (height * times + gap), columns * (width * times + gap), 3)
    return flat[:-gap, :-gap]


def colour(pixels: Bytes) -> Bytes:
    """Three channels; of other sensors the first one as grey."""
    return pixels if pixels.shape[2] == 3 else pixels[:, :, :1].repeat(3, axis=2)


def proportion(one: "Explanation") -> float:
    """Height over width."""
    height, width = one.pixels.shape[:2]
    return float(height / width)


def smooth(grid: tuple[int, ...]) -> bool:
    """Whether there are patches enough that smoothing hides none of them."""
    return min(grid) >= SMOOTH


def ends(heat: Floats) -> tuple[float, float]:
    """What the darkest and the brightest colour mean; of many patches, some are brighter still.

    One patch in forty may be: a single one far above the rest would leave all else dark.
    """
    return float(heat.min()), float(np.quantile(heat, 0.975, method="higher"))


def shares(heat: Floats) -> tuple[str, str]:
    """The same in words, as shares of the whole."""
    whole = max(float(heat.sum()), 1e-30)
    low, high = (percent(end / whole) for end in ends(heat))
    return low, f"{high}\nof all" + ("\nor more" if heat.max() > ends(heat)[1] else "")


def percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def short(text: str, letters: int) -> str:
    """A name that neither fools the reader nor leaves its place."""
    text = printable(text)
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


# --- what a model learned -------------------------------------------------------------------------


def positions(similarity: Floats) -> Figure:
    """Every position against all (Dosovitskiy et al., 2021, figure 7): (r, c, r, c), cosines."""
    rows, columns = similarity.shape[:2]
    down, across = (evenly(side) for side in (rows, columns))
    maps = similarity[np.ix_(down, across)]
    low, high = float(maps.min()), float(maps.max())
    side = 6.2
    tall = side * len(down) * rows / (len(across) * columns)
    sheet = Sheet(side + 2 * EDGE + 0.7, tall + 1.25)
    words = f"{columns} x {rows} positions; each map compares one of them with all"
    if len(down) < rows or len(across) < columns:
        words += f" ({len(across)} x {len(down)} shown)"
    sheet.title(0.25, "What the positions learned", words)
    spread = (maps - low) / max(high - low, 1e-30)
    sheet.image(montage(spread, ALIKE, 0.1), EDGE, 0.9, side, tall)
    place = EDGE + side + 0.12
    sheet.scale(place, 0.9, tall, ALIKE, f"{low:.2f}", f"{high:.2f}\ncosine")
    return sheet.figure


def evenly(side: int) -> list[int]:
    """Rows to show, both ends among them."""
    places: list[int] = np.linspace(0, side - 1, min(side, QUERIES)).round().astype(int).tolist()
    return places


def filters(components: Floats) -> Figure:
    """The main directions of the patch embedding: (count, channels, p, p)."""
    count = len(components)
    columns = min(count, 14 if count > 28 else 7)
    rows = -(-count // columns)
    shown = components[:, :3] if components.shape[1] >= 3 else components[:, :1].repeat(3, axis=1)
    reach = np.abs(shown).max(axis=(1, 2, 3), keepdims=True)
    shown = (0.5 + shown / np.maximum(reach, 1e-30) / 2).transpose(0, 2, 3, 1)
    size = min(1.2, 6.2 / columns)
    sheet = Sheet(6.2 + 2 * EDGE, rows * size + 1.2)
    words = "Principal components of the patch filters, the strongest first; grey is zero"
    sheet.title(0.25, "What a patch is compared with", words)
    for number, one in enumerate(shown):
        x, y = EDGE + number % columns * size, 0.9 + number // columns * size
        axes = sheet.image(one, x, y, size - GAP, size - GAP)
        axes.axis("on")
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(color=GREY, linewidth=0.5)
    return sheet.figure


def distances(distance: Floats, size: tuple[int, int]) -> Figure:
    """How far each head looks on average, in pixels: (layers, heads)."""
    words = f"Mean distance of attention in pixels, of images of {size[1]} x {size[0]}"
    return heads_by_layer(distance, "How far each head looks", words, "pixels")


def entropies(entropy: Floats, tokens: int, dead: NDArray[np.bool_]) -> Figure:
    """How widely each head spreads its attention, in nats, and which are dead: (layers, heads)."""
    top = float(np.log(tokens))
    words = f"Entropy of attention; {top:.2f} is all {tokens} tokens alike, 0 a single one"
    figure = heads_by_layer(entropy, "How widely each head looks", words, "nats")
    axes = figure.axes[0]
    axes.axhline(top, color=GREY, lw=0.8, ls=(0, (4, 3)))
    axes.set_ylim(0, top * 1.06)
    if dead.any():
        layers, numbers = np.nonzero(dead)
        style: dict[str, Any] = {
            "facecolors": "none",
            "edgecolors": RUBY,
            "linewidths": 1.4,
            "zorder": 4,
        }
        words = "dead: adds next to nothing"
        axes.scatter(layers, entropy[layers, numbers], s=90, label=words, **style)
        axes.legend(frameon=False, fontsize=8.5, loc="best")
    return figure


def heads_by_layer(values: Floats, title: str, words: str, unit: str) -> Figure:
    layers, count = values.shape
    sheet = Sheet(7.2, 4.6)
    sheet.title(0.25, title, words)
    axes = sheet.panel(0.95, 0.95, 5.95, 2.95)
    numbers = np.arange(layers)
    style: dict[str, Any] = {
        "color": BLUE,
        "alpha": 0.75,
        "s": 34,
        "linewidths": 0,
        "clip_on": False,
    }
    axes.scatter(numbers.repeat(count), values.flatten(), zorder=3, **style)
    axes.plot(numbers, values.mean(axis=1), color=INK, lw=1, alpha=0.6, label="mean of heads")
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
    return sheet.figure


def norms(pictures: Sequence[Bytes], found: Sequence[Floats], layers: Sequence[int]) -> Figure:
    """How long the tokens are: for each layer (images, rows, columns).

    Artifacts are those of Darcet et al. (2024), which registers cure.
    """
    low, high = min(one.min() for one in found), max(one.max() for one in found)
    words = (
        f"Length of each patch's token after a layer, {low:.3g} to {high:.3g} by its logarithm; "
        "a few far above the rest are artifacts"
    )
    names = [f"layer {layer}" for layer in layers]
    reach = max(float(np.log(high / low)), 1e-30)
    spread = [np.log(one / low) / reach for one in found]
    shown = [
        [colormaps[LOOK](maps[i], bytes=True)[..., :3] for maps in spread]
        for i in range(len(pictures))
    ]
    sheet = contact("How strong the tokens are", words, pictures, shown, names)
    return sheet.figure


def colours(pictures: Sequence[Bytes], found: Sequence[Floats], layers: Sequence[int]) -> Figure:
    """Features as colours: for each layer (images, rows, columns, 3) from 0 to 1."""
    words = (
        "The three main directions of the features as red, green, blue: like colours, like features"
    )
    names = [f"layer {layer}" for layer in layers]
    shown = [[maps[i] for maps in found] for i in range(len(pictures))]
    return contact("What the patches have in common", words, pictures, shown, names).figure


def contact(
    title: str,
    words: str,
    pictures: Sequence[Bytes],
    shown: Sequence[Sequence[Any]],
    names: Sequence[str],
) -> Sheet:
    """A row for each image: itself, then what was made of it."""
    columns = 1 + len(names)
    cell = min(1.6, (WIDTH - 2 * EDGE) / columns - GAP)
    tall = cell * pictures[0].shape[0] / pictures[0].shape[1]
    width = max(7.2, columns * (cell + GAP) + 2 * EDGE)
    sheet = Sheet(width, len(pictures) * (tall + GAP) + 1.4)
    sheet.title(0.25, title, words)
    for column, name in enumerate(["image", *names]):
        x = EDGE + column * (cell + GAP)
        sheet.write(x + cell / 2, 1.02, name, 8, color=SOFT, ha="center", va="bottom")
        for row, image in enumerate(pictures):
            one = colour(image) if column == 0 else shown[row][column - 1]
            sheet.image(one, x, 1.07 + row * (tall + GAP), cell, tall)
    return sheet
