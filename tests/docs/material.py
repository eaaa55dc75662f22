"""What the commands of a page find in their working directory.

Every page finds `photos/` (three classes of small pictures), a run trained on it and one picture.
A page that needs more has a function of its own in `PREPARE`.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

import vitrail

CLASSES = ("cat", "dog", "owl")
TINY = {
    "vit": {"width": 32, "depth": 1, "heads": 1},
    "train": {"batch": 16, "steps": 30},
    "data": {"workers": 0},
}


def make_photos(folder: Path, images: int = 30, side: int = 32) -> None:
    """Class folders of pictures, each class with a hue of its own."""
    rng = np.random.default_rng(0)
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for index in range(images):
            pixels = rng.integers(0, 120, (side, side, 3), dtype=np.uint8)
            pixels[..., number] += 120
            Image.fromarray(pixels).save(folder / name / f"{index}.png")


def make_common(folder: Path) -> None:
    make_photos(folder / "photos")
    Image.open(folder / "photos" / "cat" / "0.png").save(folder / "cat.jpg")
    vitrail.train("photos", out="runs/photos-1", settings=TINY, report=False)


def make_hub_dataset(folder: Path) -> None:
    """The files of a data set on the hub: photos with one label, and with a list of traits."""
    import pyarrow
    import pyarrow.parquet

    (folder / "remote").mkdir()
    photos = sorted((folder / "photos").rglob("*.png"))
    columns = {
        "image": [{"bytes": photo.read_bytes(), "path": photo.name} for photo in photos],
        "label": [photo.parent.name for photo in photos],
        "traits": [(["furry"], ["small"], ["furry", "small"])[n % 3] for n in range(len(photos))],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "remote" / "train.parquet")


# name of a page: what it needs besides
PREPARE: dict[str, Callable[[Path], None]] = {"your-data": make_hub_dataset}
HUB, HUB_DATASET = ("your-data",), "owner/pets"  # pages whose commands download from the hub
SERVED = ("serving",)  # pages whose commands talk to a server


@contextmanager
def run_server(folder: Path) -> Iterator[str]:
    """A server of the common run on any free port; its address."""
    command = [sys.executable, "-m", "vitrail", "serve", "runs/photos-1", "--port", "0", "--json"]
    command += ["--engine", "torch"]  # auto would export and measure first
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"].removeprefix("http://")
        finally:
            process.kill()
