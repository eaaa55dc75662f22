"""A picture of batches: what the model really sees, with labels."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

CELL, GAP, LINE = 112, 8, 16  # pixels: the shortest side of an image, between images, of a label


def sheet(
    images: Tensor,  # (B, C, H, W), normalised
    targets: Tensor,  # (B,) classes, or (B, K) probabilities
    classes: Sequence[str],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    columns: int = 8,
) -> bytes:
    """The images of a batch as one PNG, de-normalised, each above its label.

    Small images are enlarged without smoothing; for mixup both classes are named.
    """
    pixels = denormalise(images.cpu(), mean, std)
    height, width = images.shape[-2:]
    times = max(1, CELL // min(height, width))
    wide, tall = times * width, times * height
    columns = min(columns, len(pixels))
    rows = -(-len(pixels) // columns)
    size = columns * (wide + GAP) + GAP, rows * (tall + LINE + GAP) + GAP
    page = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(page), lettering()
    classes = [drawable(name, number, font) for number, name in enumerate(classes)]
    for number, image in enumerate(pixels):
        left = GAP + number % columns * (wide + GAP)
        top = GAP + number // columns * (tall + LINE + GAP)
        page.paste(
            Image.fromarray(image).resize((wide, tall), Image.Resampling.NEAREST), (left, top)
        )
        label = name_of(targets[number], classes)
        draw.text((left, top + tall + 1), shortened(label, font, wide), "black", font)
    stream = io.BytesIO()
    page.save(stream, "PNG")
    return stream.getvalue()


def denormalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Normalised floats (B, C, H, W) as uint8 (B, H, W, 3); of other sensors the first channel."""
    scale = torch.tensor(std)[:, None, None]
    shift = torch.tensor(mean)[:, None, None]
    pixels = ((images * scale + shift) * 255).round().clamp(0, 255).to(torch.uint8)
    colour = pixels if len(mean) == 3 else pixels[:, :1].expand(-1, 3, -1, -1)
    return colour.permute(0, 2, 3, 1).contiguous().numpy()


def name_of(target: Tensor, classes: Sequence[str]) -> str:
    """A class, or "60 % cat, 40 % dog" where images were mixed."""
    if target.ndim == 0:
        return classes[int(target)]
    shares = [(float(share), classes[k]) for k, share in enumerate(target) if share > 0.005]
    shares.sort(key=lambda pair: -pair[0])
    if len(shares) == 1:
        return shares[0][1]
    return ", ".join(f"{share:.0%} {name}".replace("%", " %") for share, name in shares)


def lettering() -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib and knows most alphabets."""
    import matplotlib

    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"), 11)


def drawable(name: str, number: int, font: ImageFont.FreeTypeFont) -> str:
    """The name of a class; its number where the font lacks a letter of it."""
    empty = bytes(font.getmask("\uffff"))
    lacking = any(bytes(font.getmask(letter)) == empty for letter in set(name))
    return f"class {number}" if lacking else name


def shortened(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
