"""`vitrail demo`: trains a small ViT on handwritten digits, without network."""

from typing import TYPE_CHECKING, Annotated, Any

import tyro

import vitrail
from vitrail.cli.flags import OptionalPath, Switch
from vitrail.cli.train import print_results

if TYPE_CHECKING:
    from vitrail.inference.classifier import Classifier

SHADES = " .:-=+*#%@"  # from black to white
DIGITS_SHOWN = 6


def demo(
    *,
    minutes: Annotated[float, tyro.conf.arg(metavar="FLOAT")] = 1.0,
    seed: Annotated[int, tyro.conf.arg(metavar="INT")] = 0,
    out: OptionalPath = None,
    json: Switch = False,
) -> None:
    """Train a small ViT on handwritten digits.

    Needs no network, and about a minute on two CPU cores.

    Args:
        minutes: total time, including evaluation and report
        seed: random seed of initialisation, data order and augmentation
        out: run folder (default: runs/digits-1, runs/digits-2, ...)
        json: print the results as one JSON document
    """
    from vitrail.cli.main import STARTED

    run = vitrail.train("digits", out=out, minutes=minutes, seed=seed, started=STARTED)
    print_results(run.metrics, json)
    if not json:
        print_digits(run.classifier)


def print_digits(classifier: "Classifier") -> None:
    """A few test digits with their predicted and their true class."""
    from vitrail.data.source import split_indices

    source = vitrail.open_data("digits")
    items = [source[index] for index in split_indices(source, "test")[:DIGITS_SHOWN].tolist()]
    predictions = classifier.predict([item.content for item in items])
    drawings = [draw_digit(item.content) for item in items]
    for lines in zip(*drawings, strict=True):
        print("   ".join(lines))
    predicted = [f"{one.label} ({one.probability:.0%})" for one in predictions]
    truth = [f"true {classifier.classes[item.label]}" for item in items]
    for texts in (predicted, truth):
        print("   ".join(f"{text:<16}" for text in texts))


def draw_digit(pixels: Any) -> list[str]:
    """An 8 x 8 digit as lines of characters, two for each pixel."""
    levels = pixels[:, :, 0].astype(int) * (len(SHADES) - 1) // 255
    return ["".join(2 * SHADES[level] for level in row) for row in levels]
