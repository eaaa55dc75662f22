"""`vitrail demo`: a ViT trained on handwritten digits in about a minute, without network."""

from pathlib import Path
from typing import Annotated, Any

import tyro

from vitrail.cli.train import tell

SHADES = " .:-=+*#%@"


def demo(
    *,
    minutes: float = 1.0,
    seed: int = 0,
    out: Path | None = None,
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Train on handwritten digits and look at what was learned.

    Args:
        minutes: time until the results are there
        seed: of weights, order and augmentation
        out: run folder, by default runs/digits-1, -2, ...
        json: print the final numbers as one JSON document
    """
    from vitrail.cli.main import STARTED
    from vitrail.run import run

    done = run.train("digits", out=out, minutes=minutes, seed=seed, began=STARTED)
    tell(done.metrics, json)
    if not json:
        draw(done.folder)


def draw(folder: Path) -> None:
    """A few test digits, and what the model calls them."""
    from vitrail.data.open import open_data
    from vitrail.data.source import indices
    from vitrail.run.classifier import load

    source, classifier = open_data("digits"), load(folder)
    some = [source[index] for index in indices(source, "test")[:6].tolist()]
    found = classifier.predict([item.content for item in some])
    rows = [picture(item.content) for item in some]
    for lines in zip(*rows, strict=True):
        print("   ".join(lines))
    told = [f"{one.label} ({one.probability:.0%})" for one in found]
    print("   ".join(f"{words:<16}" for words in told))
    truth = [f"is a {classifier.classes[item.label]}" for item in some]
    print("   ".join(f"{words:<16}" for words in truth))


def picture(pixels: Any) -> list[str]:
    """An 8 x 8 digit in characters, two for each pixel."""
    levels = pixels[:, :, 0].astype(int) * (len(SHADES) - 1) // 255
    return ["".join(2 * SHADES[level] for level in row) for row in levels]
