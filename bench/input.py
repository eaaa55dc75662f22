"""From files to batches: our loader against torch's with Pillow, timm's, and torchvision's v2.

Photos of about 500 x 375 pixels become batches of 64 at 224 pixels: cropped at random, mirrored,
normalised. The first epoch decodes everything and starts its processes, a later one is any other.
The last case is a set of 32-pixel images in memory, moved by up to 4 pixels and mirrored, in
batches of 128. All read with the same number of processes.
"""

import io
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bench.alone import all_alone, turns
from bench.measure import Budget, Case, Task, Tick, measure
from bench.peers import mend_torchvision
from vitrail.data.config import Augment, DataConfig, Preprocess
from vitrail.data.loader import Loader
from vitrail.data.source import Item
from vitrail.data.sources.folder import Files, open_folder

PHOTOS = Path(__file__).resolve().parents[2] / "shared" / "data" / "imagenet-val-300"
VIEW = Preprocess(
    size=224, interpolation="bilinear", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
)
TINY = Preprocess(size=32, mean=(0.49, 0.48, 0.45), std=(0.25,))
IMAGES, TINIES = 640, 32 * 128  # in the set of photos, in the tiny one
WORKERS = 2  # processes that read, ours and theirs
FIRST, LATER, SMALL = "photos, first epoch", "photos, later epoch", "32 pixels"  # the cases
FEWEST = 4  # rounds: a whole epoch each

Start = Callable[[], Iterator[object]]  # begins an epoch, or goes on into the next one


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


class Changed(Dataset[tuple[Tensor, int]]):
    """Images in memory, each through torchvision's transforms."""

    def __init__(self, pixels: NDArray[np.uint8], transform: Callable[[Tensor], Tensor]):
        self.pixels = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.pixels[index]), 0


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


def ours(source: Files, workers: int, epochs: int | None = None) -> Start:
    config = DataConfig(augment=Augment(flip=0.5, scale=0.08), workers=workers, disk_gb=0)
    loader = Loader(source, VIEW, config, batch=64, progress=False)
    batches = loader.training(end=epochs and epochs * (len(source) // 64))
    return lambda: batches


def usual(source: Files, workers: int) -> Start:
    paths = [source.root / name for name in source.ids]
    return epochs_of(Photos(paths, source.labels.tolist()), 64, workers)


def timms(source: Files, workers: int) -> Start:
    """Its own loader: images stay bytes until the whole batch is normalised."""
    mend_torchvision()
    from timm.data import ImageDataset, create_loader

    loader = create_loader(
        ImageDataset(str(source.root)),
        input_size=224,
        batch_size=64,
        is_training=True,
        scale=(0.08, 1.0),
        hflip=0.5,
        color_jitter=None,
        interpolation="bilinear",
        mean=VIEW.mean,
        std=VIEW.std,
        num_workers=workers,
        persistent_workers=workers > 0,
        device=torch.device("cpu"),
    )
    return lambda: iter(loader)


def torchvisions(source: Files, workers: int) -> Start:
    """As its guide has it: from Pillow to bytes first, floats last."""
    mend_torchvision()
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    steps = [
        v2.PILToTensor(),
        v2.RandomResizedCrop(224, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(VIEW.mean, VIEW.std),
    ]
    return epochs_of(ImageFolder(str(source.root), v2.Compose(steps)), 64, workers)


def our_tinies(pixels: NDArray[np.uint8]) -> Start:
    config = DataConfig(augment=Augment(flip=0.5, shift=0.125))
    batches = Loader(Memory(pixels), TINY, config, progress=False).training()
    return lambda: batches


def usual_tinies(pixels: NDArray[np.uint8]) -> Start:
    return epochs_of(Tinies(pixels), 128, 0)


def torchvision_tinies(pixels: NDArray[np.uint8]) -> Start:
    mend_torchvision()
    from torchvision.transforms import v2

    steps = [
        v2.RandomCrop(32, padding=4),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(TINY.mean, TINY.std),
    ]
    return epochs_of(Changed(pixels, v2.Compose(steps)), 128, 0)


def epochs_of(data: Dataset[tuple[Tensor, int]], batch: int, workers: int) -> Start:
    loader = DataLoader(
        data,
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return lambda: iter(loader)


LOADERS: dict[str, Callable[[Files, int], Start]] = {
    "vitrail": ours,
    "torch + Pillow": usual,
    "timm": timms,
    "torchvision v2": torchvisions,
}
TINY_LOADERS: dict[str, Callable[[NDArray[np.uint8]], Start]] = {  # timm has none for arrays
    "vitrail": our_tinies,
    "torch + Pillow": usual_tinies,
    "torchvision v2": torchvision_tinies,
}


def run(budget: Budget, tick: Tick) -> dict[str, Any]:
    budget = replace(budget, fewest=FEWEST)
    with tempfile.TemporaryDirectory() as folder, all_alone("input", LOADERS) as processes:
        tick(0.0, f"making {IMAGES} photos")
        make_photos(Path(folder), IMAGES, PHOTOS)
        few = {name: process for name, process in processes.items() if name in TINY_LOADERS}
        cases = [
            Case(
                label=label,
                unit="images/s",
                measure=partial(turns, who, (label, images, WORKERS, folder)),
                images=images,
            )
            for label, who, images in (
                (FIRST, processes, IMAGES // 64 * 64),
                (LATER, processes, IMAGES // 64 * 64),
                (SMALL, few, TINIES),
            )
        ]
        return {"cases": measure(cases, budget, tick)}


def prepare(contender: str, label: str, images: int, workers: int, folder: str) -> Task:
    """An epoch of this case; the photos lie in the folder."""
    if label == SMALL:
        pixels = np.random.default_rng(0).integers(0, 256, (images, 32, 32, 3), dtype=np.uint8)
        return going_on(TINY_LOADERS[contender](pixels), images // 128)
    source, new = photos_in(Path(folder)), LOADERS[contender]
    if label == LATER:
        return going_on(new(source, workers), images // 64)
    if contender == "vitrail":
        new = partial(ours, epochs=1)  # like theirs, it reads nothing for what nobody asks for
    return lambda: epoch(new(source, workers)(), images // 64)


def going_on(start: Start, steps: int) -> Task:
    return lambda: epoch(start(), steps)


def epoch(batches: Iterator[object], steps: int) -> None:
    for _ in islice(batches, steps):
        pass


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
    return photos_in(folder)


def photos_in(folder: Path) -> Files:
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
