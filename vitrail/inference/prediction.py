"""The prediction for one image, and what its classes and images may be. Free of torch."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from html import escape
from io import IOBase
from math import isfinite
from pathlib import Path
from typing import Any, get_args

import numpy as np
from PIL import Image

from vitrail.errors import UserError

# everything that `load_image` reads
ImageInput = str | Path | bytes | bytearray | memoryview | np.ndarray | Image.Image


@dataclass(frozen=True, kw_only=True)
class ClassProbability:
    """One class and its probability."""

    label: str
    index: int
    probability: float


@dataclass(frozen=True, kw_only=True, repr=False)
class Prediction:
    """The most likely class of an image, and the next most likely ones.

    >>> prediction = vitrail.load("runs/digits-1").predict("digit.png", top=3)
    >>> prediction.label == prediction.top[0].label, len(prediction.top)
    (True, 3)
    """

    label: str  # name of the most likely class
    index: int  # its position in `Classifier.classes`
    probability: float  # calibrated, if the model file has a temperature and `raw` is false
    top: tuple[ClassProbability, ...]  # the most likely classes in descending order
    labels: tuple[ClassProbability, ...] | None = None  # multi-label: those above their thresholds
    set: tuple[str, ...] | None = None  # classes that contain the true one with `coverage`
    answered: bool | None = None  # with `abstain`: whether the model is confident enough
    odd: bool | None = None  # unlike the training images; None: the model file cannot tell
    p_value: float | None = None  # fraction of images like the training images that are as odd

    def to_dict(self) -> dict[str, Any]:
        """What `vitrail predict --json` prints for an image, without the path.

        Without keys that were not asked for, or that the model file cannot tell.

        >>> list(vitrail.load("runs/digits-1").predict("digit.png").to_dict())
        ['label', 'index', 'probability', 'top', 'odd', 'p_value']
        """
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def listed(self) -> tuple[ClassProbability, ...]:
        """What people read: every label above its threshold, or else the most likely classes.

        >>> prediction = vitrail.load("runs/digits-1").predict("digit.png", top=3)
        >>> prediction.listed == prediction.top
        True
        """
        return self.top if self.labels is None else self.labels

    def __repr__(self) -> str:
        likely = ", ".join(f"{one.label} {one.probability:.1%}" for one in self.listed)
        return f"Prediction({'; '.join([likely or 'no label', *self.remarks()])})"

    def remarks(self) -> list[str]:
        """What else a reader should know, in words.

        >>> vitrail.load("runs/digits-1").predict("digit.png", coverage=0.9).remarks()
        ['one of: ...']
        """
        remarks = []
        if self.answered is False:
            remarks.append("not sure enough to answer")
        if self.set is not None:
            remarks.append(f"one of: {', '.join(self.set)}")
        if self.odd:
            remarks.append(f"odd image: p-value {self.p_value:.2g}")
        return remarks

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(one.label)}</td><td>{one.probability:.1%}</td></tr>"
            for one in self.listed
        )
        return f"<table><tr><th>class</th><th>probability</th></tr>{rows}</table>"


def check_temperature(temperature: object) -> None:
    """Refuses what a damaged or hostile model file may hold."""
    if temperature is None:
        return
    if (
        isinstance(temperature, bool)
        or not isinstance(temperature, int | float)
        or not (isfinite(temperature) and temperature > 0)
    ):
        raise UserError(
            f"the temperature of the model is {temperature!r:.40}; wanted a positive number or null"
        )


@contextmanager
def name_image_in_errors(image: ImageInput, number: int) -> Iterator[None]:
    """Puts the path of the image, or its number among those given, in front of any `UserError`."""
    try:
        yield
    except UserError as error:
        name = image if isinstance(image, str | Path) else f"image {number}"
        raise type(error)(f"{name}: {error}") from error


def is_single_image(images: object) -> bool:
    """Whether this is one image, or something that cannot be iterated over."""
    torch = sys.modules.get("torch")  # without it, nothing is a tensor
    kinds = (*get_args(ImageInput), IOBase, *((torch.Tensor,) if torch else ()))
    return isinstance(images, kinds) or not isinstance(images, Iterable)


def as_images(images: Any) -> Iterable[ImageInput]:
    """One image or many as an iterable of images."""
    return [images] if is_single_image(images) else images


def class_index(classes: Sequence[str], name: str | int) -> int:
    """The index of a class, given its name, one of its comma-separated names, or its index."""
    if isinstance(name, int | np.integer):
        if not 0 <= name < len(classes):
            raise UserError(f"no such class: {name}; give 0 to {len(classes) - 1}")
        return int(name)
    wanted = name.strip().casefold()
    for split in (lambda one: [one], lambda one: one.split(",")):
        known = [[part.strip().casefold() for part in split(one)] for one in classes]
        matches = [index for index, names in enumerate(known) if wanted in names]
        if len(matches) == 1:
            return matches[0]
    if wanted.isdecimal():
        return class_index(classes, int(wanted))
    near = get_close_matches(name, classes, n=3, cutoff=0.4)
    hint = ", ".join(map(repr, near)) or f"numbers from 0 to {len(classes) - 1}"
    raise UserError(f"no class is called {name!r}; the nearest are {hint}")
