"""Draws the figures of the first chapter: `python -m book.figures --weights FOLDER`."""

# ruff: noqa: RUF001 (shapes are written with the multiplication sign)

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
TINTS = {  # edge and face; colours of Okabe and Ito, distinct for every kind of colour vision
    "norm": ("#8a6d00", "#fbf0c9"),
    "attention": ("#0072b2", "#d7eaf7"),
    "mlp": ("#b35900", "#fde3c8"),
    "head": ("#00795a", "#d2eee4"),
}
RESIDUAL = "#8a4b7a"  # colour of the residual path
LEVEL = 0.9  # height of the horizontal line through a block, in inches
DIVERGING, SEQUENTIAL = "RdBu_r", "cividis"  # colour maps

# The worked example of the chapter: three tokens, four numbers each.
QUERIES = [[0.0, 2.0, 0.0, 1.0], [2.0, 0.0, 1.0, 0.0], [1.0, 0.0, 2.0, 0.0]]
KEYS = [[0.0, 1.0, 0.0, 1.0], [2.0, 0.0, 1.0, 0.0], [1.0, 0.0, 2.0, 0.0]]
VALUES = [[0.0, 0.0, 0.0, 4.0], [4.0, 2.0, 0.0, 0.0], [4.0, 0.0, 2.0, 0.0]]
TOKENS = ("sky", "left", "right")

JACKET = (11, 3)  # row and column of a patch on the dark jacket


def load_photo() -> Image.Image:
    """Grace Hopper in uniform, from matplotlib's samples (U.S. Navy, public domain)."""
    with get_sample_data("grace_hopper.jpg") as file:
        return Image.open(file).crop((0, 10, 512, 522)).resize((224, 224), Image.Resampling.BICUBIC)


def to_tensor(image: Image.Image) -> Tensor:
    """Pixels scaled to [-1, 1], as these weights expect."""
    return torch.tensor(np.asarray(image)).permute(2, 0, 1)[None] / 127.5 - 1


def build_model(weights: Path | None) -> tuple[ViT, list[str]]:
    """A Ti/16 and the names of its classes: trained if weights are given, else initialised."""
    torch.manual_seed(0)
    model = ViT(preset("Ti/16")).eval()
    if weights is None:
        return model, [f"class {number}" for number in range(1000)]
    model.load_state_dict(load_file(weights / "model.safetensors"))
    names = json.loads((weights / "config.json").read_text())["label_names"]
    return model, [name.replace("_", " ") for name in names]


def format_shape(x: Tensor) -> str:
    """The shape without the batch dimension."""
    return " × ".join(str(n) for n in x.shape[1:])


