"""Photos in pairs, as they are and explained: `python -m book.gallery MODEL PHOTOS --out FILE`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

import vitrail
from book.faithfulness import EVERY, some
from book.figures import FIGURES, save
from vitrail.display.text import format_percent, printable, truncate
from vitrail.insight.canvas import SOFT, Canvas
from vitrail.insight.explanation import Explanation
from vitrail.insight.overlay import overlay_heatmap, to_rgb

ACROSS, EDGE, GAP = 5, 0.1, 0.06  # pairs in a row, inches
WIDTH = 9.0  # inches: 1800 pixels, sharp at the 900 of a README
TITLE, FOOT = 0.3, 0.3  # inches above a pair for the answer, below it for the method


def gallery(shown: Sequence[Explanation]) -> Figure:
    """Each photo above the most faithful of its quick explanations."""
    side = (WIDTH - 2 * EDGE) / ACROSS - GAP
    tall = TITLE + 2 * side + GAP + FOOT
    canvas = Canvas(WIDTH, -(-len(shown) // ACROSS) * tall + EDGE)
    for number, one in enumerate(shown):
        x, y = EDGE + number % ACROSS * (side + GAP), number // ACROSS * tall + TITLE
        canvas.add_text(x, y - 0.05, name(one.top[0][0]), 8.5, va="bottom", weight="bold")
        answer = format_percent(one.top[0][1])
        canvas.add_text(x + side, y - 0.05, answer, 8.5, va="bottom", ha="right", color=SOFT)
        canvas.add_image(to_rgb(one.pixels), x, y, side, side, interpolation="lanczos")
        canvas.add_image(overlay_heatmap(one.pixels, one.heatmap), x, y + side + GAP, side, side)
        words = f"{one.method}, score {one.scores[one.method]:.2f}"
        canvas.add_text(x, y + 2 * side + GAP + 0.05, words, 7.5, color=SOFT)
    return canvas.figure


def name(label: str) -> str:
    """The first name of a class that has several."""
    return truncate(printable(label.replace("_", " ").split(",")[0]), 18)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="any model that vitrail loads")
    parser.add_argument("photos", type=Path, help="folder of photos")
    parser.add_argument("--every", type=int, default=EVERY, help="take each so-many-th photo")
    parser.add_argument("--without", nargs="*", default=(), help="names of photos to leave out")
    parser.add_argument("--out", type=Path, default=FIGURES / "gallery.jpg", help=".jpg or .png")
    choice = parser.parse_args(arguments)
    classifier = vitrail.load(choice.model)
    paths = some(choice.photos, choice.every, choice.without)
    print(save(gallery([classifier.explain(path) for path in paths]), choice.out))


if __name__ == "__main__":
    main()
