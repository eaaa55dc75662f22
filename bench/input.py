"""From files to batches: our loader against torch's with Pillow and the usual transforms.

    python -m bench.input [--workers 2] [--images 1536] [--photos FOLDER] [--json]

Photos of about 500 x 375 pixels become batches of 64 at 224 pixels: cropped at random, mirrored,
normalised. "first" decodes everything and starts its processes, "later" is any other epoch. "tiny"
is a set of 32-pixel images in memory, moved by up to 4 pixels and mirrored, in batches of 128.
"""

import io
import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bench.measure import compare, interleave
from vitrail.data.config import Augment, DataConfig, Preprocess
from vitrail.data.folder import Files, open_folder
from vitrail.data.loader import Loader
from vitrail.data.source import Item
from vitrail.files import write

PHOTOS = Path(__file__).resolve().parents[2] / "shared" / "data" / "imagenet-val-300"
VIEW = Preprocess(size=224, interpolation="bilinear", mean=(0.485, 0.456, 0.406), std=(0.229,))
TINY = Preprocess(size=32, mean=(0.49, 0.48, 0.45), std=(0.25,))
TINIES = 32 * 128  # images in the tiny set
WANTED = {"first": 1.3, "later": 3.0, "tiny": 20.0}

Task = Callable[[], object]


class Photos(Dataset[tuple[Tensor, int]]):
    """The usual way: each image alone, in Pillow, to a normalised tensor."""

    def __init__(self, paths: list[Path], labels: list[int]):
        self.paths, self.labels = paths, labels

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self.paths[index]) as file:
            image = file.convert("RGB")
        left, top, width, height = random_box(*image.size)
        box = (left, top, left + width, top + height)
        image = image.crop(box).resize((224, 224), Image.Resampling.BILINEAR)
        return to_tensor(mirrored(image), VIEW), self.labels[index]


class Tinies(Dataset[tuple[Tensor, int]]):
    """The usual way with images in memory: padded by 4 black pixels, cropped, mirrored."""

    def __init__(self, pixels: NDArray[np.uint8]):
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        padded = Image.new("RGB", (40, 40))
        padded.paste(Image.fromarray(self.pixels[index]), (4, 4))
        left, top = random.randrange(9), random.randrange(9)
        return to_tensor(mirrored(padded.crop((left, top, left + 32, top + 32))), TINY), 0


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """torchvision's: ten tries for a box of 8 % to all of the area, else the centre."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            return random.randint(0, width - wide), random.randint(0, height - tall), wide, tall
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def mirrored(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


def to_tensor(image: Image.Image, view: Preprocess) -> Tensor:
    """torchvision's two steps: to floats from 0 to 1, then the statistics."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
    mean, std = torch.tensor(view.mean), torch.tensor(view.std)
    return pixels.sub_(mean[:, None, None]).div_(std[:, None, None])


class Memory:
    """The images of the tiny set as our loader wants them."""

    name, path, classes = "tiny", None, ("one", "two")

    def __init__(self, pixels: NDArray[np.uint8]):
        self.pixels = pixels
        self.labels = self.sizes = self.dates = np.zeros(len(pixels), np.int64)
        self.splits = np.full(len(pixels), "train")
        self.ids = [str(number) for number in range(len(pixels))]
        self.ignored: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Item:
        return Item(self.pixels[index], 0, self.ids[index])


def epoch(batches: Iterator[object], steps: int) -> None:
    for _ in islice(batches, steps):
        pass


def photo_tasks(source: Files, workers: int) -> dict[str, dict[str, Task]]:
    config = DataConfig(augment=Augment(flip=0.5, scale=0.08), workers=workers, disk_gb=0)
    paths = [source.root / name for name in source.ids]
    steps = len(paths) // 64

    def new() -> Loader:
        return Loader(source, VIEW, config, batch=64, progress=False)

    def theirs_new() -> DataLoader[tuple[Tensor, int]]:
        data = Photos(paths, source.labels.tolist())
        return DataLoader(
            data,
            batch_size=64,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )

    ours, theirs = new().training(), theirs_new()
    return {
        "first": {
            "vitrail": lambda: epoch(new().training(), steps),
            "usual": lambda: epoch(iter(theirs_new()), steps),
        },
        "later": {
            "vitrail": lambda: epoch(ours, steps),
            "usual": lambda: epoch(iter(theirs), steps),
        },
    }


