"""Images in, calibrated predictions out, whatever computes the logits. Free of torch."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from vitrail.data.config import Preprocess
from vitrail.errors import UserError
from vitrail.evaluation.calibration import Calibration, Promise, make_promise, softmax
from vitrail.evaluation.conformal import in_label_sets, in_sets
from vitrail.evaluation.odd import ODD
from vitrail.evaluation.selective import log_odds
from vitrail.inference.prediction import (
    ClassProbability,
    ImageInput,
    Prediction,
    check_temperature,
    name_image_in_errors,
)
from vitrail.zoo.metadata import MultiLabel, TrainingData

Array = NDArray[Any]  # float32 but for bytes that an engine normalises itself

BATCH = 32  # images in memory at once
NO_PROMISE = Promise()


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictor(ABC):
    """Classes, preprocessing and temperature: three steps from an image to its prediction.

    `load` decodes and preprocesses one image to an array, `logits` computes a batch of such
    arrays, `prediction` reads one row of them. `load` and `prediction` may run in any number of
    threads at once; so may `logits`, but its threads then compete for the same cores.
    """

    classes: tuple[str, ...]
    preprocess: Preprocess
    temperature: float | None = None  # divides the logits; None: not fitted
    multi_label: MultiLabel | None = None  # None: one class per image
    training_data: TrainingData = field(default_factory=TrainingData)
    calibration: Calibration | None = None  # None: no validation images were at hand

    def __post_init__(self) -> None:
        check_temperature(self.temperature)

    @abstractmethod
    def load(self, image: ImageInput) -> Array:
        """One preprocessed image, (C, H, W)."""

    @abstractmethod
    def logits(self, x: Array) -> Array:
        """The logits (B, K) of preprocessed images (B, C, H, W)."""

    def outputs(self, x: Array) -> Array:
        """The logits, followed by the features that tell odd images, if any: (B, K) or more."""
        return self.logits(x)

    def split(self, parts: int) -> Self:
        """The same predictor for `parts` concurrent calls of `logits`.

        Each has its share of an engine's threads; those of PyTorch are a setting of the caller.
        """
        return self

    def promise(self, coverage: float | None = None, abstain: float | None = None) -> Promise:
        """The thresholds for a coverage and an error rate, for `prediction`."""
        return make_promise(self.calibration, len(self.classes), coverage, abstain)

    def prediction(
        self, outputs: Array, top: int = 5, raw: bool = False, promise: Promise = NO_PROMISE
    ) -> Prediction | UserError:
        """The prediction for one image from a row of `logits` or `outputs`.

        An error if the logits are not finite.
        """
        logits = outputs[: len(self.classes)]
        if not np.isfinite(logits).all():
            return UserError("the model returns NaN or infinity; its weights are damaged")
        # sorted by logits: a high temperature may round two probabilities to the same number
        order = np.argsort(-logits, kind="stable")[: max(1, top)].tolist()
        values = self.softmax(logits, raw).tolist()
        if self.multi_label is not None:
            order = sorted(range(len(values)), key=lambda i: -values[i])[: max(1, top)]

        def listing(indices: Iterable[int]) -> tuple[ClassProbability, ...]:
            return tuple(
                ClassProbability(label=self.classes[i], index=i, probability=values[i])
                for i in indices
            )

        likely, labels = listing(order), None
        if self.multi_label is not None:
            calibrated = self.softmax(logits, raw=False).tolist()
            above = [p >= t for p, t in zip(calibrated, self.multi_label.thresholds, strict=True)]
            ranked = sorted(range(len(values)), key=lambda i: -values[i])
            labels = listing(i for i in ranked if above[i])
        best = likely[0]
        return Prediction(
            label=best.label,
            index=best.index,
            probability=best.probability,
            top=likely,
            labels=labels,
            **self._judge(outputs, promise),
        )

    def _judge(self, outputs: Array, promise: Promise) -> dict[str, Any]:
        """How far a prediction can be trusted: its set, whether to answer, whether it is odd."""
        logits = outputs[: len(self.classes)]
        judged: dict[str, Any] = {}
        if promise.sets is not None:
            if self.multi_label is not None:
                inside = in_label_sets(self.softmax(logits, raw=False)[None], promise.sets)
            else:
                inside = in_sets(softmax(logits[None], self.temperature), promise.sets)
            members = inside[0].nonzero()[0]
            order = sorted(members.tolist(), key=lambda index: -logits[index])
            judged["set"] = tuple(self.classes[index] for index in order)
        if promise.confidence is not None:
            odds = log_odds(logits[None] / (self.temperature or 1.0))[0]
            judged["answered"] = bool(odds >= promise.confidence)
        neighbours = self.calibration.neighbours if self.calibration else None
        if neighbours is not None and len(outputs) == len(logits) + neighbours.width:
            p_value = float(neighbours.p_values(outputs[None])[0])
            judged |= {"p_value": p_value, "odd": p_value < ODD}
        return judged

    def predict_images(
        self,
        images: Iterable[ImageInput],
        *,
        top: int = 5,
        raw: bool = False,
        promise: Promise = NO_PROMISE,
    ) -> list[Prediction]:
        """One prediction for each image; the first image that cannot be read raises `UserError`."""
        predictions = []
        for number, (image, result) in enumerate(self.predict_each(images, top, raw, promise), 1):
            with name_image_in_errors(image, number):
                if isinstance(result, UserError):
                    raise result
            predictions.append(result)
        return predictions

    def predict_each(
        self,
        images: Iterable[ImageInput],
        top: int = 5,
        raw: bool = False,
        promise: Promise = NO_PROMISE,
    ) -> Iterator[tuple[ImageInput, Prediction | UserError]]:
        """Each image with its prediction, or with the error that kept it from being read."""
        remaining = iter(images)
        while part := list(islice(remaining, BATCH)):
            arrays = [self._load_or_error(image) for image in part]
            readable = [x for x in arrays if not isinstance(x, UserError)]
            rows = iter(self.outputs(np.stack(readable)) if readable else ())
            for image, x in zip(part, arrays, strict=True):
                if isinstance(x, UserError):
                    yield image, x
                else:
                    yield image, self.prediction(next(rows), top, raw, promise)

    def probabilities(
        self, images: Iterable[ImageInput], *, raw: bool = False
    ) -> NDArray[np.float32]:
        """One row for each image, one column for each class."""
        rows = [self.softmax(self.logits(x), raw) for x in self.batches(images)]
        return np.concatenate(rows) if rows else np.empty((0, len(self.classes)), np.float32)

    def softmax(self, logits: Array, raw: bool) -> NDArray[np.float32]:
        """Probabilities, calibrated unless `raw` is true; multi-label: of each label by itself."""
        scaled = logits.astype(np.float64)
        if self.multi_label is not None:
            if not raw:
                scaled = scaled * self.multi_label.slopes + self.multi_label.intercepts
            sigmoids: NDArray[np.float64] = 1 / (1 + np.exp(-scaled.clip(-700, 700)))
            return sigmoids.astype(np.float32)
        if not raw and self.temperature is not None:
            scaled /= self.temperature
        values = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
        probabilities: NDArray[np.float64] = values / values.sum(axis=-1, keepdims=True)
        return probabilities.astype(np.float32)

    def batches(self, images: Iterable[ImageInput]) -> Iterator[Array]:
        """Preprocessed images, at most `BATCH` at once."""
        remaining = enumerate(images, 1)
        while part := list(islice(remaining, BATCH)):
            arrays = []
            for number, image in part:
                with name_image_in_errors(image, number):
                    arrays.append(self.load(image))
            yield np.stack(arrays)

    def _load_or_error(self, image: ImageInput) -> Array | UserError:
        try:
            return self.load(image)
        except UserError as error:
            return error
