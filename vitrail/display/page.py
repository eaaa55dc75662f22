"""What all HTML pages share: one style, escaped names, and images embedded as data URIs."""

import base64
import hashlib
import io
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.display.text import printable

if TYPE_CHECKING:
    from jinja2 import Environment

THUMBNAIL_SIDE = 176  # pixels: twice the size on the page, for high-resolution screens
TINY = 64  # pixels: an image up to this size is embedded unchanged and enlarged without smoothing


@cache
def load_templates(folder: Path) -> "Environment":
    """The templates of a folder, which may include `look.css` and `head.html`.

    Every value is escaped. The filter `printable` also makes invisible characters visible: use it
    for names of files and classes.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["printable"] = lambda text: printable(str(text))
    return environment


def stretch_to_uint8(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Pixels of more than 8 bits for display: from the darkest to the brightest 1 % of them."""
    if pixels.dtype == np.uint8:
        return pixels
    shown = pixels[:, :, : 3 if pixels.shape[2] >= 3 else 1].astype(np.float32)
    low, high = np.percentile(shown, (1, 99))
    scaled = (shown - low) * np.float32(255 / max(high - low, 1e-12))
    stretched: NDArray[np.uint8] = scaled.clip(0, 255).round().astype(np.uint8)
    return stretched


def to_pil(pixels: NDArray[Any]) -> Image.Image:
    """Pixels (H, W, C) as a displayable image: the first three channels, or only the first."""
    pixels = stretch_to_uint8(pixels)
    if pixels.shape[2] < 3:
        return Image.fromarray(pixels[:, :, 0])
    return Image.fromarray(np.ascontiguousarray(pixels[:, :, :3]))


def make_thumbnail(pixels: NDArray[Any] | None, side: int = THUMBNAIL_SIDE) -> dict[str, Any]:
    """A small copy of an image (H, W, C) for a page; without an image if it could not be read."""
    if pixels is None:
        return {"image": None, "tiny": False}
    image = to_pil(pixels)
    if max(image.size) <= TINY:
        return {"image": data_uri(encode_image(image, "PNG"), "png"), "tiny": True}
    image.thumbnail((side, side), Image.Resampling.BICUBIC, reducing_gap=3.0)
    return {"image": data_uri(encode_image(image, "JPEG", quality=80), "jpeg"), "tiny": False}


def encode_image(image: Image.Image, format: str, **settings: int) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, optimize=True, **settings)
    return stream.getvalue()


def data_uri(content: bytes, format: str) -> str:
    return f"data:image/{format};base64,{base64.b64encode(content).decode('ascii')}"


def script_hash(script: str) -> str:
    """The hash by which the page's Content-Security-Policy allows this script and no other."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")


def pick_evenly(numbers: NDArray[np.int64], count: int) -> list[int]:
    """At most `count` of the numbers, evenly spaced."""
    positions = np.linspace(0, len(numbers) - 1, min(count, len(numbers))).round().astype(int)
    picked: list[int] = numbers[positions].tolist()
    return picked
