"""Images in, calibrated predictions out, from any network that returns logits."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from html import escape
from io import IOBase
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vitrail.data.config import Preprocess
from vitrail.data.image import load_image
from vitrail.data.preprocess import preprocess
from vitrail.errors import UserError
from vitrail.training.learner import compute_dtype
from vitrail.zoo.metadata import TrainingData

# everything that `load_image` reads
ImageInput = str | Path | bytes | bytearray | memoryview | np.ndarray | Image.Image

BATCH = 32  # images in memory at once


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

    def to_dict(self) -> dict[str, Any]:
        """What `vitrail predict --json` prints for an image, without the path.

        >>> list(vitrail.load("runs/digits-1").predict("digit.png").to_dict())
        ['label', 'index', 'probability', 'top']
        """
        return asdict(self)

    def __repr__(self) -> str:
        likely = ", ".join(f"{one.label} {one.probability:.1%}" for one in self.top)
        return f"Prediction({likely})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(one.label)}</td><td>{one.probability:.1%}</td></tr>"
            for one in self.top
        )
        return f"<table><tr><th>class</th><th>probability</th></tr>{rows}</table>"


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictor:
    """A network with its classes, preprocessing and temperature: images in, predictions out."""

    network: nn.Module  # preprocessed images in, logits out
    classes: tuple[str, ...]
    preprocess: Preprocess
    device: torch.device
    temperature: float | None = None  # divides the logits; None: not fitted
    training_data: TrainingData = field(default_factory=TrainingData)

    def __post_init__(self) -> None:
        check_temperature(self.temperature)

    def predict_images(
        self, images: Iterable[ImageInput], *, top: int = 5, raw: bool = False
    ) -> list[Prediction]:
        """One prediction for each image; the first image that cannot be read raises `UserError`."""
        predictions = []
        for number, (image, result) in enumerate(self.predict_each(images, top, raw), 1):
            with name_image_in_errors(image, number):
                if isinstance(result, UserError):
                    raise result
            predictions.append(result)
        return predictions

    def predict_each(
        self, images: Iterable[ImageInput], top: int = 5, raw: bool = False
    ) -> Iterator[tuple[ImageInput, Prediction | UserError]]:
        """Each image with its prediction, or with the error that kept it from being read."""
        remaining = iter(images)
        while part := list(islice(remaining, BATCH)):
            tensors = [self._load_or_error(image) for image in part]
            readable = [x for x in tensors if isinstance(x, Tensor)]
            logits = iter(self.logits(torch.stack(readable)) if readable else ())
            for image, x in zip(part, tensors, strict=True):
                if isinstance(x, Tensor):
                    yield image, self._prediction(next(logits), top, raw)
                else:
                    yield image, x

    def probabilities(
        self, images: Iterable[ImageInput], *, raw: bool = False
    ) -> NDArray[np.float32]:
        """One row for each image, one column for each class."""
        rows = [self.softmax(self.logits(x), raw).numpy() for x in self.batches(images)]
        return np.concatenate(rows) if rows else np.empty((0, len(self.classes)), np.float32)

    def softmax(self, logits: Tensor, raw: bool) -> Tensor:
        """Probabilities, calibrated unless `raw` is true."""
        temperature = 1.0 if raw or self.temperature is None else self.temperature
        return (logits / temperature).softmax(dim=-1)

    def logits(self, x: Tensor) -> Tensor:
        """The logits of preprocessed images, on the CPU."""
        with torch.inference_mode(), self.autocast():
            out: Tensor = self.network(x.to(self.device))
        return out.float().cpu()

    def autocast(self) -> torch.autocast:
        dtype = compute_dtype("auto", self.device)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32)

    def batches(self, images: Iterable[ImageInput]) -> Iterator[Tensor]:
        """Preprocessed images, at most `BATCH` at once."""
        return load_batches(images, self.preprocess, BATCH)

    def load(self, image: ImageInput) -> Tensor:
        """One preprocessed image, (C, H, W)."""
        return load_input(image, self.preprocess)

    def _load_or_error(self, image: ImageInput) -> Tensor | UserError:
        try:
            return self.load(image)
        except UserError as error:
            return error

    def _prediction(self, logits: Tensor, top: int, raw: bool) -> Prediction | UserError:
        if not logits.isfinite().all():
            return UserError("the model returns NaN or infinity; its weights are damaged")
        # sorted by logits: a high temperature may round two probabilities to the same number
        order = logits.argsort(descending=True, stable=True)[: max(1, top)].tolist()
        values = self.softmax(logits, raw).tolist()
        likely = tuple(
            ClassProbability(label=self.classes[i], index=i, probability=values[i]) for i in order
        )
        best = likely[0]
        return Prediction(
            label=best.label, index=best.index, probability=best.probability, top=likely
        )


def load_input(image: ImageInput, settings: Preprocess) -> Tensor:
    """One preprocessed image, (C, H, W)."""
    return preprocess(settings, load_image(image, settings.channels))


def load_batches(images: Iterable[ImageInput], settings: Preprocess, size: int) -> Iterator[Tensor]:
    """Preprocessed images in batches of at most `size`."""
    remaining = enumerate(images, 1)
    while part := list(islice(remaining, size)):
        tensors = []
        for number, image in part:
            with name_image_in_errors(image, number):
                tensors.append(load_input(image, settings))
        yield torch.stack(tensors)


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
    kinds = (*get_args(ImageInput), Tensor, IOBase)
    return isinstance(images, kinds) or not isinstance(images, Iterable)


def as_images(images: Any) -> Iterable[ImageInput]:
    """One image or many as an iterable of images."""
    return [images] if is_single_image(images) else images


def class_index(classes: Sequence[str], name: str | int) -> int:
    """The index of a class, given its name, one of its comma-separated names, or its index."""
    if isinstance(name, int):
        if not 0 <= name < len(classes):
            raise UserError(f"no such class: {name}; give 0 to {len(classes) - 1}")
        return name
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
