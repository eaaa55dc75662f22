"""Draws photos above their explanations: `python -m book.gallery MODEL PHOTOS --out FILE`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

import vitrail
from book.faithfulness import EVERY, choose_photos
from book.figures import FIGURES, save_figure
from vitrail.display.text import format_percent, printable, truncate
from vitrail.insight.canvas import SOFT, Canvas
from vitrail.insight.explanation import Explanation
from vitrail.insight.methods import BEST, METHODS
from vitrail.insight.overlay import overlay_heatmap, to_rgb

COLUMNS = 5  # pairs of a photo and its explanation
EDGE, GAP = 0.1, 0.06  # inches
WIDTH = 9.0  # inches: 1800 pixels, sharp at the 900 of a README
TITLE, FOOT = 0.3, 0.3  # inches above a pair for the prediction, below it for the method


def draw_pairs(explanations: Sequence[Explanation]) -> Figure:
    """Each photo above its explanation, with the prediction, the method and its score."""
    side = (WIDTH - 2 * EDGE) / COLUMNS - GAP
    height = TITLE + 2 * side + GAP + FOOT
    canvas = Canvas(WIDTH, -(-len(explanations) // COLUMNS) * height + EDGE)
    for number, one in enumerate(explanations):
        x, y = EDGE + number % COLUMNS * (side + GAP), number // COLUMNS * height + TITLE
        canvas.add_text(x, y - 0.05, first_name(one.top[0][0]), 8.5, va="bottom", weight="bold")
        confidence = format_percent(one.top[0][1])
        canvas.add_text(x + side, y - 0.05, confidence, 8.5, va="bottom", ha="right", color=SOFT)
        canvas.add_image(to_rgb(one.pixels), x, y, side, side, interpolation="lanczos")
        canvas.add_image(overlay_heatmap(one.pixels, one.heatmap), x, y + side + GAP, side, side)
        score = f"{one.method}, score {one.scores[one.method]:.2f}"
        canvas.add_text(x, y + 2 * side + GAP + 0.05, score, 7.5, color=SOFT)
    return canvas.figure


def first_name(label: str) -> str:
    """The first of a class's names, which are separated by commas."""
    return truncate(printable(label.replace("_", " ").split(",")[0]), 18)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="any model that Vitrail loads")
    parser.add_argument("photos", type=Path, help="folder of photos")
    parser.add_argument("--every", type=int, default=EVERY, help="use every Nth photo", metavar="N")
    parser.add_argument("--without", nargs="*", default=(), help="file names of photos to exclude")
    parser.add_argument(
        "--method", choices=(BEST, *METHODS), default=BEST, help="best: the most faithful fast one"
    )
    parser.add_argument("--out", type=Path, default=FIGURES / "gallery.jpg", help=".jpg or .png")
    options = parser.parse_args(arguments)
    classifier = vitrail.load(options.model)
    paths = choose_photos(options.photos, options.every, options.without)
    explanations = [classifier.explain(path, method=options.method) for path in paths]
    print(save_figure(draw_pairs(explanations), options.out))


if __name__ == "__main__":
    main()
