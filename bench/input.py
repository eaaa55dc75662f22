"""From files to batches: Vitrail's loader, torch's with Pillow, timm's, and torchvision's v2.

JPEG files of 500 x 375 pixels become batches of 64 at 224 pixels: random resized crop, horizontal
flip, normalisation. The first epoch decodes everything and starts the workers; a later epoch is any
other. The last case is a set of 32-pixel images in memory, translated by up to 4 pixels and
flipped, in batches of 128. All loaders have the same number of workers.
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

from bench.measure import Budget, Case, OnProgress, Task, measure
from bench.peers import patch_torchvision
from bench.process import interleave_processes, start_processes
from vitrail.data.config import Augment, DataConfig, Preprocess
from vitrail.data.loader import Loader
from vitrail.data.source import Item
from vitrail.data.sources.folder import FileSource, open_folder
from vitrail.data.sources.tree import FolderTree

PHOTOS = Path(__file__).resolve().parents[2] / "shared" / "data" / "imagenet-val-300"
PREPROCESS = Preprocess(
    size=224, interpolation="bilinear", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
)
TINY_PREPROCESS = Preprocess(size=32, mean=(0.49, 0.48, 0.45), std=(0.25,))
IMAGES, TINY_IMAGES = 640, 32 * 128  # images of the photos and of the 32-pixel set
WORKERS = 2  # of every loader
FIRST_EPOCH, LATER_EPOCH, TINY_CASE = "photos, first epoch", "photos, later epoch", "32 pixels"
MIN_ROUNDS = 4  # each is an epoch

StartEpoch = Callable[[], Iterator[object]]  # starts an epoch, or continues with the next one


class PillowPhotos(Dataset[tuple[Tensor, int]]):
    """The common way: Pillow converts one image at a time to a normalised tensor."""

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
        return to_tensor(flip_randomly(image), PREPROCESS), self.labels[index]


class PillowTinyImages(Dataset[tuple[Tensor, int]]):
    """The common way for images in memory: pad by 4 black pixels, crop, flip."""

    def __init__(self, pixels: NDArray[np.uint8]):
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        padded = Image.new("RGB", (40, 40))
        padded.paste(Image.fromarray(self.pixels[index]), (4, 4))
        left, top = random.randrange(9), random.randrange(9)
        crop = padded.crop((left, top, left + 32, top + 32))
        return to_tensor(flip_randomly(crop), TINY_PREPROCESS), 0


class TransformedImages(Dataset[tuple[Tensor, int]]):
    """Images in memory, each passed through torchvision's transforms."""

    def __init__(self, pixels: NDArray[np.uint8], transform: Callable[[Tensor], Tensor]):
        self.pixels = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.pixels[index]), 0


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Samples as torchvision does: ten tries for 8 % to 100 % of the area, else the centre."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            return random.randint(0, width - wide), random.randint(0, height - tall), wide, tall
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def flip_randomly(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


def to_tensor(image: Image.Image, preprocess: Preprocess) -> Tensor:
    """Converts as torchvision does: to floats in [0, 1], then normalised."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
    mean, std = torch.tensor(preprocess.mean), torch.tensor(preprocess.std)
    return pixels.sub_(mean[:, None, None]).div_(std[:, None, None])


class TinySource:
    """The 32-pixel images as a source of Vitrail's loader."""

    name, path, classes = "tiny", None, ("one", "two")

    def __init__(self, pixels: NDArray[np.uint8]):
        self.pixels = pixels
        self.labels = self.sizes = self.mtimes = np.zeros(len(pixels), np.int64)
        self.splits = np.full(len(pixels), "train")
        self.ids = [str(number) for number in range(len(pixels))]
        self.ignored: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Item:
        return Item(self.pixels[index], 0, self.ids[index])


def vitrail_batches(source: FileSource, workers: int, epochs: int | None = None) -> StartEpoch:
    config = DataConfig(augment=Augment(flip=0.5, scale=0.08), workers=workers, disk_gb=0)
    loader = Loader(source, PREPROCESS, config, batch=64, progress=False)
    batches = loader.training(end=epochs and epochs * (len(source) // 64))
    return lambda: batches


def pillow_batches(source: FileSource, workers: int) -> StartEpoch:
    paths = [source.root / name for name in source.ids]
    return iterate_epochs(PillowPhotos(paths, source.labels.tolist()), 64, workers)


def timm_batches(source: FileSource, workers: int) -> StartEpoch:
    """timm's own loader: images stay uint8 until the whole batch is normalised."""
    patch_torchvision()
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
        mean=PREPROCESS.mean,
        std=PREPROCESS.std,
        num_workers=workers,
        persistent_workers=workers > 0,
        device=torch.device("cpu"),
    )
    return lambda: iter(loader)


def torchvision_batches(source: FileSource, workers: int) -> StartEpoch:
    """As in torchvision's guide: from Pillow to uint8 first, to float last."""
    patch_torchvision()
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    steps = [
        v2.PILToTensor(),
        v2.RandomResizedCrop(224, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(PREPROCESS.mean, PREPROCESS.std),
    ]
    return iterate_epochs(ImageFolder(str(source.root), v2.Compose(steps)), 64, workers)


def vitrail_tiny_batches(pixels: NDArray[np.uint8]) -> StartEpoch:
    config = DataConfig(augment=Augment(flip=0.5, shift=0.125))
    batches = Loader(TinySource(pixels), TINY_PREPROCESS, config, progress=False).training()
    return lambda: batches


def pillow_tiny_batches(pixels: NDArray[np.uint8]) -> StartEpoch:
    return iterate_epochs(PillowTinyImages(pixels), 128, 0)


def torchvision_tiny_batches(pixels: NDArray[np.uint8]) -> StartEpoch:
    patch_torchvision()
    from torchvision.transforms import v2

    steps = [
        v2.RandomCrop(32, padding=4),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(TINY_PREPROCESS.mean, TINY_PREPROCESS.std),
    ]
    return iterate_epochs(TransformedImages(pixels, v2.Compose(steps)), 128, 0)


def iterate_epochs(data: Dataset[tuple[Tensor, int]], batch: int, workers: int) -> StartEpoch:
    loader = DataLoader(
        data,
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return lambda: iter(loader)


LOADERS: dict[str, Callable[[FileSource, int], StartEpoch]] = {
    "vitrail": vitrail_batches,
    "torch + Pillow": pillow_batches,
    "timm": timm_batches,
    "torchvision v2": torchvision_batches,
}
# timm has no loader for arrays.
TINY_LOADERS: dict[str, Callable[[NDArray[np.uint8]], StartEpoch]] = {
    "vitrail": vitrail_tiny_batches,
    "torch + Pillow": pillow_tiny_batches,
    "torchvision v2": torchvision_tiny_batches,
}


def run(budget: Budget, progress: OnProgress) -> dict[str, Any]:
    budget = replace(budget, min_rounds=MIN_ROUNDS)
    with tempfile.TemporaryDirectory() as folder, start_processes("input", LOADERS) as processes:
        progress(0.0, f"making {IMAGES} photos")
        make_photos(Path(folder), IMAGES, PHOTOS)
        tiny = {name: process for name, process in processes.items() if name in TINY_LOADERS}
        cases = [
            Case(
                label=label,
                unit="images/s",
                measure=partial(interleave_processes, loaders, (label, images, WORKERS, folder)),
                images=images,
            )
            for label, loaders, images in (
                (FIRST_EPOCH, processes, IMAGES // 64 * 64),
                (LATER_EPOCH, processes, IMAGES // 64 * 64),
                (TINY_CASE, tiny, TINY_IMAGES),
            )
        ]
        return {"cases": measure(cases, budget, progress)}


def prepare(contender: str, label: str, images: int, workers: int, folder: str) -> Task:
    """Returns a task that runs an epoch of this case on the photos in `folder`."""
    if label == TINY_CASE:
        pixels = np.random.default_rng(0).integers(0, 256, (images, 32, 32, 3), dtype=np.uint8)
        return continue_epochs(TINY_LOADERS[contender](pixels), images // 128)
    source, start = open_photos(Path(folder)), LOADERS[contender]
    if label == LATER_EPOCH:
        return continue_epochs(start(source, workers), images // 64)
    if contender == "vitrail":
        # like the others, it prefetches nothing beyond the epoch
        start = partial(vitrail_batches, epochs=1)
    return lambda: run_epoch(start(source, workers)(), images // 64)


def continue_epochs(start: StartEpoch, steps: int) -> Task:
    return lambda: run_epoch(start(), steps)


def run_epoch(batches: Iterator[object], steps: int) -> None:
    for _ in islice(batches, steps):
        pass


def make_photos(folder: Path, count: int, photos: Path) -> FileSource:
    """Writes JPEG files of 500 x 375 pixels and about 110 kB, as in ImageNet.

    Enlarged real photos, or smooth random colours if there are none; noise adds fine detail.
    """
    found = sorted(photos.glob("*.jpg")) if photos.is_dir() else []
    encoded: list[bytes] = []
    for number in range(count):
        if number < 300:  # 300 different ones are enough, and faster to encode
            encoded.append(encode_photo(number, found))
        path = folder / f"class {number % 2}" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded[number % len(encoded)])
    return open_photos(folder)


def open_photos(folder: Path) -> FileSource:
    source = open_folder(FolderTree(folder), classes=None, split=False, progress=False)
    return replace(source, splits=np.full(len(source), "train"))


def encode_photo(number: int, found: list[Path]) -> bytes:
    rng = np.random.default_rng(number)
    if found:
        image = Image.open(found[number % len(found)]).convert("RGB")
    else:
        image = Image.fromarray(rng.integers(0, 256, (47, 62, 3), dtype=np.uint8))
    pixels = np.asarray(image.resize((500, 375), Image.Resampling.BICUBIC))
    pixels = (pixels + rng.normal(0, 8, (375, 500, 1))).clip(0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=95)
    return stream.getvalue()