def tiny_tasks(images: int) -> dict[str, Task]:
    pixels = np.random.default_rng(0).integers(0, 256, (images, 32, 32, 3), dtype=np.uint8)
    config = DataConfig(augment=Augment(flip=0.5, shift=0.125))
    ours = Loader(Memory(pixels), TINY, config, progress=False).training()
    theirs = DataLoader(Tinies(pixels), batch_size=128, shuffle=True, drop_last=True)
    steps = images // 128
    return {
        "vitrail": lambda: epoch(ours, steps),
        "usual": lambda: epoch(iter(theirs), steps),
    }


def make_photos(folder: Path, count: int, photos: Path) -> Files:
    """JPEG files of 500 x 375 pixels and about 110 kB, as ImageNet has them.

    Enlarged real photos, or coloured clouds where there are none; noise gives them fine detail.
    """
    found = sorted(photos.glob("*.jpg")) if photos.is_dir() else []
    made: list[bytes] = []
    for number in range(count):
        if number < 300:  # more would only take longer to make
            made.append(photo(number, found))
        path = folder / f"class {number % 2}" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(made[number % len(made)])
    source = open_folder(folder, classes=None, split=False, progress=False)
    return replace(source, splits=np.full(len(source), "train"))


def photo(number: int, found: list[Path]) -> bytes:
    luck = np.random.default_rng(number)
    if found:
        image = Image.open(found[number % len(found)]).convert("RGB")
    else:
        image = Image.fromarray(luck.integers(0, 256, (47, 62, 3), dtype=np.uint8))
    pixels = np.asarray(image.resize((500, 375), Image.Resampling.BICUBIC))
    pixels = (pixels + luck.normal(0, 8, (375, 500, 1))).clip(0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=95)
    return stream.getvalue()


@dataclass(frozen=True, kw_only=True)
class Settings:
    workers: int = 2  # processes that read, ours and theirs
    images: int = 1536  # photos in the set
    rounds: int = 12  # of a case, at most
    seconds: float = 60  # for a case; it takes longer only if it has too few rounds by then
    photos: Path = PHOTOS  # folder of JPEG files to make the set of
    out: Path = Path(__file__).parent / "results" / "input.json"  # where the numbers go
    json: bool = False  # print them as JSON


def main(settings: Settings) -> None:
    """Our loader against torch's with Pillow and the usual transforms, in one run."""
    found = measure(settings)
    write(settings.out, json.dumps(found, indent=1) + "\n")
    if settings.json:
        print(json.dumps(found, indent=1))
        return
    for case, row in found.items():
        ours, usual = row["vitrail_images_per_s"], row["usual_images_per_s"]
        print(f"{case:<6} {ours:>6} against {usual:>5} images/s", end=": ")
        print(f"{row['ratio']:>5}x, wanted {row['wanted']}x; halves {row['halves']}")


def measure(settings: Settings) -> dict[str, dict[str, object]]:
    """For each case, images per second of both, and how many times faster we are."""
    found: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = make_photos(Path(folder), settings.images, settings.photos)
        cases = {**photo_tasks(source, settings.workers), "tiny": tiny_tasks(TINIES)}
        for case, tasks in cases.items():
            row = compare(interleave(tasks, settings.rounds, settings.seconds))["usual"]
            count = TINIES if case == "tiny" else settings.images // 64 * 64
            found[case] = {
                "usual_images_per_s": round(count / row.median),
                "vitrail_images_per_s": round(count / row.median * row.ratio),
                "ratio": round(row.ratio, 2),
                "halves": [round(half, 2) for half in row.halves],
                "wanted": WANTED[case],
            }
    return found


if __name__ == "__main__":
    main(tyro.cli(Settings))
