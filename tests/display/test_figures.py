"""Figures from arrays: what is drawn, on paper and on pages."""

import io
import threading

import numpy as np
import pytest
from PIL import Image

from vitrail.display import figures
from vitrail.display.figures import Chart, Curve, Mark
from vitrail.evaluation.metrics import Bin

CHART = Chart(
    curves=[Curve(label="training", x=[1, 2], y=[0.2, 0.9]), Curve(label="", x=[], y=[])],
    x="step",
    y="right answers",
    percent=True,
    marks=[Mark(x=2, y=0.9)],
)
BINS = [Bin(confidence=0.5, accuracy=0.4, count=5), Bin(confidence=0.9, accuracy=1.0, count=9)]


def heat(classes):
    return np.diag(np.full(classes, 9)) + np.eye(classes, k=1, dtype=np.int64)


def test_a_png_is_on_white():
    image = Image.open(io.BytesIO(figures.to_png(figures.draw_curves(CHART))))
    assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255) and image.width > 800


def test_an_svg_takes_its_colours_from_the_page():
    svg = figures.to_svg(figures.draw_curves(CHART))
    assert svg.startswith("<svg") and "var(--blue)" in svg and "var(--soft)" in svg
    assert not [colour for colour in figures.PALETTE.values() if colour in svg]
    assert "<metadata" not in svg and "<style" not in svg


def test_labels_of_curves_do_not_overlap():
    curves = [Curve(label=name, x=[0, 1], y=[0, 1.0]) for name in "abc"]
    figure = figures.draw_curves(Chart(curves=curves, x="", y=""))
    heights = sorted(text.xy[1] for text in figure.axes[0].texts)
    assert min(np.diff(heights)) > 0.05 and heights[-1] <= figure.axes[0].get_ylim()[1]


def test_a_chart_without_curves_can_be_drawn():
    assert figures.to_png(figures.draw_curves(Chart(curves=[], x="step", y="loss")))


@pytest.mark.parametrize("classes", [2, 15, 30, 31])
def test_a_matrix_has_names_and_numbers_where_they_fit(classes):
    figure = figures.draw_confusion_matrix(heat(classes), [f"class {n}" for n in range(classes)])
    axes = figure.axes[0]
    assert len(axes.texts) == (2 * classes - 1 if classes <= figures.MAX_COUNTED_CLASSES else 0)
    named = [label.get_text() for label in axes.get_yticklabels()]
    assert ("class 1" in named) == (classes <= figures.MAX_NAMED_CLASSES)


def test_errors_of_many_classes_are_summed_not_lost():
    whole = figures.sum_blocks(heat(1001), figures.MAX_CELLS)
    assert len(whole) <= figures.MAX_CELLS and whole.sum() == heat(1001).sum()


def test_correct_is_blue_errors_are_ruby_and_empty_cells_are_transparent():
    colours = figures.colour_cells(np.array([[3, 1], [0, 4]]))
    assert colours[0, 0, 2] > colours[0, 0, 0] and colours[0, 1, 0] > colours[0, 1, 2]
    assert colours[1, 0, 3] == 0 and colours[1, 1, 3] == 1


def test_a_name_that_the_font_lacks_becomes_its_index():
    names = ["猫", "", "naïve", "x" * 50]
    labels = [figures.tick_label(name, number) for number, name in enumerate(names)]
    assert labels == ["0", "1", "naïve", "x" * (figures.MAX_LABEL - 1) + "…"]


def test_class_names_are_not_parsed_as_formulas():
    figure = figures.draw_confusion_matrix(heat(2), ["$\\frac{$", "$x$"])
    assert figures.to_png(figure) and figures.to_svg(figure)


def test_threads_draw_at_the_same_time():
    drawn = []
    threads = [
        threading.Thread(
            target=lambda: drawn.append(
                figures.to_png(figures.draw_reliability_diagram(BINS, BINS))
            )
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(drawn) == 3 and len(set(drawn)) == 1


def test_pyplot_is_never_loaded():
    import subprocess
    import sys

    code = "import sys, vitrail.display.figures; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
