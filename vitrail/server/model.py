"""The model that is served: encoded images in, answers out, and the identity of its file."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.image import load_image
from vitrail.display.page import data_uri, encode_image
from vitrail.errors import UserError
from vitrail.exporting.engine import EngineName, thread_count
from vitrail.inference.engine_classifier import EngineClassifier, restore_bytes
from vitrail.inference.weight_files import collect_model_files, hash_files, is_exported

if TYPE_CHECKING:
    from vitrail.inference.classifier import Classifier

Array = NDArray[np.float32]

PRIVATE = ("environment", "recipe", "data")  # of the metadata: paths and names of machines
LANES = 2  # concurrent forward passes, whose threads never wait for each other
MIN_PROBE = 16  # pixels along a side of the stored image


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """What a request asks for before the forward pass."""

    cropped: bool = False  # the image is the model's input: neither resized nor cropped
    mask: tuple[int, ...] = ()  # patches to fill with the mean colour


WHOLE = ImageOptions()


class ModelReplaced(UserError):
    """The file no longer holds the model that is served."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedModel:
    """A classifier with the identity of its file; a reload replaces the whole object."""

    path: str  # as given by the user
    name: str
    sha256: str  # of the weight file
    classifier: "Classifier"
    engine: str  # what computes the logits
    device: str  # of PyTorch, as given by the user
    max_bytes: int
    max_pixels: int

    @property
    def predictor(self) -> Any:
        return self.classifier.predictor

    @cached_property
    def lane_predictor(self) -> Any:
        """For a forward pass beside others: with its share of the threads."""
        return self.predictor.split(self.lanes) if self.lanes > 1 else self.predictor

    @property
    def lanes(self) -> int:
        """Concurrent forward passes; a GPU runs one after the other."""
        return min(LANES, thread_count()) if self.on_cpu else 1

    @property
    def on_cpu(self) -> bool:
        return isinstance(self.classifier, EngineClassifier) or self.classifier.device.type == "cpu"

    @cached_property
    def cropped_predictor(self) -> Any:
        """For images of the model's input size, which it only normalises."""
        return replace(self.predictor, preprocess=replace(self.classifier.preprocess, crop=1.0))

    @property
    def explains(self) -> bool:
        """Whether there are weights for PyTorch, which explanations need."""
        return not is_exported(self.path)

    @cached_property
    def torch_classifier(self) -> "Classifier":
        """The model in PyTorch; loaded when it is first needed if another engine predicts."""
        if not isinstance(self.classifier, EngineClassifier):
            return self.classifier
        import vitrail

        loaded = vitrail.load(self.path, device=self.device, engine="torch")
        if hash_files(collect_model_files(self.path)) != self.sha256:
            raise ModelReplaced("the model file was replaced; send SIGHUP to serve the new one")
        return loaded

    @cached_property
    def architecture(self) -> dict[str, Any]:
        """The settings of the ViT; empty if an exported file does not contain them."""
        if isinstance(self.classifier, EngineClassifier):
            return dict(self.document.get("vit", {}))
        return asdict(self.classifier.model.config)

    @cached_property
    def document(self) -> dict[str, Any]:
        """The metadata in the model file."""
        document = self.classifier.metadata.document
        return {name: value for name, value in document.items() if is_json(value)}

    @cached_property
    def grid(self) -> tuple[int, int] | None:
        """Rows and columns of patches, if they are known."""
        view, patch = self.classifier.preprocess, self.architecture.get("patch")
        return (view.height // patch, view.width // patch) if patch else None

    def load_pixels(self, body: bytes, cropped: bool = False) -> NDArray[Any]:
        """Decodes an image within the limits of the server."""
        view = self.classifier.preprocess
        pixels = load_image(
            body, view.channels, view.pixels, max_bytes=self.max_bytes, max_pixels=self.max_pixels
        )
        if cropped and pixels.shape[:2] != (view.height, view.width):
            raise UserError(
                f"{pixels.shape[1]} x {pixels.shape[0]} pixels; "
                f"a cropped image has {view.width} x {view.height}"
            )
        return pixels

    def decode(self, body: bytes, options: ImageOptions = WHOLE) -> Array:
        """The model's input for one image (C, H, W)."""
        pixels = self.load_pixels(body, options.cropped)
        predictor = self.cropped_predictor if options.cropped else self.predictor
        x: Array = predictor.load(pixels)
        return self.mask_patches(x, options.mask) if options.mask else x

    def mask_patches(self, x: Array, patches: Sequence[int]) -> Array:
        """Fills patches with the mean colour of the image, as explanations do."""
        if self.grid is None:
            raise UserError("the file of this model does not say how large its patches are")
        rows, columns = self.grid
        if not all(0 <= patch < rows * columns for patch in patches):
            raise UserError(f"no such patch in mask; give numbers from 0 to {rows * columns - 1}")
        side, filled = self.architecture["patch"], x.copy()
        mean = x.mean(axis=(1, 2), keepdims=True)
        for patch in patches:
            top, left = patch // columns * side, patch % columns * side
            filled[:, top : top + side, left : left + side] = mean
        return filled

    def logits(self, batch: Sequence[Array], alone: bool = True) -> Array:
        """One row for each image: logits, and features that tell odd images, if any.

        `alone`: with all threads of an engine, not with its share of them.
        """
        predictor = self.predictor if alone else self.lane_predictor
        rows: Array = predictor.outputs(np.stack(batch))
        return rows

    def answer(self, row: Array, top: int, index: int | None = None) -> dict[str, Any]:
        """What `vitrail predict --json` prints; `index` adds the probability of that class."""
        prediction = self.predictor.prediction(
            row, top if index is None else len(self.predictor.classes)
        )
        if isinstance(prediction, UserError):
            raise prediction
        answer: dict[str, Any] = prediction.to_dict()
        if index is not None:
            answer["class"] = next(one for one in answer["top"] if one["index"] == index)
            answer["top"] = answer["top"][:top]
        return {**answer, "sha256": self.sha256}

    def probabilities(self, row: Array) -> list[float]:
        """The probability of every class, calibrated."""
        values: list[float] = self.predictor.softmax(
            row[: len(self.predictor.classes)], raw=False
        ).tolist()
        return values

    def crop_uri(self, x: Array) -> str:
        """The model's input (C, H, W) as a data URI, exact to the bit."""
        pixels = x if x.dtype == np.uint8 else restore_bytes(self.classifier.preprocess, x)
        shown = np.ascontiguousarray(np.moveaxis(pixels[:3], 0, 2)) if len(x) >= 3 else pixels[0]
        return data_uri(encode_image(Image.fromarray(shown), "PNG"), "png")

    @cached_property
    def probe(self) -> bytes:
        """The stored image on which a model is proved: coarse random colours, always the same."""
        view = self.classifier.preprocess
        sides = max(MIN_PROBE, view.height), max(MIN_PROBE, view.width)
        rng = np.random.default_rng(0)
        pixels = rng.integers(0, 256, (8, 8, view.channels), dtype=np.uint8)
        for axis, side in enumerate(sides):
            pixels = pixels.repeat(-(-side // 8), axis=axis)
        stream = io.BytesIO()
        np.save(stream, pixels[: sides[0], : sides[1]])
        return stream.getvalue()

    def describe(self) -> dict[str, Any]:
        """What the model file says, and how the model is served."""
        return {
            **{name: value for name, value in self.document.items() if name not in PRIVATE},
            "data": {"name": self.document.get("data", {}).get("name", "")},
            "name": self.name,
            "sha256": self.sha256,
            "engine": self.engine,
            "explains": self.explains,
            "vit": self.architecture,
            "grid": self.grid,
            "classes": list(self.classifier.classes),
            "preprocess": self.classifier.preprocess.to_dict(),
            "temperature": self.classifier.temperature,
        }


def is_json(value: object) -> bool:
    """Whether this is valid JSON; a damaged model file may hold NaN."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def load_served(
    path: str, *, engine: EngineName | None, device: str, max_bytes: int, max_pixels: int
) -> ServedModel:
    """Loads a model and proves that it answers, and that its answers are those of its author."""
    import vitrail
    from vitrail.inference.verify import check_same_answers

    weights = collect_model_files(path)
    before = file_states(weights)
    sha256 = hash_files(weights)
    classifier = vitrail.load(path, device=device, engine=engine)
    model = ServedModel(
        path=path,
        name=name_served_model(path),
        sha256=sha256,
        classifier=classifier,
        engine=name_engine(classifier),
        device=device,
        max_bytes=max_bytes,
        max_pixels=max_pixels,
    )
    for alone in (True, False):
        model.answer(model.logits([model.decode(model.probe)], alone)[0], top=1)
    if file_states(weights) != before:
        raise UserError(f"{path} was changed while it was loaded; try again")
    check_same_answers(classifier, path)
    return model


def file_states(paths: Sequence[Path]) -> list[tuple[int, int, int]]:
    """Changes when a file is replaced or written to."""
    try:
        found = [path.stat() for path in paths]
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
    return [(one.st_ino, one.st_size, one.st_mtime_ns) for one in found]


def name_served_model(path: str) -> str:
    """The run or file by which clients call the model."""
    place = Path(path)
    own = place.resolve() if place.exists() else place
    stem = own.stem if own.is_file() else own.name
    return (own.parent.name if stem == "model" else stem) or "model"


def name_engine(classifier: "Classifier") -> str:
    """What computes the logits, with its version."""
    engine = getattr(classifier.predictor, "engine", None)
    if engine is not None:
        return f"{engine.name} {engine.version}"
    import torch

    return f"torch {torch.__version__} on {classifier.device}"
