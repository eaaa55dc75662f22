"""TIFF files of more than one page or more than four channels: all of them become channels."""

import io
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
from PIL import Image, TiffImagePlugin

from vitrail.data.pixels import Pixels, as_pixels
from vitrail.errors import UserError

MAX_PAGES = 1000
NEW_SUBFILE_TYPE, SAMPLES_PER_PIXEL = 254, 277  # tags
NOT_A_BAND = 0b101  # bits of NewSubfileType: a thumbnail, a transparency mask


def needs_tifffile(content: bytes) -> bool:
    """Whether Pillow cannot read the first page, or would drop some of its channels."""
    stream = io.BytesIO(content)
    is_big = content[2:3] == b"+" or content[3:4] == b"+"  # BigTIFF, with offsets of 8 bytes
    tags = TiffImagePlugin.ImageFileDirectory_v2(stream.read(16 if is_big else 8))
    stream.seek(tags.next)
    tags.load(stream)
    samples = tags.get(SAMPLES_PER_PIXEL, 1)
    if isinstance(samples, int) and samples > 4:
        return True
    try:
        TiffImagePlugin.TiffImageFile(io.BytesIO(content))
    except SyntaxError as error:  # what Pillow raises for a layout of pixels that it does not know
        return "unknown pixel mode" in str(error)
    return False


def iterate_pages(
    image: Image.Image, check_pixels: Callable[[int, int], None]
) -> Iterator[Image.Image]:
    """Yields each page that holds channels of the image; all must have the size of the first."""
    total, size = 0, image.size
    for number in count():
        try:
            image.seek(number)
        except EOFError:
            return
        if number and image.tag_v2.get(NEW_SUBFILE_TYPE, 0) & NOT_A_BAND:  # type: ignore[attr-defined]
            continue
        if number >= MAX_PAGES:
            raise UserError(f"more than {MAX_PAGES} pages; split it")
        if image.size != size:
            first, this = (f"{width} x {height}" for width, height in (size, image.size))
            raise UserError(
                f"page {number + 1} has {this} pixels, page 1 has {first}; pages are channels "
                f"and need one size: save them as separate files"
            )
        total += image.height
        check_pixels(image.width, total)  # of all pages together, before they are decoded
        yield image


def stack_pages(pages: list[Pixels]) -> Pixels:
    """The channels of all pages."""
    types = sorted({str(page.dtype) for page in pages})
    if len(types) > 1:
        raise UserError(f"pages of {' and '.join(types)}; save all of them with the same type")
    return pages[0] if len(pages) == 1 else np.concatenate(pages, axis=2)


def read_with_tifffile(content: bytes, check_shape: Callable[..., None]) -> Pixels:
    """Reads any number of channels, checking the declared size before anything is decoded."""
    with open_tifffile(content) as file:
        page = file.pages[0]
        shape, axes = page.shape, page.axes
        if len(file.pages) > 1:
            raise UserError(
                f"{len(file.pages)} pages of {page.samplesperpixel} channels each; "
                f"save it as one page"
            )
        if axes not in ("YX", "YXS", "SYX"):
            raise UserError(f"a TIFF with the axes {axes}; wanted height, width and channels")
        if axes == "SYX":
            shape = (*shape[1:], shape[0])
        check_shape(shape, page.dtype)
        values = page.asarray()
    if axes == "SYX":
        values = values.transpose(1, 2, 0)
    return as_pixels(values.reshape(shape))


def tifffile_size(content: bytes) -> tuple[int, int]:
    """Width and height of the first page."""
    with open_tifffile(content) as file:
        return file.pages[0].imagewidth, file.pages[0].imagelength


def open_tifffile(content: bytes) -> Any:
    try:
        import imagecodecs  # noqa: F401  (without it, tifffile decompresses without a limit)
        import tifffile
    except ImportError as error:
        raise UserError(
            "a TIFF whose pixels Pillow cannot read; install tifffile and imagecodecs: "
            "pip install 'vitrail[tiff]'"
        ) from error
    return tifffile.TiffFile(io.BytesIO(content))
