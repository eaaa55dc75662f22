"""Draws the first chapter's pictures: `python -m book.figures --weights FOLDER`."""

# ruff: noqa: RUF001 (shapes are written with the sign that people use for times)

import argparse
import io
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cbook import get_sample_data
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from vitrail import ViT, files, preset
from vitrail.model.embed import sincos_positions

FIGURES = Path(__file__).parent / "figures"
DPI = 200  # 9 inches become 1800 pixels: sharp at the 900 of a README
QUALITY = 70  # of JPEGs

INK, FAINT = "#1f2430", "#8a93a3"
TINTS = {  # edge and face, after Okabe and Ito: apart for every kind of colour vision
    "norm": ("#8a6d00", "#fbf0c9"),
    "attention": ("#0072b2", "#d7eaf7"),
    "mlp": ("#b35900", "#fde3c8"),
    "head": ("#00795a", "#d2eee4"),
}
STAYS = "#8a4b7a"  # the residual path
LEVEL = 0.9  # height of the line along which tokens go through a block, in inches
SIGNED, AMOUNT = "RdBu_r", "cividis"

# The worked example of the chapter: three tokens, four numbers each.
QUERIES = [[0.0, 2.0, 0.0, 1.0], [2.0, 0.0, 1.0, 0.0], [1.0, 0.0, 2.0, 0.0]]
KEYS = [[0.0, 1.0, 0.0, 1.0], [2.0, 0.0, 1.0, 0.0], [2.0, 0.0, 0.0, 1.0]]
VALUES = [[0.0, 0.0, 0.0, 4.0], [4.0, 2.0, 0.0, 0.0], [4.0, 0.0, 2.0, 0.0]]
TOKENS = ("sky", "left", "right")

JACKET = (11, 3)  # row and column of a patch on the dark jacket


def photo() -> Image.Image:
    """Grace Hopper in uniform, from matplotlib's samples (U.S. Navy, public domain)."""
    with get_sample_data("grace_hopper.jpg") as file:
        return Image.open(file).crop((0, 10, 512, 522)).resize((224, 224), Image.Resampling.BICUBIC)


def pixels(image: Image.Image) -> Tensor:
    """Numbers from -1 to 1, as these weights want them."""
    return torch.tensor(np.asarray(image)).permute(2, 0, 1)[None] / 127.5 - 1


def build(weights: Path | None) -> tuple[ViT, list[str]]:
    """A Ti/16 and the names of its classes: trained if weights are given, else as it starts."""
    torch.manual_seed(0)
    model = ViT(preset("Ti/16")).eval()
    if weights is None:
        return model, [f"class {number}" for number in range(1000)]
    model.load_state_dict(load_file(weights / "model.safetensors"))
    names = json.loads((weights / "config.json").read_text())["label_names"]
    return model, [name.replace("_", " ") for name in names]


def sizes(x: Tensor) -> str:
    """The shape of what one image became."""
    return " × ".join(str(n) for n in x.shape[1:])


