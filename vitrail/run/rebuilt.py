"""The same few validation images, as a masked autoencoder rebuilds them while it learns."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail import files
from vitrail.data.loader import Loader
from vitrail.display.page import encode_image
from vitrail.display.sheet import denormalise
from vitrail.evaluation.loop import eval_mode
from vitrail.pretraining.masked import MaskedAutoencoder

REBUILT = "rebuilt"  # folder in a run folder
IMAGES = 16
TRUE, HIDDEN = "true.png", "hidden.png"
GROWTH = 1.7  # least ratio of the steps of two strips that are both kept; the newest always is


def save_rebuilt(folder: Path, model: MaskedAutoencoder, loader: Loader, step: int) -> None:
    """Writes strips of images: as they are, with hidden patches, and as rebuilt in this step."""
    whole, preprocess = loader.as_single_process(), loader.preprocess
    images = next(whole.evaluation("val", batch=IMAGES, limit=IMAGES)).images
    with eval_mode(model):
        blanked, rebuilt = model.rebuild(images)
    strips = {TRUE: images, HIDDEN: blanked, f"step-{step:08d}.png": rebuilt}
    stretch, true = preprocess.pixels != "uint8", images.cpu()
    for name, strip in strips.items():  # all in the range of the true images
        pixels = denormalise(strip.cpu(), preprocess.mean, preprocess.std, stretch, like=true)
        files.write_file(folder / name, encode_image(join_strip(pixels), "PNG"))
    prune_strips(folder, step)


def join_strip(pixels: NDArray[np.uint8]) -> Image.Image:
    """Images (B, H, W, 3) side by side, with a transparent pixel between them."""
    opaque = np.concatenate([pixels, np.full_like(pixels[..., :1], 255)], axis=3)
    spaced = np.pad(opaque, ((0, 0), (0, 0), (0, 1), (0, 0)))
    return Image.fromarray(np.concatenate(list(spaced), axis=1)[:, :-1])


def prune_strips(folder: Path, step: int) -> None:
    """Removes strips so that those kept are spaced like powers; and those of later steps."""
    kept = 0.0
    for number, path in list_strips(folder):
        if number > step or (number < step and number < GROWTH * kept):
            path.unlink()
        else:
            kept = number


def list_strips(folder: Path) -> list[tuple[int, Path]]:
    """The steps of which there are rebuilt images, ascending, and their strips."""
    return sorted(
        (int(path.stem.removeprefix("step-")), path) for path in folder.glob("step-*.png")
    )
