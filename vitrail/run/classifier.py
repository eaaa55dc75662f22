"""A model with its classes and preprocessing: what `vitrail.load` returns."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from io import IOBase
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitrail.data.config import Preprocess
from vitrail.data.image import load_image
from vitrail.data.preprocess import fit, preprocess
from vitrail.errors import UserError
from vitrail.model.vit import ViT
from vitrail.run.build import pick_device, told
from vitrail.training.learner import computed_in
from vitrail.zoo import load as zoo

if TYPE_CHECKING:
    from vitrail.insight.explanation import Explanation

Picture = str | Path | bytes | bytearray | memoryview | np.ndarray | Image.Image  # to `load_image`

BATCH = 32  # images in memory at once


@dataclass(frozen=True, kw_only=True)
class Guess:
    label: str
    index: int
    probability: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    label: str
    index: int
    probability: float  # plain softmax
    top: tuple[Guess, ...]  # the most likely classes, this one first


class Classifier:
    """Predicts paths, bytes, PIL images and arrays, one or many."""

    def __init__(
        self,
        model: ViT,
        classes: Sequence[str],
        view: Preprocess,
        facts: dict[str, Any] | None = None,
        device: str | torch.device = "cpu",
    ):
        if model.config.head == "none":
            raise UserError("this model has no head, so it predicts no classes; fine-tune it first")
        if len(classes) != model.config.classes:
            count = model.config.classes
            raise UserError(f"{len(classes)} names for {count} classes; give one for each")
        self.device = torch.device(device)
        self.model = model.eval().to(self.device)
        self.classes, self.view, self.facts = tuple(classes), view, facts or {}

    @property
    def answers(self) -> nn.Module:
        """What turns preprocessed images into logits."""
        return self.model

    @property
    def temperature(self) -> float | None:
        """What logits are divided by for calibrated probabilities; None if it was not fitted."""
        return self.facts.get("temperature")

    def predict(self, images: Picture | Iterable[Picture], top: int = 5) -> Any:
        """A `Prediction`, or a list of them for many images."""
        found = []
        for number, (picture, one) in enumerate(self.each(many(images), top), 1):
            with named(picture, number):
                if isinstance(one, UserError):
                    raise one
            found.append(one)
        return found[0] if single(images) else found

    def prediction(self, probabilities: np.ndarray, top: int = 5) -> Prediction | UserError:
        if not np.isfinite(probabilities).all():
            return UserError("the model answers with NaN or infinity; load other weights")
        order = np.argsort(-probabilities, kind="stable")[: max(1, top)].tolist()
        sure = probabilities.tolist()
        guesses = tuple(Guess(label=self.classes[i], index=i, probability=sure[i]) for i in order)
        best = guesses[0]
        return Prediction(
            label=best.label, index=best.index, probability=best.probability, top=guesses
        )

    def probabilities(self, images: Picture | Iterable[Picture]) -> np.ndarray:
        """One row for each image, one column for each class."""
        rows = [self.logits(x).softmax(dim=1).numpy() for x in self.batches(many(images))]
        return np.concatenate(rows) if rows else np.empty((0, len(self.classes)), np.float32)

    def features(self, images: Picture | Iterable[Picture]) -> np.ndarray:
        """What the head reads: one vector for each image."""
        rows = []
        for x in self.batches(many(images)):
            with torch.inference_mode(), self.autocast():
                rows.append(self.model.pool(self.model.encode(x.to(self.device))).float().cpu())
        return torch.cat([torch.empty(0, self.model.config.width), *rows]).numpy()

    def explain(
        self,
        image: Picture,
        target: str | int | None = None,
        *,
        method: str = "best",
        occlusion: bool = False,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        room: int | None = None,
    ) -> "Explanation":
        """Why this image is what the model says, or why it is not `target`, a class.

        `method` is one of `vitrail.insight.explain.METHODS`, or "best": the most faithful of the
        quick ones on this image. `occlusion` adds the slow one. `layers` and `heads` choose what
        is drawn, `room` is how many bytes of maps a page may hold.
        """
        from vitrail.insight.explanation import explained
        from vitrail.insight.looks import ROOM

        with named(image, 1):
            pixels = load_image(image, self.view.channels)
        return explained(
            self.model,
            preprocess(self.view, pixels)[None].to(self.device),
            fit(self.view, pixels),
            self.classes,
            name=str(image) if isinstance(image, str | Path) else "image",
            target=None if target is None else self.index(target),
            method=method,
            occlusion=occlusion,
            layers=layers,
            heads=heads,
            room=ROOM if room is None else room,
        )

    def index(self, name: str | int) -> int:
        """The number of a class by its name, one of its names between commas, or its number."""
        if isinstance(name, int):
            if not 0 <= name < len(self.classes):
                raise UserError(f"no such class: {name}; give 0 to {len(self.classes) - 1}")
            return name
        wanted = name.strip().casefold()
        for parts in (lambda one: [one], lambda one: one.split(",")):
            known = [[part.strip().casefold() for part in parts(one)] for one in self.classes]
            found = [number for number, names in enumerate(known) if wanted in names]
            if len(found) == 1:
                return found[0]
        if wanted.isdecimal():
            return self.index(int(wanted))
        near = get_close_matches(name, self.classes, n=3, cutoff=0.4)
        hint = ", ".join(map(repr, near)) or f"numbers from 0 to {len(self.classes) - 1}"
        raise UserError(f"there is no class {name!r}; the nearest are {hint}")

    def each(
        self, images: Iterable[Picture], top: int = 5
    ) -> Iterator[tuple[Picture, Prediction | UserError]]:
        """One result after the other, whatever cannot be read among them; a few in memory."""
        pictures = iter(images)
        while part := list(islice(pictures, BATCH)):
            read = [self.attempt(picture) for picture in part]
            good = [x for x in read if isinstance(x, Tensor)]
            rows = iter(self.logits(torch.stack(good)).softmax(dim=1).numpy() if good else [])
            for picture, x in zip(part, read, strict=True):
                yield picture, x if isinstance(x, UserError) else self.prediction(next(rows), top)

    def attempt(self, picture: Picture) -> Tensor | UserError:
        try:
            return self.tensor(picture)
        except UserError as error:
            return error

    def logits(self, x: Tensor) -> Tensor:
        with torch.inference_mode(), self.autocast():
            out: Tensor = self.answers(x.to(self.device))
        return out.float().cpu()

    def autocast(self) -> torch.autocast:
        dtype = computed_in("auto", self.device)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32)

    def batches(self, images: Iterable[Picture]) -> Iterator[Tensor]:
        """Preprocessed images, never more than a few at once."""
        pictures = enumerate(images, 1)
        while part := list(islice(pictures, BATCH)):
            tensors = []
            for number, picture in part:
                with named(picture, number):
                    tensors.append(self.tensor(picture))
            yield torch.stack(tensors)

    def tensor(self, picture: Picture) -> Tensor:
        return preprocess(self.view, load_image(picture, self.view.channels))


@contextmanager
def named(picture: Picture, number: int) -> Iterator[None]:
    """Says of which image an error tells: its path, or which one of those given it is, from 1."""
    try:
        yield
    except UserError as error:
        name = picture if isinstance(picture, str | Path) else f"image {number}"
        raise type(error)(f"{name}: {error}") from error


def single(images: Any) -> bool:
    """Whether it is one image, or what is none and not many either."""
    kinds = (*get_args(Picture), Tensor, IOBase)
    return isinstance(images, kinds) or not isinstance(images, Iterable)


def many(images: Any) -> Iterable[Picture]:
    return [images] if single(images) else images


def load(path: str | Path, *, device: str = "cpu", **hints: Any) -> Classifier:
    """The classifier in a run folder, a model file, or any weights that `zoo` reads."""
    loaded = told(zoo.load(path, **hints))
    config = loaded.model.config
    if loaded.view is None:
        raise UserError(
            f"{path} does not say how its images were normalised; say --preprocess half or imagenet"
        )
    classes = loaded.classes or tuple(str(number) for number in range(config.classes))
    return Classifier(loaded.model, classes, loaded.view, loaded.facts, pick_device(device))