class Sheet:
    """A white figure with coordinates in inches from its lower left corner."""

    def __init__(self, width: float, height: float):
        self.width, self.height = width, height
        self.figure = Figure((width, height), dpi=DPI, facecolor="white")
        self.page = self.add_axes(0, 0, width, height)
        self.page.set(xlim=(0, width), ylim=(0, height))

    def add_axes(self, x: float, y: float, width: float, height: float) -> Axes:
        box = (x / self.width, y / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box)
        axes.axis("off")
        return axes

    def add_image(
        self, values: Any, x: float, y: float, width: float, height: float, **style: Any
    ) -> Axes:
        axes = self.add_axes(x, y, width, height)
        axes.imshow(np.asarray(values), aspect="auto", **{"interpolation": "nearest", **style})
        return axes

    def add_text(self, x: float, y: float, text: str, size: float = 8, **style: Any) -> None:
        style = {"ha": "center", "va": "center", "color": INK, "linespacing": 1.35, **style}
        self.page.text(x, y, text, fontsize=size, **style)

    def add_arrow(self, *points: tuple[float, float], color: str = INK) -> None:
        """A line through all points, with a head at the last one."""
        *line, start, end = points
        self.page.plot(*zip(*line, start, strict=True), color=color, lw=1.1, solid_capstyle="butt")
        style = {"arrowstyle": "-|>", "mutation_scale": 9, "lw": 1.1, "shrinkA": 0, "shrinkB": 0}
        self.page.add_patch(FancyArrowPatch(start, end, color=color, **style))

    def add_box(
        self, x: float, y: float, width: float, height: float, kind: str, text: str
    ) -> None:
        edge, face = TINTS[kind]
        style = "round,pad=0,rounding_size=0.07"
        shape = FancyBboxPatch((x, y), width, height, style, ec=edge, fc=face, lw=1.1)
        self.page.add_patch(shape)
        level = y + (height / 2 if height < 0.5 else height - 0.17)
        self.add_text(x + width / 2, level, text, weight="bold", color=edge)

    def add_frame(self, x: float, y: float, width: float, height: float, title: str) -> None:
        style = "round,pad=0,rounding_size=0.1"
        shape = FancyBboxPatch((x, y), width, height, style, ec="#c5cbd5", fc="#f7f8fa", zorder=0)
        self.page.add_patch(shape)
        self.add_text(x + 0.15, y + height - 0.2, title, 10, weight="bold", ha="left")

    def add_token(self, token: Tensor, x: float, y: float, width: float, limit: float) -> None:
        """One token as a row of colours: blue below zero, red above."""
        self.add_image(token[None], x, y, width, 0.165, cmap=DIVERGING, vmin=-limit, vmax=limit)

    def add_matrix(self, values: Tensor, x: float, title: str, form: str, colors: str) -> None:
        """A matrix as coloured cells with its numbers."""
        rows, columns = values.shape
        width, top = columns * 0.5, 1.6 * values.max().item()
        self.add_text(x + width / 2, 3.62, title, 9, weight="bold", va="baseline")
        cells = self.add_image(values, x, 1.93, width, 1.35, cmap=colors, vmin=0, vmax=top)
        for row, column in itertools.product(range(rows), range(columns)):
            number = form.format(values[row, column])
            cells.text(column, row, number, ha="center", va="center", color=INK, fontsize=9)

    def add_branch(
        self, x: float, width: float, kind: str, title: str, text: str, residual: str
    ) -> None:
        """A norm and a layer on a branch, added to the residual path."""
        self.add_box(x, LEVEL - 0.2, 0.5, 0.4, "norm", "norm")
        self.add_arrow((x + 0.5, LEVEL), (x + 0.72, LEVEL))
        body, end = x + 0.72, x + 0.72 + width
        self.add_box(body, LEVEL - 0.6, width, 1.2, kind, title)
        self.add_text(body + width / 2, LEVEL - 0.45, text)
        self.add_arrow((end, LEVEL), (end + 0.2, LEVEL))
        self.add_plus(end + 0.32, LEVEL)
        start, top = (x - 0.12, LEVEL), (end + 0.32, LEVEL + 0.12)
        self.add_arrow(start, (x - 0.12, 1.8), (end + 0.32, 1.8), top, color=RESIDUAL)
        self.add_text((x + end + 0.2) / 2, 1.92, residual, color=RESIDUAL)

    def add_plus(self, x: float, y: float) -> None:
        self.page.add_patch(Circle((x, y), 0.12, ec=INK, fc="white", lw=1.1, zorder=3))
        self.add_text(x, y, "+", 11, zorder=4)


def enlarge(image: Image.Image, side: int) -> Image.Image:
    """The photo at the size in which it is drawn; 96 colours make the file a third smaller."""
    large = image.resize((side, side), Image.Resampling.LANCZOS)
    return large.quantize(96, kmeans=2).convert("RGB")


def separate_patches(image: Image.Image, count: int, gap: int) -> np.ndarray:
    """The photo cut into count x count patches, with white gaps between them."""
    side = image.width // count
    cut = np.asarray(image).reshape(count, side, count, side, 3)
    cut = np.pad(cut, ((0, 0), (0, gap), (0, 0), (0, gap), (0, 0)), constant_values=255)
    return cut.reshape(count * (side + gap), count * (side + gap), 3)[:-gap, :-gap]


def draw_overview(model: ViT, names: Sequence[str]) -> Figure:
    """From the photo to the logits, with all shapes in between."""
    sheet = Sheet(9, 5.35)
    image = load_photo()
    x = to_tensor(image)
    _draw_patches(sheet, model, image, x)
    _draw_tokens(sheet, model, image, x)
    _draw_block(sheet, model, x)
    _draw_head(sheet, model, x, names)
    return sheet.figure


