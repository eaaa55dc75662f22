"""Explanations as one interactive HTML page that needs no network."""

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
from vitrail.display.page import TINY, data_uri, encode_image, load_templates, script_hash
from vitrail.display.text import printable
from vitrail.insight.arrays import ExplanationArrays
from vitrail.insight.canvas import HEATMAP, MAGNITUDE
from vitrail.insight.methods import METHODS, SIMILARITY_SUMMARY
from vitrail.insight.overlay import colour_limits, to_rgb

FOLDER = Path(__file__).parent
MAX_IMAGES = 60  # on one page
MAX_BYTES_PER_PAGE = 48_000_000  # of quantized attention, shared by the images of a page
STILL_WIDTH = 1210  # pixels of the overview for browsers without JavaScript


def render_page(
    explanations: Sequence[ExplanationArrays], overviews: Sequence[bytes], title: str
) -> str:
    """The whole page; `overviews` are PNGs for browsers without JavaScript."""
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    template = load_templates(FOLDER).get_template("page.html")
    return template.render(
        version=__version__,
        title=title,
        script=script,
        script_hash=script_hash(script),
        stills=[
            {"name": one.name, "image": encode_still(overview)}
            for one, overview in zip(explanations, overviews, strict=True)
        ],
        data={
            "palettes": {
                "attention": encode_palette(MAGNITUDE),
                "heatmap": encode_palette(HEATMAP),
            },
            "images": [page_data(one) for one in explanations],
        },
    )


def embed_page(page: str) -> str:
    """The page in an iframe for notebooks; its sandbox allows scripts and nothing else."""
    style = "width:100%;height:760px;border:0;border-radius:12px"
    content = html.escape(page)
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{content}"></iframe>'


def page_data(one: ExplanationArrays) -> dict[str, Any]:
    """What the script needs of one explanation, for JSON."""
    packed = one.patch_attention
    return {
        "name": printable(one.name),
        "image": encode_pixels(one.pixels),
        "tiny": max(one.pixels.shape[:2]) <= TINY,
        "size": one.pixels.shape[:2],
        "top": [[printable(label), probability] for label, probability in one.top],
        "target": printable(one.target),
        "probability": one.probability,
        "targetGiven": one.target_given,
        "query": one.query,
        "prefixName": name_prefix(one),
        "method": one.method,
        "grid": one.grid,
        "heatmaps": [heatmap_data(one, method) for method in one.scores or one.heatmaps],
        "layers": sorted({layer for layer, _ in packed.maps if layer >= 0}),
        "heads": list(one.heads),
        "note": describe_omissions(one),
        "cellGrid": packed.grid,
        "maps": packed.maps,
        "levels": encode_array(packed.levels),
        "rowMax": encode_array(packed.row_max.astype("<f4")),
        "prefix": encode_array(packed.prefix.astype("<f4")),
    }


def heatmap_data(one: ExplanationArrays, method: str) -> dict[str, Any]:
    values = one.heatmaps[method]
    (low, high), total = colour_limits(values), max(float(values.sum()), 1e-30)
    levels = ((values - low) / max(high - low, 1e-30)).clip(0, 1) * 255
    return {
        "method": method,
        "summary": METHODS[method].summary if method in METHODS else SIMILARITY_SUMMARY,
        "classSpecific": method in METHODS and METHODS[method].class_specific,
        "score": round(one.scores[method], 3) if one.scores else None,
        "limits": [low / total, high / total],
        "exceeded": bool(values.max() > high),
        "fractions": encode_array((values / total).astype("<f4")),
        "levels": encode_array(np.rint(levels).astype(np.uint8)),
    }


def name_prefix(one: ExplanationArrays) -> str:
    """What the page calls the tokens in front of the patches."""
    count = one.attention.shape[-1] - one.grid[0] * one.grid[1]
    if count == 1 and one.query == "[CLS]":
        return "[CLS]"
    return "prefix tokens" if count else ""


def describe_omissions(one: ExplanationArrays) -> str:
    """Which maps the page omits to stay small."""
    packed, omissions = one.patch_attention, []
    layers = [layer for layer, head in packed.maps if layer >= 0 and head < 0]
    with_heads = {layer for layer, head in packed.maps if head >= 0}
    if packed.cell_side > 1:
        omissions.append(f"a cell covers {packed.cell_side} x {packed.cell_side} patches")
    if len(layers) < packed.requested_layers:
        omissions.append(f"{len(layers)} of {packed.requested_layers} layers are shown")
    if not with_heads:
        omissions.append("only the mean over heads is shown")
    elif len(with_heads) < len(layers):
        omissions.append(f"{len(with_heads)} of {len(layers)} layers show single heads")
    return "To keep this page small, " + ", ".join(omissions) + "." if omissions else ""


def encode_array(array: NDArray[Any]) -> str:
    """The bytes of an array in base64."""
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def encode_palette(cmap: str) -> str:
    """The 256 colours of a colormap as RGB bytes."""
    return encode_array(colormaps[cmap](np.arange(256), bytes=True)[:, :3])


def encode_pixels(pixels: NDArray[np.uint8]) -> str:
    """The image as a data URI: lossless if tiny, otherwise as JPEG."""
    image = Image.fromarray(to_rgb(pixels))
    if max(image.size) <= TINY:
        return data_uri(encode_image(image, "PNG"), "png")
    return data_uri(encode_image(image, "JPEG", quality=90), "jpeg")


def encode_still(overview: bytes) -> str:
    """An overview as a smaller JPEG."""
    image = Image.open(io.BytesIO(overview)).convert("RGB")
    image.thumbnail((STILL_WIDTH, 10 * STILL_WIDTH))
    return data_uri(encode_image(image, "JPEG", quality=82), "jpeg")
