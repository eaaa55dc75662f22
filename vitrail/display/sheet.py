"""A contact sheet of a batch: the images that the model really receives, with labels."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

# In pixels: smallest side of an image, space between images, height of a label.
CELL, GAP, LINE = 112, 8, 16
FONT_SIZE = 11  # pixels
MIN_SHOWN = 0.005  # the probability of a mixed-in class below this would round to "0 %"


def draw_sheet(
    images: Tensor,  # (B, C, H, W), normalised
    targets: Tensor,  # (B,) classes, or (B, K) probabilities
    classes: Sequence[str],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    columns: int = 8,
    stretch: bool = False,
) -> bytes:
    """The images of a batch as one PNG, de-normalised, each above its label.

    Small images are enlarged without smoothing; images mixed by mixup or cutmix name both classes.
    `stretch` shows each image from its lowest to its highest value, for more than 8 bits.
    """
    pixels = denormalise(images.cpu(), mean, std, stretch)
    height, width = images.shape[-2:]
    scale = max(1, CELL // min(height, width))
    cell_width, cell_height = scale * width, scale * height
    columns = min(columns, len(pixels))
    rows = -(-len(pixels) // columns)
    size = columns * (cell_width + GAP) + GAP, rows * (cell_height + LINE + GAP) + GAP
    page = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(page), load_font()
    classes = [label_or_index(name, number, font) for number, name in enumerate(classes)]
    for number, image in enumerate(pixels):
        left = GAP + number % columns * (cell_width + GAP)
        top = GAP + number // columns * (cell_height + LINE + GAP)
        enlarged = Image.fromarray(image).resize(
            (cell_width, cell_height), Image.Resampling.NEAREST
        )
        page.paste(enlarged, (left, top))
        label = truncate_to_width(describe_target(targets[number], classes), font, cell_width)
        draw.text((left, top + cell_height + 1), label, "black", font)
    stream = io.BytesIO()
    page.save(stream, "PNG")
    return stream.getvalue()


def denormalise(
    images: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    stretch: bool = False,
    like: Tensor | None = None,
) -> np.ndarray:
    """Normalised floats (B, C, H, W) as uint8 (B, H, W, 3); grey unless there are 3 channels.

    `stretch` shows each image from its lowest to its highest value, or from those of `like`.
    """
    scale = torch.tensor(std)[:, None, None]
    shift = torch.tensor(mean)[:, None, None]
    values = images * scale + shift
    if stretch:
        shown = values if like is None else like * scale + shift
        low, high = shown.amin(dim=(1, 2, 3), keepdim=True), shown.amax(dim=(1, 2, 3), keepdim=True)
        values = (values - low) / (high - low).clamp(min=1e-12)
    pixels = (values * 255).round().clamp(0, 255).to(torch.uint8)
    colour = pixels if len(mean) == 3 else pixels[:, :1].expand(-1, 3, -1, -1)
    return colour.permute(0, 2, 3, 1).contiguous().numpy()


def describe_target(target: Tensor, classes: Sequence[str]) -> str:
    """A class, or "60 % cat, 40 % dog" where images were mixed."""
    if target.ndim == 0:
        return classes[int(target)]
    parts = [(float(p), classes[k]) for k, p in enumerate(target) if p > MIN_SHOWN]
    parts.sort(key=lambda part: -part[0])
    if len(parts) == 1:
        return parts[0][1]
    return ", ".join(f"{p:.0%} {name}".replace("%", " %") for p, name in parts)


def load_font() -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib and covers most alphabets."""
    import matplotlib

    file = Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")
    return ImageFont.truetype(file, FONT_SIZE)


def label_or_index(name: str, number: int, font: ImageFont.FreeTypeFont) -> str:
    """The name of a class, or "class 7" if the font lacks one of its characters."""
    fallback = bytes(font.getmask("\uffff"))  # what the font draws for unknown characters
    is_missing = any(bytes(font.getmask(char)) == fallback for char in set(name))
    return f"class {number}" if is_missing else name


def truncate_to_width(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """The text, cut so that it is at most `width` pixels wide."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
