"""Draws the figures of "Learning without labels" from book/results.

python -m book.unlabelled_figures
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from book.attention_figures import WIDTH, style_axes
from book.figures import FIGURES, save_figure
from book.learning_figures import COLOURS, label, read
from book.unlabelled import FEW, REBUILT
from vitrail.insight.canvas import Canvas

START = "random weights"
PALETTE = {
    START: "#9aa0ad",
    **dict(zip(("masked, 75%", "views", "agreement alone"), COLOURS[:3], strict=True)),
}
METHODS = tuple(PALETTE)


def probe_table() -> list[str]:
    """Frozen features: their rank, k-NN, and linear probes on 1, 10 and 100 % of the labels."""
    lines = [f"{'':16} rank  k-NN   linear: 1%    10%   100%"]
    results = read("unlabelled")
    for name in METHODS:
        result = results[name]
        linear = " ".join(f"{accuracy:6.1%}" for accuracy in result["linear"])
        lines.append(f"{name:16} {result['rank']:4.0f} {result['knn']:5.1%}      {linear}")
    return lines


def mask_table() -> list[str]:
    """Loss and linear probe (all labels) for each fraction of hidden patches."""
    results = read("unlabelled")
    runs = [(run["settings"]["mask"], run) for name, run in results.items() if "masked" in name]
    return [
        f"{mask:.0%} hidden: loss {run['curves']['loss'][-1]:.2f}, probe {run['linear'][2]:.1%}"
        for mask, run in sorted(runs, key=lambda pair: pair[0])
    ]


def tuned_table() -> list[str]:
    """Held-out accuracy after fine-tuning on few labels."""
    rows = tuned_accuracies(read("unlabelled"), read("data"))
    lines = [f"{'labels':16}" + "".join(f"{size:8}" for size in FEW)]
    return lines + [
        f"{name:16}" + "".join(f"{accuracy:8.1%}" for accuracy in row) for name, row in rows.items()
    ]


def tuned_accuracies(
    results: Mapping[str, Any], hunger: Mapping[str, Any]
) -> dict[str, Sequence[float]]:
    """From random weights as in "data hunger", and from each pretraining."""
    start = [hunger[f"vit, {size}"]["runs"][0]["accuracy"][-1] for size in FEW]
    pretrained = {
        name: [result["tuned"][str(size)] for size in FEW]
        for name, result in results.items()
        if result["tuned"]
    }
    return {START: start, **pretrained}


def draw_unlabelled(results: Mapping[str, Any], hunger: Mapping[str, Any]) -> Figure:
    """Rank during the pretraining, probes after it, and accuracy after fine-tuning."""
    canvas = Canvas(WIDTH, 2.75)
    places = (canvas.add_axes(0.5 + 2.95 * number, 0.35, 2.4, 1.9) for number in range(3))
    draw_ranks(style_axes(next(places), "effective rank"), results)
    draw_probes(style_axes(next(places), "frozen features: accuracy, %"), results)
    rows = tuned_accuracies(results, hunger)
    draw_tuned(style_axes(next(places), "fine-tuned: accuracy, %"), rows)
    return canvas.figure


def draw_ranks(axes: Axes, results: Mapping[str, Any]) -> None:
    for name in METHODS[1:]:
        curves = results[name]["curves"]
        steps, ranks = [0, *curves["step"]], [results[START]["rank"], *curves["rank"]]
        axes.plot(steps, ranks, color=PALETTE[name], lw=1.5, label=name)
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False, fontsize=7, loc="lower right")
    label(axes, "step", "")


def draw_probes(axes: Axes, results: Mapping[str, Any]) -> None:
    for number, name in enumerate(METHODS):
        heights = [100 * value for value in (results[name]["knn"], *results[name]["linear"][1:])]
        places = [place + 0.2 * (number - 1.5) for place in range(3)]
        axes.bar(places, heights, width=0.18, color=PALETTE[name], label=name)
    axes.set(ylim=(0, 100), xticks=range(3))
    axes.set_xticklabels(["k-NN", "linear, 10%", "linear, 100%"])
    axes.legend(frameon=False, fontsize=7, loc="upper left")


def draw_tuned(axes: Axes, rows: Mapping[str, Sequence[float]]) -> None:
    for name, row in rows.items():
        percent = [100 * accuracy for accuracy in row]
        axes.plot(FEW, percent, "o-", color=PALETTE[name], lw=1.5, ms=4, label=name)
    axes.set(xscale="log", ylim=(0, 100), xticks=FEW)
    axes.set_xticks([], minor=True)
    axes.set_xticklabels([str(size) for size in FEW])
    axes.legend(frameon=False, fontsize=7, loc="lower right")
    label(axes, "labelled images", "")


def draw_rebuilt(folder: Path) -> Figure:
    """Masked images, their reconstructions at several steps, and the originals."""
    steps = sorted(folder.glob("step-*.png"))
    rows = {"visible": folder / "hidden.png"}
    rows |= {f"step {int(path.stem.removeprefix('step-')):,}": path for path in steps}
    rows |= {"original": folder / "true.png"}
    strips = {name: load_strip(path) for name, path in rows.items()}
    height, width = next(iter(strips.values())).shape[:2]
    left = 0.75
    tall = (WIDTH - left - 0.1) * height / width
    canvas = Canvas(WIDTH, len(rows) * (tall + 0.05) + 0.15)
    for number, (name, strip) in enumerate(strips.items()):
        y = 0.1 + number * (tall + 0.05)
        canvas.add_text(left - 0.08, y + tall / 2, name, 8, ha="right", va="center")
        canvas.add_image(strip, left, y, WIDTH - left - 0.1, tall)
    return canvas.figure


def load_strip(path: Path) -> np.ndarray:
    """A strip of images, on white."""
    with Image.open(path) as image:
        strip = image.convert("RGBA")
    white = Image.new("RGBA", strip.size, "white")
    return np.asarray(Image.alpha_composite(white, strip).convert("RGB"))


def draw_figures(folder: Path) -> list[Path]:
    figures = {
        "unlabelled.png": draw_unlabelled(read("unlabelled"), read("data")),
        "rebuilt.png": draw_rebuilt(REBUILT),
    }
    return [save_figure(figure, folder / name, 256) for name, figure in figures.items()]


def main() -> None:
    for path in draw_figures(FIGURES):
        print(path)


if __name__ == "__main__":
    main()