def _draw_patches(sheet: Sheet, model: ViT, image: Image.Image, x: Tensor) -> None:
    channels, patch = model.config.channels, model.config.patch
    whole, cut = enlarge(image, 360), separate_patches(enlarge(image, 308), 14, gap=4)
    each = f"each {channels} × {patch} × {patch} = {channels * patch * patch}"
    for left, title, picture, below in (
        (0.15, "photo", whole, format_shape(x)),
        (2.33, f"{model.config.patches} patches", cut, each),
    ):
        sheet.add_text(left + 0.9, 5.1, title, 10, weight="bold")
        sheet.add_image(picture, left, 3.05, 1.8, 1.8)
        sheet.add_text(left + 0.9, 2.87, below)
        sheet.add_arrow((left + 1.85, 3.95), (left + 2.13, 3.95))
    sheet.add_text(4.32, 4.08, "$E$", 9)


def _draw_tokens(sheet: Sheet, model: ViT, image: Image.Image, x: Tensor) -> None:
    """Some tokens: the projected patch, its position, and their sum."""
    columns = {
        "projected, $xE$": torch.cat([model.cls_token, model.patch_embed(x)], dim=1),
        "positions, $E_{pos}$": model.pos_embed,
        "tokens, $z_0$": model.embed(x)[0],
    }
    limit = 2 * model.embed(x)[0].std().item()  # one scale, so that sums can be seen
    lines = [4.685 - 0.233 * line for line in range(8)]
    rows = dict(zip(lines, [0, 1, 2, None, 91, 92, None, 196], strict=True))
    for left, sign, (title, values) in zip((5.08, 6.42, 7.76), "+= ", columns.items(), strict=True):
        sheet.add_text(left + 0.56, 5.1, title, 9.5, weight="bold")
        sheet.add_text(left + 0.56, 2.87, format_shape(values))
        for y, row in rows.items():
            if row is None:
                sheet.add_text(left + 0.56, y + 0.08, "⋮", 9, color=FAINT)
            else:
                sheet.add_token(values[0, row], left, y, 1.12, limit)
                sheet.add_text(left + 1.23, y + 0.08, sign)
    for y, row in rows.items():
        if row == 0:
            sheet.add_text(5.0, y + 0.08, "[CLS]", weight="bold", ha="right")
        elif row is not None:
            sheet.add_image(crop_patch(image, row - 1), 4.83, y, 0.165, 0.165)
            sheet.add_text(4.77, y + 0.08, str(row), ha="right")


def crop_patch(image: Image.Image, number: int) -> Image.Image:
    row, column = divmod(number, 14)
    return image.crop((column * 16, row * 16, column * 16 + 16, row * 16 + 16))


def _draw_block(sheet: Sheet, model: ViT, x: Tensor) -> None:
    """Equations 2 and 3, with the attention of one patch in the first block."""
    config, z = model.config, model.embed(x)[0]
    sheet.add_arrow((8.32, 2.76), (8.32, 2.63), (0.3, 2.63), (0.3, LEVEL), (0.97, LEVEL))
    sheet.add_frame(0.6, 0.12, 5.68, 2.35, f"encoder block, × {config.depth}")
    residual = f"residual, {format_shape(z)}"
    heads = f"{config.heads} heads of {config.width // config.heads}"
    layers = f"{config.width} → {config.hidden} → {config.width}"
    sheet.add_branch(0.97, 1.5, "attention", "attention", heads, residual)
    sheet.add_branch(3.89, 1.14, "mlp", "MLP", layers, residual)
    sheet.add_arrow((3.63, LEVEL), (3.89, LEVEL))

    for head, values in enumerate(attention_maps(model, z, block=0)):
        sheet.add_image(values, 1.74 + 0.485 * head, LEVEL - 0.28, 0.43, 0.43, cmap=SEQUENTIAL)
    curve = sheet.add_axes(4.83, LEVEL - 0.28, 0.7, 0.46)
    t = torch.linspace(-3, 3, 100)
    curve.plot(t, F.gelu(t), color=TINTS["mlp"][0], lw=1.6)
    curve.plot([-3, 3], [0, 0], color=TINTS["mlp"][0], lw=0.5)
    sheet.add_text(5.02, LEVEL + 0.12, "GELU", color=TINTS["mlp"][0])


def attention_maps(model: ViT, z: Tensor, block: int) -> Tensor:
    """The attention of the patch on the jacket in each head of a block with input `z`."""
    (rows, columns), layer = model.config.grid, model.blocks[block]
    query = model.config.prefix + JACKET[0] * columns + JACKET[1]
    weights = layer.attn.weights(layer.norm1(z), rows=[query])  # (1, heads, 1, N)
    return weights[0, :, 0, model.config.prefix :].unflatten(-1, (rows, columns))


