"""Explanations as one HTML page that needs no network: move over a patch, see where it looks."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from numpy.typing import NDArray
from PIL import Image

from vitrail import __version__
from vitrail.display.page import TINY, checksum, packed, templates, uri
from vitrail.display.text import printable
from vitrail.insight.draw import HEAT, LOOK, WORDS, colour, ends
from vitrail.insight.explain import CLASSLESS
from vitrail.insight.explanation import Explanation

FOLDER = Path(__file__).parent
IMAGES = 60  # on one page
ROOM = 48_000_000  # bytes of maps on one page, shared by its images
STILL = 1210  # pixels across the picture for browsers without scripts


def page(explanations: Sequence[Explanation], title: str = "What it looks at") -> str:
    """The whole page, the first image in front."""
    script = (FOLDER / "page.js").read_text()
    template = templates(FOLDER).get_template("page.html")
    return template.render(
        version=__version__,
        title=title,
        script=script,
        checksum=checksum(script),
        stills=[still(one) for one in explanations],
        data={
            "colours": {"look": palette(LOOK), "heat": palette(HEAT)},
            "images": [plain(one) for one in explanations],
        },
    )


def plain(one: Explanation) -> dict[str, Any]:
    """What the script draws from, as JSON has it."""
    looks = one.looks
    return {
        "name": printable(one.name),
        "image": picture(one.pixels),
        "tiny": max(one.pixels.shape[:2]) <= TINY,
        "size": one.pixels.shape[:2],
        "top": [[printable(label), probability] for label, probability in one.top],
        "target": printable(one.target),
        "probability": one.probability,
        "asked": one.asked,
        "reader": one.reader,
        "front": front(one),
        "method": one.method,
        "grid": one.grid,
        "heats": [heat(one, method, score) for method, score in one.scores.items()],
        "layers": sorted({layer for layer, _ in looks.maps if layer >= 0}),
        "heads": list(one.heads),
        "note": note(one),
        "cells": looks.cells,
        "gathered": looks.gathered,
        "maps": looks.maps,
        "shares": text(looks.shares),
        "most": text(looks.most.astype("<f4")),
        "prefix": text(looks.front.astype("<f4")),
    }


def heat(one: Explanation, method: str, score: float) -> dict[str, Any]:
    values = one.heats[method]
    (low, high), whole = ends(values), max(float(values.sum()), 1e-30)
    scaled = ((values - low) / max(high - low, 1e-30)).clip(0, 1) * 255
    return {
        "method": method,
        "words": WORDS[method],
        "classless": method in CLASSLESS,
        "score": round(score, 3),
        "ends": [low / whole, high / whole],
        "more": bool(values.max() > high),
        "values": text((values / whole).astype("<f4")),
        "shares": text(np.rint(scaled).astype(np.uint8)),
    }


def front(one: Explanation) -> str:
    """What the tokens in front of the patches are called together."""
    count = one.attention.shape[-1] - one.grid[0] * one.grid[1]
    if count == 1 and one.reader == "[CLS]":
        return "[CLS]"
    return "tokens without a place" if count else ""


def note(one: Explanation) -> str:
    """What was left out to keep the page small."""
    looks, told = one.looks, []
    layers = [layer for layer, head in looks.maps if layer >= 0 and head < 0]
    whole = {layer for layer, head in looks.maps if head >= 0}
    if looks.gathered > 1:
        told.append(f"a square is {looks.gathered} x {looks.gathered} patches")
    if len(layers) < looks.wanted:
        told.append(f"{len(layers)} of {looks.wanted} layers are here")
    if not whole:
        told.append("heads are here by their mean only")
    elif len(whole) < len(layers):
        told.append(f"{len(whole)} of {len(layers)} layers have every head, the others their mean")
    return "To keep this page small, " + ", ".join(told) + "." if told else ""


def text(array: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def palette(name: str) -> str:
    """The 256 colours of a map, as red, green and blue bytes."""
    return text(colormaps[name](np.arange(256), bytes=True)[:, :3])


def picture(pixels: NDArray[np.uint8]) -> str:
    """As the model saw it: small ones exactly, photographs as JPEG."""
    image = Image.fromarray(colour(pixels))
    if max(image.size) <= TINY:
        return uri(packed(image, "PNG"), "png")
    return uri(packed(image, "JPEG", quality=90), "jpeg")


def still(one: Explanation) -> dict[str, str]:
    """The overview, for browsers without scripts."""
    image = Image.open(io.BytesIO(one.overview)).convert("RGB")
    image.thumbnail((STILL, 10 * STILL))
    return {"name": one.name, "image": uri(packed(image, "JPEG", quality=82), "jpeg")}


def framed(one: Explanation) -> str:
    """The page in a frame of its own, for notebooks: it can neither see nor change what is around.

    The frame may run the page's one script, and nothing else.
    """
    content = html.escape(page([one]))
    style = "width:100%;height:760px;border:0;border-radius:12px"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{content}"></iframe>'