class Sheet:
    """A white page measured in inches from its lower left corner."""

    def __init__(self, width: float, height: float):
        self.width, self.height = width, height
        self.figure = Figure((width, height), dpi=DPI, facecolor="white")
        self.page = self.panel(0, 0, width, height)
        self.page.set(xlim=(0, width), ylim=(0, height))

    def panel(self, x: float, y: float, width: float, height: float) -> Axes:
        place = (x / self.width, y / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(place)
        axes.axis("off")
        return axes

    def image(
        self, values: Any, x: float, y: float, width: float, height: float, **how: Any
    ) -> Axes:
        axes = self.panel(x, y, width, height)
        axes.imshow(np.asarray(values), aspect="auto", **{"interpolation": "nearest", **how})
        return axes

    def write(self, x: float, y: float, words: str, size: float = 8, **how: Any) -> None:
        style = {"ha": "center", "va": "center", "color": INK, "linespacing": 1.35, **how}
        self.page.text(x, y, words, fontsize=size, **style)

    def arrow(self, *points: tuple[float, float], color: str = INK) -> None:
        """A line through all points, with a head at the last one."""
        *line, start, end = points
        self.page.plot(*zip(*line, start, strict=True), color=color, lw=1.1, solid_capstyle="butt")
        style = {"arrowstyle": "-|>", "mutation_scale": 9, "lw": 1.1, "shrinkA": 0, "shrinkB": 0}
        self.page.add_patch(FancyArrowPatch(start, end, color=color, **style))

    def box(self, x: float, y: float, width: float, height: float, kind: str, words: str) -> None:
        edge, face = TINTS[kind]
        style = "round,pad=0,rounding_size=0.07"
        shape = FancyBboxPatch((x, y), width, height, style, ec=edge, fc=face, lw=1.1)
        self.page.add_patch(shape)
        level = y + (height / 2 if height < 0.5 else height - 0.17)
        self.write(x + width / 2, level, words, weight="bold", color=edge)

    def frame(self, x: float, y: float, width: float, height: float, title: str) -> None:
        style = "round,pad=0,rounding_size=0.1"
        shape = FancyBboxPatch((x, y), width, height, style, ec="#c5cbd5", fc="#f7f8fa", zorder=0)
        self.page.add_patch(shape)
        self.write(x + 0.15, y + height - 0.2, title, 10, weight="bold", ha="left")

    def strip(self, token: Tensor, x: float, y: float, width: float, spread: float) -> None:
        """One token as a row of colours: blue below zero, red above."""
        self.image(token[None], x, y, width, 0.165, cmap=SIGNED, vmin=-spread, vmax=spread)

    def table(self, values: Tensor, x: float, title: str, form: str, colors: str) -> None:
        """A matrix as coloured cells with its numbers."""
        rows, columns = values.shape
        width, top = columns * 0.5, 1.6 * values.max().item()
        self.write(x + width / 2, 3.62, title, 9, weight="bold", va="baseline")
        cells = self.image(values, x, 1.93, width, 1.35, cmap=colors, vmin=0, vmax=top)
        for row, column in itertools.product(range(rows), range(columns)):
            number = form.format(values[row, column])
            cells.text(column, row, number, ha="center", va="center", color=INK, fontsize=9)

    def branch(self, x: float, width: float, kind: str, title: str, words: str, stays: str) -> None:
        """A norm and what follows it, added to what was there before."""
        self.box(x, LEVEL - 0.2, 0.5, 0.4, "norm", "norm")
        self.arrow((x + 0.5, LEVEL), (x + 0.72, LEVEL))
        body, end = x + 0.72, x + 0.72 + width
        self.box(body, LEVEL - 0.6, width, 1.2, kind, title)
        self.write(body + width / 2, LEVEL - 0.45, words)
        self.arrow((end, LEVEL), (end + 0.2, LEVEL))
        self.plus(end + 0.32, LEVEL)
        start, top = (x - 0.12, LEVEL), (end + 0.32, LEVEL + 0.12)
        self.arrow(start, (x - 0.12, 1.8), (end + 0.32, 1.8), top, color=STAYS)
        self.write((x + end + 0.2) / 2, 1.92, stays, color=STAYS)

    def plus(self, x: float, y: float) -> None:
        self.page.add_patch(Circle((x, y), 0.12, ec=INK, fc="white", lw=1.1, zorder=3))
        self.write(x, y, "+", 11, zorder=4)


def enlarged(image: Image.Image, side: int) -> Image.Image:
    """The photo at the size in which it is drawn; 96 colours make the file a third lighter."""
    large = image.resize((side, side), Image.Resampling.LANCZOS)
    return large.quantize(96, kmeans=2).convert("RGB")


def apart(image: Image.Image, count: int, gap: int) -> np.ndarray:
    """The photo cut into count x count patches that lie apart on white."""
    side = image.width // count
    cut = np.asarray(image).reshape(count, side, count, side, 3)
    cut = np.pad(cut, ((0, 0), (0, gap), (0, 0), (0, gap), (0, 0)), constant_values=255)
    return cut.reshape(count * (side + gap), count * (side + gap), 3)[:-gap, :-gap]


def overview(model: ViT, names: Sequence[str]) -> Figure:
    """From the photo to the logits, with every shape on the way."""
    sheet = Sheet(9, 5.35)
    image = photo()
    x = pixels(image)
    _patches(sheet, model, image, x)
    _tokens(sheet, model, image, x)
    _block(sheet, model, x)
    _ending(sheet, model, x, names)
    return sheet.figure


def _patches(sheet: Sheet, model: ViT, image: Image.Image, x: Tensor) -> None:
    channels, patch = model.config.channels, model.config.patch
    whole, cut = enlarged(image, 360), apart(enlarged(image, 308), 14, gap=4)
    each = f"each {channels} × {patch} × {patch} = {channels * patch * patch}"
    for left, title, picture, below in (
        (0.15, "photo", whole, sizes(x)),
        (2.33, f"{model.config.patches} patches", cut, each),
    ):
        sheet.write(left + 0.9, 5.1, title, 10, weight="bold")
        sheet.image(picture, left, 3.05, 1.8, 1.8)
        sheet.write(left + 0.9, 2.87, below)
        sheet.arrow((left + 1.85, 3.95), (left + 2.13, 3.95))
    sheet.write(4.32, 4.08, "$E$", 9)


def _tokens(sheet: Sheet, model: ViT, image: Image.Image, x: Tensor) -> None:
    """Some tokens, number by number: what the patch says, where it lies, and their sum."""
    columns = {
        "projected, $xE$": torch.cat([model.cls_token, model.patch_embed(x)], dim=1),
        "positions, $E_{pos}$": model.pos_embed,
        "tokens, $z_0$": model.embed(x)[0],
    }
    spread = 2 * model.embed(x)[0].std().item()  # one scale, so that sums can be seen
    lines = [4.685 - 0.233 * line for line in range(8)]
    rows = dict(zip(lines, [0, 1, 2, None, 91, 92, None, 196], strict=True))
    for left, sign, (title, values) in zip((5.08, 6.42, 7.76), "+= ", columns.items(), strict=True):
        sheet.write(left + 0.56, 5.1, title, 9.5, weight="bold")
        sheet.write(left + 0.56, 2.87, sizes(values))
        for y, row in rows.items():
            if row is None:
                sheet.write(left + 0.56, y + 0.08, "⋮", 9, color=FAINT)
            else:
                sheet.strip(values[0, row], left, y, 1.12, spread)
                sheet.write(left + 1.23, y + 0.08, sign)
    for y, row in rows.items():
        if row == 0:
            sheet.write(5.0, y + 0.08, "[CLS]", weight="bold", ha="right")
        elif row is not None:
            sheet.image(patch_of(image, row - 1), 4.83, y, 0.165, 0.165)
            sheet.write(4.77, y + 0.08, str(row), ha="right")


def patch_of(image: Image.Image, number: int) -> Image.Image:
    row, column = divmod(number, 14)
    return image.crop((column * 16, row * 16, column * 16 + 16, row * 16 + 16))


def _block(sheet: Sheet, model: ViT, x: Tensor) -> None:
    """Equations 2 and 3 as a drawing; the first block's attention of one patch is inside."""
    config, z = model.config, model.embed(x)[0]
    sheet.arrow((8.32, 2.76), (8.32, 2.63), (0.3, 2.63), (0.3, LEVEL), (0.97, LEVEL))
    sheet.frame(0.6, 0.12, 5.68, 2.35, f"encoder block, × {config.depth}")
    stays = f"$z$ as it was, {sizes(z)}"
    heads = f"{config.heads} heads of {config.width // config.heads}"
    layers = f"{config.width} → {config.hidden} → {config.width}"
    sheet.branch(0.97, 1.5, "attention", "attention", heads, stays)
    sheet.branch(3.89, 1.14, "mlp", "MLP", layers, stays)
    sheet.arrow((3.63, LEVEL), (3.89, LEVEL))

    for head, values in enumerate(maps_of(model, z, block=0)):
        sheet.image(values, 1.74 + 0.485 * head, LEVEL - 0.28, 0.43, 0.43, cmap=AMOUNT)
    curve = sheet.panel(4.83, LEVEL - 0.28, 0.7, 0.46)
    t = torch.linspace(-3, 3, 100)
    curve.plot(t, F.gelu(t), color=TINTS["mlp"][0], lw=1.6)
    curve.plot([-3, 3], [0, 0], color=TINTS["mlp"][0], lw=0.5)
    sheet.write(5.02, LEVEL + 0.12, "GELU", color=TINTS["mlp"][0])


def maps_of(model: ViT, z: Tensor, block: int) -> Tensor:
    """Where the patch on the jacket looks, by head, when tokens `z` enter a block."""
    (rows, columns), layer = model.config.grid, model.blocks[block]
    asking = model.config.prefix + JACKET[0] * columns + JACKET[1]
    weights = layer.attn.weights(layer.norm1(z), rows=[asking])  # (1, heads, 1, N)
    return weights[0, :, 0, model.config.prefix :].unflatten(-1, (rows, columns))


def _ending(sheet: Sheet, model: ViT, x: Tensor, names: Sequence[str]) -> None:
    """Equation 4, the head, and the logits it finds largest."""
    y, logits = model.pool(model.encode(x)), model(x)
    sheet.arrow((6.15, LEVEL), (6.5, LEVEL), (6.5, 2.0), (6.66, 2.0))
    sheet.write(6.57, 1.45, "only\n[CLS]", weight="bold", ha="left")
    sheet.box(6.66, 1.8, 0.5, 0.4, "norm", "norm")
    sheet.arrow((7.16, 2.0), (7.37, 2.0))
    sheet.strip(y[0], 7.4, 1.92, 1.45, 2 * y.std().item())
    sheet.write(8.12, 2.23, f"the image, $y$: {sizes(y)}")
    sheet.arrow((8.12, 1.9), (8.12, 1.69))
    sheet.box(7.4, 1.36, 1.45, 0.33, "head", f"head: {sizes(y)} → {sizes(logits)}")
    sheet.arrow((8.12, 1.36), (8.12, 1.17))
    top = logits[0].topk(5)
    longest = top.values.max().item() or 1.0
    for line, (value, number) in enumerate(zip(*top, strict=True)):
        level = 1.03 - 0.175 * line
        color = TINTS["head"][0] if line == 0 else "#a8bfb8"
        bar = Rectangle((7.75, level - 0.055), 0.75 * value.item() / longest, 0.11, color=color)
        sheet.page.add_patch(bar)
        sheet.write(7.69, level, names[number], ha="right")
        sheet.write(8.85, level, f"{value:.1f}", ha="right")
    sheet.write(8.85, 0.13, f"the largest of {sizes(logits)} logits", ha="right")


def attention(model: ViT) -> Figure:
    """The worked example as matrices, and the same sum in real heads."""
    sheet = Sheet(9, 3.85)
    _worked_example(sheet)
    image, side = photo(), 1.15
    z = model.embed(pixels(image))[0]
    marked = sheet.image(enlarged(image, 230), 0.12, 0.1, side, side)
    patch = 230 / 14
    corner = (JACKET[1] * patch, JACKET[0] * patch)
    marked.add_patch(Rectangle(corner, patch, patch, ec="#ffd23f", fc="none", lw=1.6))
    sheet.write(0.12 + side / 2, 1.36, "this patch asks", weight="bold")
    for block, left in ((0, 1.5), (6, 5.28)):
        sheet.write(left + 1.78, 1.57, f"block {block + 1}", 9, weight="bold")
        for head, values in enumerate(maps_of(model, run(model, z, block), block)):
            x = left + head * (side + 0.06)
            sheet.image(values, x, 0.1, side, side, cmap=AMOUNT)
            sheet.write(x + side / 2, 1.36, f"head {head + 1}")
    return sheet.figure


def run(model: ViT, z: Tensor, blocks: int) -> Tensor:
    """The tokens after so many blocks."""
    for block in model.blocks[:blocks]:
        z = block(z)
    return z


def _worked_example(sheet: Sheet) -> None:
    q, k, v = (torch.tensor(rows) for rows in (QUERIES, KEYS, VALUES))
    scores = q @ k.mT
    scaled = scores / math.sqrt(q.shape[-1])
    weights = scaled.softmax(dim=-1)
    sheet.table(scores, 0.62, "products, $q k^T$", "{:.0f}", "Blues")
    sheet.table(scaled, 2.62, "divided by $\\sqrt{4}$", "{:.1f}", "Blues")
    sheet.table(weights, 4.77, "rows sum to 1", "{:.2f}", "Oranges")
    sheet.table(weights @ v, 6.9, "mixed values", "{:.1f}", "Greens")
    for y, name in zip((3.05, 2.6, 2.15), TOKENS, strict=True):
        sheet.write(0.54, y, name, ha="right", weight="bold")
    for left in (0.62, 2.62, 4.77):
        for column, name in enumerate(TOKENS):
            sheet.write(left + 0.25 + column * 0.5, 3.36, name, va="baseline")
    for left, sign in ((2.37, "÷ 2"), (4.45, "softmax"), (6.58, "times $v$")):
        sheet.arrow((left - 0.16, 2.6), (left + 0.16, 2.6))
        sheet.write(left, 2.7, sign, va="baseline")


def positions(model: ViT) -> Figure:
    """How alike one patch's position is to all others': fixed waves, and what training found."""
    config = model.config
    learned = model.pos_embed[0, config.class_tokens :]
    waves = sincos_positions(config.grid, config.width, learned)
    sheet = Sheet(9, 2.0)
    for left, title, table in ((0.1, "sine and cosine", waves), (4.6, "learned", learned)):
        sheet.write(left + 2.13, 1.85, title, 10, weight="bold")
        for number, (row, column) in enumerate(((3, 3), (6, 10), (11, 5))):
            here = table[row * config.grid[1] + column]
            alike = F.cosine_similarity(here, table, dim=-1).unflatten(0, config.grid)
            axes = sheet.image(alike, left + 1.44 * number, 0.28, 1.38, 1.38, cmap=AMOUNT)
            axes.plot(column, row, "s", ms=6.4, mec="white", mfc="none", mew=1.2)
            sheet.write(left + 1.44 * number + 0.69, 0.13, f"row {row + 1}, column {column + 1}")
    return sheet.figure


def curves() -> Figure:
    """GELU beside ReLU, and what dividing by sqrt(d) does to a softmax."""
    figure = Figure((9, 2.7), dpi=DPI, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.1)
    left, right = figure.subplots(1, 2)
    x = torch.linspace(-4, 4, 400)
    left.plot(x, F.relu(x), color=FAINT, lw=1.4, label="ReLU")
    left.plot(x, F.gelu(x), color=TINTS["mlp"][0], lw=2, label="GELU: $x\\,\\Phi(x)$")
    left.set_title("the bend inside the MLP", fontsize=10, weight="bold")

    torch.manual_seed(0)
    q, k = torch.randn(64), torch.randn(197, 64)
    for scale, color, label in (
        (8, TINTS["attention"][0], "divided by $\\sqrt{64}$"),
        (1, TINTS["mlp"][0], "not divided"),
    ):
        weights = (k @ q / scale).softmax(dim=0).sort(descending=True).values[:20]
        right.plot(range(1, 21), weights, "o-", color=color, ms=3.5, lw=1.4, label=label)
    right.set_title(
        "attention to the 20 likeliest of 197 random tokens", fontsize=10, weight="bold"
    )
    right.set(xticks=[1, 5, 10, 15, 20], xlabel="rank of the token", ylabel="weight")
    left.set(xlabel="$x$")
    for axes in (left, right):
        axes.xaxis.label.set_size(8.5)
        axes.yaxis.label.set_size(8.5)
        axes.legend(frameon=False, fontsize=8.5)
        axes.tick_params(labelsize=8, color=FAINT)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


@torch.no_grad()
def draw(folder: Path, weights: Path | None = None) -> list[Path]:
    """All figures as PNG files."""
    model, names = build(weights)
    figures = {
        "overview": overview(model, names),
        "attention": attention(model),
        "positions": positions(model),
        "curves": curves(),
    }
    return [save(figure, folder / f"{name}.png") for name, figure in figures.items()]


def save(figure: Figure, path: Path, colours: int | None = None) -> Path:
    """Writes .png, of so many colours if that is said, or .jpg."""
    drawn, packed = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn)
    image = Image.open(drawn).convert("RGB")  # nothing is transparent
    if path.suffix == ".jpg":  # photos: a third of the bytes
        image.save(packed, "jpeg", quality=QUALITY, optimize=True)
    else:
        image = image if colours is None else image.quantize(colours, dither=Image.Dither.NONE)
        image.save(packed, "png", optimize=True)
    files.write_file(path, packed.getvalue())
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, help="folder with a trained Ti/16, as timm has it")
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder for the PNG files")
    choice = parser.parse_args()
    for path in draw(choice.out, choice.weights):
        print(path)


if __name__ == "__main__":
    main()