def _draw_head(sheet: Sheet, model: ViT, x: Tensor, names: Sequence[str]) -> None:
    """Equation 4, the head, and the five largest logits."""
    y, logits = model.pool(model.encode(x)), model(x)
    sheet.add_arrow((6.15, LEVEL), (6.5, LEVEL), (6.5, 2.0), (6.66, 2.0))
    sheet.add_text(6.57, 1.45, "only\n[CLS]", weight="bold", ha="left")
    sheet.add_box(6.66, 1.8, 0.5, 0.4, "norm", "norm")
    sheet.add_arrow((7.16, 2.0), (7.37, 2.0))
    sheet.add_token(y[0], 7.4, 1.92, 1.45, 2 * y.std().item())
    sheet.add_text(8.12, 2.23, f"image vector, $y$: {format_shape(y)}")
    sheet.add_arrow((8.12, 1.9), (8.12, 1.69))
    sheet.add_box(
        7.4, 1.36, 1.45, 0.33, "head", f"head: {format_shape(y)} → {format_shape(logits)}"
    )
    sheet.add_arrow((8.12, 1.36), (8.12, 1.17))
    top = logits[0].topk(5)
    longest = top.values.max().item() or 1.0
    for line, (value, number) in enumerate(zip(*top, strict=True)):
        level = 1.03 - 0.175 * line
        color = TINTS["head"][0] if line == 0 else "#a8bfb8"
        bar = Rectangle((7.75, level - 0.055), 0.75 * value.item() / longest, 0.11, color=color)
        sheet.page.add_patch(bar)
        sheet.add_text(7.69, level, names[number], ha="right")
        sheet.add_text(8.85, level, f"{value:.1f}", ha="right")
    sheet.add_text(8.85, 0.13, f"the largest of {format_shape(logits)} logits", ha="right")


def draw_attention(model: ViT) -> Figure:
    """The worked example as matrices, and attention maps of real heads."""
    sheet = Sheet(9, 3.85)
    _draw_worked_example(sheet)
    image, side = load_photo(), 1.15
    z = model.embed(to_tensor(image))[0]
    marked = sheet.add_image(enlarge(image, 230), 0.12, 0.1, side, side)
    patch = 230 / 14
    corner = (JACKET[1] * patch, JACKET[0] * patch)
    marked.add_patch(Rectangle(corner, patch, patch, ec="#ffd23f", fc="none", lw=1.6))
    sheet.add_text(0.12 + side / 2, 1.36, "query patch", weight="bold")
    for block, left in ((0, 1.5), (6, 5.28)):
        sheet.add_text(left + 1.78, 1.57, f"block {block}", 9, weight="bold")
        for head, values in enumerate(attention_maps(model, run_blocks(model, z, block), block)):
            x = left + head * (side + 0.06)
            sheet.add_image(values, x, 0.1, side, side, cmap=SEQUENTIAL)
            sheet.add_text(x + side / 2, 1.36, f"head {head}")
    return sheet.figure


def run_blocks(model: ViT, z: Tensor, count: int) -> Tensor:
    """The tokens after the first `count` blocks."""
    for block in model.blocks[:count]:
        z = block(z)
    return z


def _draw_worked_example(sheet: Sheet) -> None:
    q, k, v = (torch.tensor(rows) for rows in (QUERIES, KEYS, VALUES))
    scores = q @ k.mT
    scaled = scores / math.sqrt(q.shape[-1])
    weights = scaled.softmax(dim=-1)
    sheet.add_matrix(scores, 0.62, "scores, $q k^T$", "{:.0f}", "Blues")
    sheet.add_matrix(scaled, 2.62, "divided by $\\sqrt{4}$", "{:.1f}", "Blues")
    sheet.add_matrix(weights, 4.77, "attention weights", "{:.2f}", "Oranges")
    sheet.add_matrix(weights @ v, 6.9, "output: weights times $v$", "{:.1f}", "Greens")
    for y, name in zip((3.05, 2.6, 2.15), TOKENS, strict=True):
        sheet.add_text(0.54, y, name, ha="right", weight="bold")
    for left in (0.62, 2.62, 4.77):
        for column, name in enumerate(TOKENS):
            sheet.add_text(left + 0.25 + column * 0.5, 3.36, name, va="baseline")
    for left, sign in ((2.37, "÷ 2"), (4.45, "softmax"), (6.58, "times $v$")):
        sheet.add_arrow((left - 0.16, 2.6), (left + 0.16, 2.6))
        sheet.add_text(left, 2.7, sign, va="baseline")


