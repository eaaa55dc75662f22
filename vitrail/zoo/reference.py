"""Reference images: generated, the same on every machine, whose logits identify a model.

Free of torch, so that a server verifies an exported model without it.
"""

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitrail.data.config import Preprocess
from vitrail.data.pixels import Pixels

if TYPE_CHECKING:
    from torch import Tensor, nn

CELLS = 8  # of the coarse noise along each side
REFERENCE_IMAGES = 4  # stripes, a gradient, fine noise and coarse noise


def reference_images(settings: Preprocess) -> list[NDArray[np.uint8]]:
    """Images of the size to which preprocessing resizes, so that no interpolation takes part.

    Interpolation may differ by one grey level between processors. The noise comes from a hash and
    not from a random number generator, whose stream may change between versions.
    """
    height = math.floor(settings.height / settings.crop)
    width = math.floor(settings.width / settings.crop)
    shape = (height, width, settings.channels)
    y, x, channel = np.indices(shape)
    stripes = ((x + y * (channel + 1)) // 4 % 2) * 255
    gradient = (x * 255 // width + y * 255 // height * channel) % 256
    coarse = hash_noise((CELLS, CELLS, settings.channels), "coarse")
    coarse = coarse[y * CELLS // height, x * CELLS // width, channel]
    images = [stripes, gradient, hash_noise(shape, "fine"), coarse]
    return [image.astype(np.uint8) for image in images]


def to_pixels(settings: Preprocess, image: NDArray[np.uint8]) -> Pixels:
    """The image as pixels of the model: 16 bits and floats span two deviations from the mean."""
    if settings.pixels == "uint8":
        return image
    mean, std = np.array(settings.mean), np.array(settings.std)
    pixels: Pixels = (mean + std * (image / 255 * 4 - 2)).astype(np.float32)
    return pixels


def hash_noise(shape: tuple[int, int, int], name: str) -> NDArray[np.uint8]:
    """Uniform noise that depends only on the shape and the name."""
    content = hashlib.shake_256(name.encode()).digest(math.prod(shape))
    return np.frombuffer(content, np.uint8).reshape(shape)


def compute_reference(network: "nn.Module", settings: Preprocess) -> "Tensor":
    """The logits of the reference images in float32, on the CPU."""
    import torch

    from vitrail.data.preprocess import preprocess
    from vitrail.evaluation.loop import eval_mode

    images = [to_pixels(settings, image) for image in reference_images(settings)]
    x = torch.stack([preprocess(settings, image) for image in images])
    device = next(network.parameters()).device
    with eval_mode(network), torch.inference_mode():
        logits: Tensor = network(x.to(device))
    return logits.float().cpu()


def describe_reference(logits: "Tensor") -> dict[str, list[list[float]]]:
    """The entry `reference` of the metadata; seven digits are as many as float32 has."""
    return {"logits": [[float(f"{value:.7g}") for value in row] for row in logits.tolist()]}
