"""A classifier that runs an exported model in onnxruntime or OpenVINO, without PyTorch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from vitrail.arguments import check_arguments
from vitrail.data.config import Preprocess
from vitrail.data.geometry import fit_image
from vitrail.data.image import load_image
from vitrail.data.numpy_preprocess import preprocess_with_numpy, resize_with_numpy
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.exporting.engine import ODD_FEATURES, Engine, PixelKind, open_engine
from vitrail.exporting.formats import FormatName
from vitrail.inference.classifier import Classifier
from vitrail.inference.prediction import ImageInput, as_images
from vitrail.inference.predictor import Array, Predictor
from vitrail.inference.views import without_views
from vitrail.zoo.metadata import Metadata, check_version, decode_metadata

if TYPE_CHECKING:
    from vitrail.exporting.export import Export
    from vitrail.insight.explanation import Explanation


@dataclass(frozen=True, kw_only=True, eq=False)
class EnginePredictor(Predictor):
    """An engine with its classes, preprocessing and temperature."""

    engine: Engine

    def load(self, image: ImageInput) -> Array:
        """One preprocessed image, (C, H, W): bytes if the engine normalises them itself."""
        pixels = load_image(image, self.preprocess.channels, self.preprocess.pixels)
        if self.engine.pixels == "float32":
            return preprocess_with_numpy(self.preprocess, pixels)
        cropped = fit_image(self.preprocess, pixels, resize_with_numpy)
        return np.ascontiguousarray(cropped.transpose(2, 0, 1))

    def logits(self, x: Array) -> Array:
        """The logits (B, K) of preprocessed images (B, C, H, W)."""
        return self.run(x)["logits"]

    def outputs(self, x: Array) -> Array:
        """The logits, followed by the features that tell odd images if the file returns them."""
        found = self.run(x)
        return np.concatenate(
            [found[name] for name in ("logits", ODD_FEATURES) if name in found], 1
        )

    def split(self, parts: int) -> Self:
        return replace(self, engine=self.engine.split(parts))

    def run(self, x: Array) -> dict[str, NDArray[np.float32]]:
        """All outputs of preprocessed images, by name."""
        if self.engine.pixels == "uint8" and x.dtype != np.uint8:
            x = restore_bytes(self.preprocess, x)
        return self.engine.run(x)


def restore_bytes(settings: Preprocess, x: Array) -> NDArray[np.uint8]:
    """The bytes (..., C, H, W) that `normalise` made these values of."""
    mean, std = (
        255 * np.array(numbers)[:, None, None] for numbers in (settings.mean, settings.std)
    )
    levels: NDArray[np.float64] = np.rint(x * std + mean)
    return levels.astype(np.uint8)


class EngineClassifier(Classifier):
    """An exported model that predicts and evaluates in onnxruntime or OpenVINO, without PyTorch.

    Its predictions are those of the `Classifier` that was exported, within the tolerance of the
    proof. Explanations need the weights: load the run or weight file for them.

    >>> classifier = vitrail.load("digits.onnx")
    >>> classifier
    EngineClassifier(10 classes: 0, 1, 2, 3, 4, ...; 8 x 8 pixels, 1 channel; ...; onnxruntime ...)
    >>> classifier.predict("digit.png").label in classifier.classes
    True
    """

    @check_arguments
    def __init__(self, path: str | Path):
        """
        Args:
            path: a file that `vitrail export` wrote: .onnx, or OpenVINO's .xml
        """
        self.path = Path(path)
        self.engine = open_engine(path)
        self.metadata = read_description(path, self.engine)
        assert self.metadata.classes is not None and self.metadata.preprocess is not None
        self.classes, self.preprocess = self.metadata.classes, self.metadata.preprocess
        self.predictor = EnginePredictor(
            engine=self.engine,
            classes=self.classes,
            preprocess=self.preprocess,
            multi_label=self.metadata.labelling(len(self.classes)),
            temperature=self.metadata.temperature,
            training_data=self.metadata.data,
            calibration=self.metadata.calibration,
        )

    @check_arguments
    def features(self, images: "ImageInput | Iterable[ImageInput]") -> "NDArray[np.float32]":
        """The input of the head: one vector for each image, if it was exported with `features`.

        >>> vitrail.load("digits.onnx").features(["digit.png", "digit.png"]).shape
        (2, 32)
        """
        require_features(self)
        predictor = without_views(self.predictor)
        assert isinstance(predictor, EnginePredictor)
        rows = [predictor.run(x)["features"] for x in predictor.batches(as_images(images))]
        assert self.metadata.vit is not None
        return np.concatenate([np.empty((0, self.metadata.vit.feature_width), np.float32), *rows])

    def explain(
        self,
        image: "ImageInput",
        target: str | int | None = None,
        *,
        method: str = "best",
        occlusion: bool = False,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        raw: bool = False,
        max_bytes: int | None = None,
    ) -> "Explanation":
        """Raises: explanations need the gradients and weights that only PyTorch has.

        >>> vitrail.load("digits.onnx").explain("digit.png")
        Traceback (most recent call last):
        vitrail.errors.UserError: digits.onnx runs in onnxruntime, without PyTorch's weights; ...
        """
        self._refuse()

    def export(
        self,
        out: str | Path | None = None,
        *,
        to: "FormatName | None" = None,
        int8: bool = False,
        attention: bool = False,
        features: bool = False,
        odd: bool = False,
        pixels: "PixelKind" = "float32",
        any_size: bool = False,
        data: "str | Path | Source | None" = None,
        most: float = 0.5,
        force: bool = False,
        overwrite: bool = False,
        name: str | None = None,
    ) -> "Export":
        """Raises: an exported model cannot be exported again.

        >>> vitrail.load("digits.onnx").export("digits.xml")
        Traceback (most recent call last):
        vitrail.errors.UserError: digits.onnx runs in onnxruntime, without PyTorch's weights; ...
        """
        self._refuse()

    def __getattr__(self, name: str) -> Any:
        if name in ("model", "device"):
            self._refuse()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _refuse(self) -> NoReturn:
        raise UserError(
            f"{self.path} runs in {self.engine.name}, without PyTorch's weights; "
            f"give the run or weight file that it was exported from"
        )

    def _where(self) -> str:
        return f"{self.engine.name} {self.engine.version}"


def require_features(classifier: EngineClassifier) -> None:
    """Raises unless the file returns features beside its logits."""
    if "features" not in classifier.engine.outputs:
        raise UserError(
            f"{classifier.path} does not return features; export it with `features=True`"
        )


def read_description(path: str | Path, engine: Engine) -> Metadata:
    """The metadata of an exported file; raises unless it names every class and how to normalise."""
    if not engine.metadata:
        raise UserError(
            f"{path} does not say which classes and preprocessing it needs; "
            f"give a file that `vitrail export` wrote"
        )
    if "logits" not in engine.outputs:
        raise UserError(f"{path} has no classification head; export a model that has one")
    try:
        check_version(engine.metadata)
        metadata = decode_metadata(engine.metadata)
        if metadata.classes is None or metadata.preprocess is None:
            raise UserError("classes or preprocessing are missing")
        if engine.classes not in (None, len(metadata.classes)):
            raise UserError(f"{len(metadata.classes)} class names for {engine.classes} logits")
    except UserError as error:
        raise UserError(f"{path} has damaged metadata: {error}; export it again") from error
    return metadata