def draw_positions(model: ViT) -> Figure:
    """Cosine similarity of one patch's position to all others: sine-cosine and learned."""
    config = model.config
    learned = model.pos_embed[0, config.class_tokens :]
    sincos = sincos_positions(config.grid, config.width, learned)
    sheet = Sheet(9, 2.0)
    for left, title, table in ((0.1, "sine and cosine", sincos), (4.6, "learned", learned)):
        sheet.add_text(left + 2.13, 1.85, title, 10, weight="bold")
        for number, (row, column) in enumerate(((3, 3), (6, 10), (11, 5))):
            here = table[row * config.grid[1] + column]
            similarity = F.cosine_similarity(here, table, dim=-1).unflatten(0, config.grid)
            axes = sheet.add_image(
                similarity, left + 1.44 * number, 0.28, 1.38, 1.38, cmap=SEQUENTIAL
            )
            axes.plot(column, row, "s", ms=6.4, mec="white", mfc="none", mew=1.2)
            sheet.add_text(left + 1.44 * number + 0.69, 0.13, f"row {row}, column {column}")
    return sheet.figure


def draw_curves() -> Figure:
    """GELU and ReLU, and the effect of dividing by sqrt(d) on a softmax."""
    figure = Figure((9, 2.7), dpi=DPI, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.1)
    left, right = figure.subplots(1, 2)
    x = torch.linspace(-4, 4, 400)
    left.plot(x, F.relu(x), color=FAINT, lw=1.4, label="ReLU")
    left.plot(x, F.gelu(x), color=TINTS["mlp"][0], lw=2, label="GELU: $x\\,\\Phi(x)$")
    left.set_title("the activation function of the MLP", fontsize=10, weight="bold")

    torch.manual_seed(0)
    q, k = torch.randn(64), torch.randn(197, 64)
    for scale, color, label in (
        (8, TINTS["attention"][0], "divided by $\\sqrt{64}$"),
        (1, TINTS["mlp"][0], "not divided"),
    ):
        weights = (k @ q / scale).softmax(dim=0).sort(descending=True).values[:20]
        right.plot(range(1, 21), weights, "o-", color=color, ms=3.5, lw=1.4, label=label)
    right.set_title("the 20 largest of 197 attention weights", fontsize=10, weight="bold")
    right.set(xticks=[1, 5, 10, 15, 20], xlabel="rank of the token", ylabel="attention weight")
    left.set(xlabel="$x$")
    for axes in (left, right):
        axes.xaxis.label.set_size(8.5)
        axes.yaxis.label.set_size(8.5)
        axes.legend(frameon=False, fontsize=8.5)
        axes.tick_params(labelsize=8, color=FAINT)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


@torch.no_grad()
def draw_figures(folder: Path, weights: Path | None = None) -> list[Path]:
    """Writes all figures as PNG files."""
    model, names = build_model(weights)
    figures = {
        "overview": draw_overview(model, names),
        "attention": draw_attention(model),
        "positions": draw_positions(model),
        "curves": draw_curves(),
    }
    return [save_figure(figure, folder / f"{name}.png") for name, figure in figures.items()]


def save_figure(figure: Figure, path: Path, colours: int | None = None) -> Path:
    """Writes a .jpg, or a .png, with a palette if `colours` is given."""
    drawn, compressed = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn)
    image = Image.open(drawn).convert("RGB")  # without an alpha channel
    if path.suffix == ".jpg":  # photos: a third of the bytes
        image.save(compressed, "jpeg", quality=QUALITY, optimize=True)
    else:
        image = image if colours is None else image.quantize(colours, dither=Image.Dither.NONE)
        image.save(compressed, "png", optimize=True)
    files.write_file(path, compressed.getvalue())
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, help="folder with a trained Ti/16 in timm's layout")
    parser.add_argument("--out", type=Path, default=FIGURES, help="output folder")
    options = parser.parse_args()
    for path in draw_figures(options.out, options.weights):
        print(path)


if __name__ == "__main__":
    main()
