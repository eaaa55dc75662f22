"""Draws the figures of "How it learns" from book/results: `python -m book.learning_figures`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from book.attention_figures import WIDTH, style_axes
from book.figures import FIGURES, save_figure
from book.learning import RESULTS, SIZES
from vitrail.insight.canvas import SIMILARITY, SOFT, Canvas
from vitrail.insight.overlay import tile_maps

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito
PANELS = {  # title of a plot: the experiments in it
    "optimizer, clipping, weight decay": (
        *("all tricks", "SGD", "Muon", "no clipping", "no weight decay"),
    ),
    "warm-up and learning rate": (
        *("all tricks", "no warm-up", "learning rate x 10", "x 10, no warm-up"),
    ),
    "what the model needs": ("all tricks", "no positions", "no augmentation", "no cosine decay"),
}
NAMES = {"all tricks": "all tricks (AdamW)"}


def read(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def mean_curve(runs: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    return np.mean([run[name] for run in runs], axis=0)


def table(name: str) -> list[str]:
    """One line for each experiment: the final accuracy and losses, mean over the seeds."""
    results = read(name)
    count = len(next(iter(results.values()))["runs"])
    lines = [f"{'':20} accuracy  loss  training loss   (seeds: {count})"]
    for title, result in results.items():
        accuracy, loss, train = (
            mean_curve(result["runs"], curve)[-1] for curve in ("accuracy", "loss", "train_loss")
        )
        lines.append(f"{title:20} {accuracy:8.1%} {loss:5.2f} {train:14.3f}")
    return lines


def label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=8, color=SOFT)
    axes.set_ylabel(y, fontsize=8, color=SOFT)


def draw_tricks(results: Mapping[str, Any]) -> Figure:
    """Accuracy on held-out digits, with one trick removed or changed at a time."""
    canvas = Canvas(WIDTH, 2.75)
    for number, (title, names) in enumerate(PANELS.items()):
        axes = style_axes(canvas.add_axes(0.5 + 2.95 * number, 0.35, 2.4, 1.9), title)
        for name, colour in zip(names, COLOURS[: len(names)], strict=True):
            runs = results[name]["runs"]
            axes.plot(
                runs[0]["step"],
                100 * mean_curve(runs, "accuracy"),
                color=colour,
                lw=1.5,
                label=NAMES.get(name, name),
            )
        axes.set(xlim=(0, None), ylim=(0, 100))
        axes.legend(frameon=False, fontsize=7, loc="lower right")
        label(axes, "step", "accuracy, %" if number == 0 else "")
    return canvas.figure


def draw_overfitting(results: Mapping[str, Any]) -> Figure:
    """Training and held-out loss, with and without augmentation."""
    canvas = Canvas(WIDTH, 2.75)
    for number, name in enumerate(("no augmentation", "all tricks")):
        title = "with augmentation" if name == "all tricks" else name
        axes = style_axes(canvas.add_axes(0.6 + 4.5 * number, 0.35, 3.75, 1.9), title)
        runs = results[name]["runs"]
        for curve, colour, text in (
            ("train_loss", COLOURS[0], "training batches"),
            ("loss", COLOURS[1], "held-out images"),
        ):
            axes.plot(runs[0]["step"], mean_curve(runs, curve), color=colour, lw=1.6, label=text)
        axes.set(xlim=(0, None), ylim=(0, 2.4))
        axes.legend(frameon=False, fontsize=8)
        label(axes, "step", "loss, nats")
    return canvas.figure


def draw_data_hunger(results: Mapping[str, Any]) -> Figure:
    """Accuracy over the number of training images, ViT against ConvNet."""
    canvas = Canvas(WIDTH, 2.75)
    axes = style_axes(canvas.add_axes(0.6, 0.35, 8.2, 1.9), "accuracy after 800 steps")
    for model, colour, text in (("vit", COLOURS[0], "ViT"), ("convnet", COLOURS[1], "ConvNet")):
        final = [
            100 * mean_curve(results[f"{model}, {size}"]["runs"], "accuracy")[-1] for size in SIZES
        ]
        axes.plot(SIZES, final, "o-", color=colour, lw=1.6, ms=5, label=text)
    axes.set(xscale="log", ylim=(0, 100), xticks=SIZES)
    axes.set_xticks([], minor=True)
    axes.set_xticklabels([f"{size:,}" for size in SIZES])
    axes.legend(frameon=False, fontsize=8.5, loc="lower right")
    label(axes, "training images", "held-out accuracy, %")
    return canvas.figure


def draw_positions_over_time(result: Mapping[str, Any]) -> Figure:
    """The similarity of all positions at several steps of one training."""
    snapshots, grid = result["snapshots"], result["grid"]
    gap = 0.08
    side = (WIDTH - 0.2 + gap) / len(snapshots) - gap
    canvas = Canvas(WIDTH, side + 0.4)
    for number, (step, snapshot) in enumerate(snapshots.items()):
        similarity = np.array(snapshot["similarity"]) / 100  # (P, P)
        off = similarity[~np.eye(len(similarity), dtype=bool)]
        low, high = np.quantile(off, (0.01, 0.99))
        shown = ((similarity - low) / (high - low)).clip(0, 1).reshape(grid, grid, grid, grid)
        x = 0.1 + number * (side + gap)
        canvas.add_text(x + side / 2, 0.25, f"step {int(step):,}", 9, ha="center", va="bottom")
        canvas.add_image(tile_maps(shown, SIMILARITY, 0.12), x, 0.3, side, side)
    return canvas.figure


def draw_figures(folder: Path) -> list[Path]:
    tricks = read("tricks")
    figures = {
        "tricks.png": draw_tricks(tricks),
        "overfitting.png": draw_overfitting(tricks),
        "data-hunger.png": draw_data_hunger(read("data")),
        "positions-over-time.png": draw_positions_over_time(read("positions")),
    }
    return [save_figure(figure, folder / name, 256) for name, figure in figures.items()]


def main() -> None:
    for path in draw_figures(FIGURES):
        print(path)


if __name__ == "__main__":
    main()
