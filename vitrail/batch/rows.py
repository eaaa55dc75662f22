"""What is computed for each image, and the table that it becomes: predictions or features."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.batch.manifest import Manifest
from vitrail.data.config import Preprocess
from vitrail.errors import UserError
from vitrail.inference.prediction import ImageInput, Prediction
from vitrail.inference.weight_files import is_exported

if TYPE_CHECKING:
    from vitrail.inference.classifier import Classifier

Array = NDArray[Any]


class RowMaker(ABC):
    """Images in, rows of a table out; `load` may run in several threads at once."""

    preprocess: Preprocess

    @abstractmethod
    def load(self, image: ImageInput) -> Array:
        """One preprocessed image, (C, H, W)."""

    @abstractmethod
    def compute(self, x: Array) -> Sequence[Any]:
        """The results of preprocessed images (B, C, H, W); a `UserError` where there is none."""

    @abstractmethod
    def make_table(self, ids: Sequence[str], results: Sequence[Any]) -> Any:
        """An Arrow table with a row for each image; `error` says why a row has no result."""


class PredictionRows(RowMaker):
    """The columns are the keys of `vitrail predict --json`."""

    def __init__(self, classifier: "Classifier", options: dict[str, Any]):
        self.predictor, self.preprocess = classifier.predictor, classifier.preprocess
        self.top, self.raw = options["top"], options["raw"]
        self.promise = self.predictor.promise(options["coverage"], options["abstain"])

    def load(self, image: ImageInput) -> Array:
        return self.predictor.load(image)

    def compute(self, x: Array) -> "list[Prediction | UserError]":
        rows = self.predictor.outputs(x)
        return [self.predictor.prediction(row, self.top, self.raw, self.promise) for row in rows]

    def make_table(self, ids: Sequence[str], results: Sequence[Any]) -> Any:
        import pyarrow

        rows = [
            {"error": str(one)} if isinstance(one, UserError) else one.to_dict() for one in results
        ]
        rows = [{"id": id, **row} for id, row in zip(ids, rows, strict=True)]
        return pyarrow.Table.from_pylist(rows, schema=self.schema)

    @property
    def schema(self) -> Any:
        import pyarrow as pa

        one = [("label", pa.string()), ("index", pa.int32()), ("probability", pa.float32())]
        columns = [("id", pa.string()), *one, ("top", pa.list_(pa.struct(one)))]
        if self.predictor.multi_label is not None:
            columns.append(("labels", pa.list_(pa.struct(one))))
        if self.promise.sets is not None:
            columns.append(("set", pa.list_(pa.string())))
        if self.promise.confidence is not None:
            columns.append(("answered", pa.bool_()))
        calibration = self.predictor.calibration
        if calibration is not None and calibration.neighbours is not None:
            columns += [("odd", pa.bool_()), ("p_value", pa.float32())]
        return pa.schema([*columns, ("error", pa.string())])


class FeatureRows(RowMaker):
    """One column holds the features, as lists of the same length."""

    width: int

    def __init__(self, dtype: str):
        self.dtype = dtype

    def make_table(self, ids: Sequence[str], results: Sequence[Any]) -> Any:
        import pyarrow as pa

        values = np.zeros((len(ids), self.width), self.dtype)
        errors = [str(one) if isinstance(one, UserError) else None for one in results]
        for row, one in zip(values, results, strict=True):
            if not isinstance(one, UserError):
                row[:] = one
        missing = pa.array([error is not None for error in errors])
        numbers = pa.array(values.reshape(-1))
        element = pa.field("element", numbers.type, nullable=False)  # read a third faster
        kind = pa.list_(element, self.width)
        lists = pa.FixedSizeListArray.from_arrays(numbers, type=kind, mask=missing)
        names = pa.array(list(ids), pa.string()), lists, pa.array(errors, pa.string())
        return pa.table(dict(zip(("id", "features", "error"), names, strict=True)))

    def check(self, rows: Array) -> list[Any]:
        """The features; an error for those that the dtype cannot hold."""
        stored = rows.astype(self.dtype)
        damaged = UserError(f"features are NaN, infinite or too large for {self.dtype}")
        finite = np.isfinite(stored).all(axis=1)
        return [row if fine else damaged for row, fine in zip(stored, finite, strict=True)]


class TorchFeatureRows(FeatureRows):
    def __init__(self, model: str, options: dict[str, Any], device: str):
        from vitrail.inference.backbone import load_backbone

        super().__init__(options["dtype"])
        settings = {name: options[name] for name in ("preprocess", "vit")}
        self.backbone = load_backbone(model, device=device, **settings)
        self.preprocess = self.backbone.preprocess
        self.width = self.backbone.model.config.feature_width

    def load(self, image: ImageInput) -> Array:
        from vitrail.inference.torch_predictor import load_input

        array: Array = load_input(image, self.preprocess).numpy()
        return array

    def compute(self, x: Array) -> list[Any]:
        import torch

        from vitrail.inference.backbone import compute_features

        return self.check(compute_features(self.backbone, torch.from_numpy(x)))


class EngineFeatureRows(FeatureRows):
    """The features that an exported model returns beside its logits."""

    def __init__(self, model: str, dtype: str):
        from vitrail.inference.engine_classifier import (
            EngineClassifier,
            EnginePredictor,
            require_features,
        )

        super().__init__(dtype)
        classifier = EngineClassifier(model)
        require_features(classifier)
        assert isinstance(classifier.predictor, EnginePredictor)
        assert classifier.metadata.vit is not None
        self.predictor, self.preprocess = classifier.predictor, classifier.preprocess
        self.width = classifier.metadata.vit.feature_width

    def load(self, image: ImageInput) -> Array:
        return self.predictor.load(image)

    def compute(self, x: Array) -> list[Any]:
        return self.check(self.predictor.run(x)["features"])


def load_rows(manifest: Manifest, device: str) -> RowMaker:
    """Loads the model of a job."""
    return load_model_rows(manifest.kind, manifest.model, manifest.options, device)


def load_model_rows(kind: str, model: str, options: dict[str, Any], device: str) -> RowMaker:
    if kind == "features":
        if is_exported(model):
            return EngineFeatureRows(model, options["dtype"])
        return TorchFeatureRows(model, options, device)
    from vitrail.inference.load import load

    settings = {name: options[name] for name in ("engine", "preprocess", "vit")}
    classifier = load(model, device=device, **settings).with_views(options["views"])
    return PredictionRows(classifier, options)
