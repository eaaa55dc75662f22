"""JPEG XL, which a plugin of Pillow decodes; its size is read here, before anything is decoded."""

import io
from collections.abc import Callable
from importlib import import_module
from typing import Any

from PIL import Image

from vitrail.errors import UserError

CODESTREAM, CONTAINER = b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n"  # how files start
PLUGIN, FORMAT = "pillow_jxl", "JXL"  # the module that registers the format, and its name
RATIOS = ((1, 1), (6, 5), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))  # width : height
SIZE_BITS = (9, 13, 18, 30)  # of a number, by the two bits in front of it


def find_plugin() -> Callable[[io.BytesIO], Image.Image] | None:
    """What decodes JPEG XL: the plugin that is registered with Pillow, or else installed."""
    if FORMAT not in Image.OPEN:
        try:
            import_module(PLUGIN)
        except ImportError:
            return None
    plugin: Any = Image.OPEN[FORMAT][0]
    return plugin  # type: ignore[no-any-return]


def open_jpeg_xl(stream: io.BytesIO) -> Image.Image:
    plugin = find_plugin()
    if plugin is None:
        raise UserError("JPEG XL needs a plugin of Pillow; pip install pillow-jxl-plugin")
    return plugin(stream)


def read_size(content: bytes) -> tuple[int, int]:
    """Width and height as the header declares them (ISO/IEC 18181-1, SizeHeader)."""
    start = find_codestream(content) + len(CODESTREAM)
    bits = int.from_bytes(content[start : start + 10], "little")

    def take(count: int) -> int:
        nonlocal bits
        value, bits = bits & ((1 << count) - 1), bits >> count
        return value

    def take_side() -> int:
        return 8 * (take(5) + 1) if small else take(SIZE_BITS[take(2)]) + 1

    small = take(1)
    height, ratio = take_side(), take(3)
    if not ratio:
        return take_side(), height
    across, down = RATIOS[ratio - 1]
    return height * across // down, height


def find_codestream(content: bytes) -> int:
    """Where the codestream starts: at once, or in a box of the container."""
    at = 0
    while content[at : at + 2] != CODESTREAM:
        size, kind = int.from_bytes(content[at : at + 4], "big"), content[at + 4 : at + 8]
        header = 8
        if size == 1:  # a longer size follows
            size, header = int.from_bytes(content[at + 8 : at + 16], "big"), 16
        if kind in (b"jxlc", b"jxlp"):
            return at + header + (4 if kind == b"jxlp" else 0)  # a part starts with its number
        if size < header or at + size >= len(content):
            raise UserError("a damaged JPEG XL: it has no codestream")
        at += size
    return at
