"""Small data sets in memory, as files or as pixels, and some that misbehave."""

import io
import multiprocessing
import os
import signal
from collections.abc import Sequence

import numpy as np
from PIL import Image

from vitrail.data.source import Item


class Fake:
    """Images of three classes; every fifth is for validation, every seventh for the test."""

    path = None

    def __init__(self, contents: Sequence[bytes | np.ndarray], classes: int = 3):
        self.name, self.contents = "fake", list(contents)
        self.classes = tuple(f"class {k}" for k in range(classes))
        numbers = np.arange(len(self.contents))
        self.labels = numbers % classes
        self.splits = np.where(numbers % 5 == 4, "val", np.where(numbers % 7 == 6, "test", "train"))
        self.ids = [f"class {k % classes}/{k}.jpg" for k in numbers]
        self.sizes = np.array([len(content) for content in self.contents], np.int64)
        self.mtimes = np.zeros(len(self.contents), np.int64)
        self.ignored: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.contents)

    def __getitem__(self, index: int) -> Item:
        return Item(self.contents[index], int(self.labels[index]), self.ids[index])


class Deadly(Fake):
    """Kills the worker that reads the image `victim`."""

    victim = -1

    def __getitem__(self, index: int) -> Item:
        if index == self.victim and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def photo(seed: int, height: int = 90, width: int = 120) -> np.ndarray:
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def encoded(pixels: np.ndarray, kind: str = "JPEG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def photos(count: int = 40) -> list[bytes]:
    """JPEG files of several sizes."""
    return [encoded(photo(k, 80 + k % 5, 100 + 3 * (k % 7))) for k in range(count)]


def arrays(count: int = 60, side: int = 16, channels: int = 3) -> list[np.ndarray]:
    shape = (count, side, side, channels)
    return list(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
