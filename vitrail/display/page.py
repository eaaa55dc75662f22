"""What all pages share: one look, escaped names, and pictures that lie in the page itself."""

import base64
import hashlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.display.text import printable

if TYPE_CHECKING:
    from jinja2 import Environment

SIDE = 176  # pixels of a thumbnail: twice what a page shows, for fine screens
TINY = 64  # pixels up to which a picture is kept as it is and drawn with hard edges


def templates(folder: Path) -> "Environment":
    """The templates of a folder, which may include `look.css` and `head.html`.

    Every value is escaped; names go through the filter `shown`, which also spells out what is
    invisible, and are one line then.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = lambda text: printable(str(text))
    return environment


def viewable(pixels: NDArray[np.uint8]) -> Image.Image:
    """What a person can see of (H, W, C): the first three channels, or one."""
    if pixels.shape[2] < 3:
        return Image.fromarray(pixels[:, :, 0])
    return Image.fromarray(np.ascontiguousarray(pixels[:, :, :3]))


def thumbnail(pixels: NDArray[np.uint8] | None, side: int = SIDE) -> dict[str, Any]:
    """A small copy of an image (H, W, C); empty for one that cannot be read any more."""
    if pixels is None:
        return {"image": None, "tiny": False}
    image = viewable(pixels)
    if max(image.size) <= TINY:
        return {"image": uri(packed(image, "PNG"), "png"), "tiny": True}
    image.thumbnail((side, side), Image.Resampling.BICUBIC, reducing_gap=3.0)
    return {"image": uri(packed(image, "JPEG", quality=80), "jpeg"), "tiny": False}


def packed(image: Image.Image, kind: str, **settings: int) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, optimize=True, **settings)
    return stream.getvalue()


def uri(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"


def checksum(script: str) -> str:
    """What a page's policy calls its one script: no other will run."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")


def evenly(numbers: NDArray[np.int64], most: int) -> list[int]:
    """At most so many of the numbers, evenly spread."""
    places = np.linspace(0, len(numbers) - 1, min(most, len(numbers))).round().astype(int)
    chosen: list[int] = numbers[places].tolist()
    return chosen
