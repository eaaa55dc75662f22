"""Scikit-learn estimators: a classifier that trains a ViT, and a transformer for features."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail import files
from vitrail.data.config import Preprocess
from vitrail.errors import UserError
from vitrail.heads.features import FeatureExtractor, FeatureKind, Features
from vitrail.inference.classifier import Classifier
from vitrail.inference.head import make_extractor
from vitrail.inference.load import load
from vitrail.inference.prediction import ImageInput
from vitrail.inference.torch_predictor import load_batches
from vitrail.model.vit import ViT
from vitrail.run.image_list import class_names, hold_out_validation, list_images, make_source
from vitrail.run.request import AUTO
from vitrail.run.train import train
from vitrail.training.device import pick_device
from vitrail.zoo.file import load_model, save_model
from vitrail.zoo.metadata import Metadata
from vitrail.zoo.weights import Normalisation

try:
    from sklearn.base import (
        BaseEstimator,
        ClassifierMixin,
        ClassNamePrefixFeaturesOutMixin,
        TransformerMixin,
    )
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d
except ImportError as error:
    raise UserError(
        "ViTClassifier and ViTFeatures need scikit-learn; pip install 'vitrail[heads]'"
    ) from error

# Long annotations are quoted, so that `help` shows the names and not what they stand for.
Images = Sequence[ImageInput] | np.ndarray  # paths, PIL images or arrays, one for each sample


class ViTClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A Vision Transformer as a scikit-learn classifier.

    `X` holds one image per sample: a list of paths, PIL images or arrays, or one array of shape
    (n, height, width) or (n, height, width, channels) with uint8, or floats from 0 to 1. `y` may
    hold any labels. `fit` runs `vitrail.train`: it chooses a recipe from the data, holds out a
    tenth of each class for validation, and keeps the weights of the best epoch.

    Fitted attributes: `classes_`, `classifier_` (a `vitrail.Classifier`), `metrics_` (the numbers
    that `vitrail train --json` prints), and `run_` (the `vitrail.Run`; None without `runs`).
    A fitted estimator pickles with the bytes of its model file.

    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits().images[:200] / 16, load_digits().target[:200]
    >>> estimator = vitrail.ViTClassifier(epochs=1).fit(X, y)
    >>> estimator.predict_proba(X[:3]).shape
    (3, 10)
    """

    def __init__(
        self,
        *,
        minutes: float = 5.0,
        epochs: int | None = None,
        model: str | None = None,
        weights: str | Path = AUTO,
        settings: Mapping[str, Any] | None = None,
        seed: int | None = None,
        device: str = "auto",
        runs: str | Path | None = None,
        verbose: bool = False,
    ):
        """
        Args:
            minutes: training time of each fit
            epochs: number of epochs instead of a time
            model: architecture by name, such as "Nano/4" or "S/16"; by default chosen from the data
            weights: run, weight file or folder to fine-tune; "auto" takes published weights if the
                images are photos, "none" none
            settings: any setting of a recipe by section, such as {"train": {"lr": 3e-4}}
            seed: of initialisation, data order, augmentation and dropout
            device: "cpu", "cuda", "cuda:1", "mps"; "auto" picks a GPU if there is one
            runs: folder that receives one run folder per fit; by default nothing stays on disk
            verbose: print the recipe and progress
        """
        self.minutes = minutes
        self.epochs = epochs
        self.model = model
        self.weights = weights
        self.settings = settings
        self.seed = seed
        self.device = device
        self.runs = runs
        self.verbose = verbose

    def fit(self, X: "Images", y: Any) -> "ViTClassifier":
        """Trains a new model on all images of `X`.

        Args:
            X: n images
            y: n labels of any type

        >>> from sklearn.datasets import load_digits
        >>> X, y = load_digits().images[:200] / 16, load_digits().target[:200]
        >>> vitrail.ViTClassifier(epochs=1).fit(X, y).classes_
        array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
        """
        images = list_images(X)
        classes, labels = _encode_labels(y, len(images))
        source = hold_out_validation(make_source(images, labels, class_names(classes)))
        with _run_folder(self.runs) as folder:
            run = train(
                source,
                model=self.model,
                weights=self.weights,
                minutes=self.minutes if self.epochs is None else None,
                epochs=self.epochs,
                settings=self.settings,
                seed=self.seed,
                out=folder,
                device=self.device,
                report=self.runs is not None,
                test=False,
                quiet=not self.verbose,
            )
            self.classifier_ = load(run.folder, device=self.device)
        self.classes_ = classes
        self.metrics_ = dict(run.metrics)
        self.run_ = run if self.runs is not None else None
        return self

    def predict(self, X: "Images") -> "NDArray[Any]":
        """The most likely label of each image.

        >>> from sklearn.datasets import load_digits
        >>> X, y = load_digits().images[:200] / 16, load_digits().target[:200]
        >>> vitrail.ViTClassifier(epochs=1).fit(X, y).predict(X[:5]).shape
        (5,)
        """
        check_is_fitted(self)
        labels: NDArray[Any] = self.classes_[self.predict_proba(X).argmax(axis=1)]
        return labels

    def predict_proba(self, X: "Images") -> "NDArray[np.float32]":
        """Calibrated probabilities: one row for each image, one column for each of `classes_`.

        >>> from sklearn.datasets import load_digits
        >>> X, y = load_digits().images[:200] / 16, load_digits().target[:200]
        >>> vitrail.ViTClassifier(epochs=1).fit(X, y).predict_proba(X[:5]).shape
        (5, 10)
        """
        check_is_fitted(self)
        probabilities: NDArray[np.float32] = self.classifier_.probabilities(list_images(X))
        return probabilities

    def __sklearn_tags__(self) -> Any:
        return _image_tags(super().__sklearn_tags__())

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "classifier_" in state:
            one: Classifier = state["classifier_"]
            described = {**one.metadata.document, "classes": list(one.classes)}
            state["classifier_"] = _pack_model(one.model, one.preprocess, described)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if isinstance(packed := state.get("classifier_"), bytes):
            model, metadata = _unpack_model(packed)
            assert metadata.classes is not None and metadata.preprocess is not None
            device = state.get("device", "auto")
            state["classifier_"] = Classifier(
                model, metadata.classes, metadata.preprocess, metadata, device
            )
        super().__setstate__(state)


class ViTFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """The frozen features of a Vision Transformer as a scikit-learn transformer.

    Accepts the same `X` as `ViTClassifier`. `fit` loads the model and learns nothing from the
    images. A fitted transformer pickles with the bytes of its model.

    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits().images[:200] / 16, load_digits().target[:200]
    >>> pipeline = make_pipeline(vitrail.ViTFeatures("runs/digits-1"), LogisticRegression())
    >>> pipeline.fit(X, y).score(X, y) > 0.5
    True
    """

    def __init__(
        self,
        model: str | Path | Classifier,
        *,
        features: FeatureKind = "pooled",
        layers: Sequence[int] = (),
        batch: int = 64,
        device: str = "auto",
        preprocess: Normalisation | None = None,
    ):
        """
        Args:
            model: run folder, model file, weights with or without a head, or a `Classifier`
            features: input of the model's own head (pooled), its [CLS] token, or the average of
                the patch tokens
            layers: blocks whose features are concatenated, from 0, or from -1 down; by default the
                last one
            batch: images in each forward pass
            device: "cpu", "cuda", "cuda:1", "mps"; "auto" picks a GPU if there is one
            preprocess: mean and standard deviation that foreign weights expect, if their file
                does not say
        """
        self.model = model
        self.features = features
        self.layers = layers
        self.batch = batch
        self.device = device
        self.preprocess = preprocess

    def fit(self, X: "Images", y: Any = None) -> "ViTFeatures":
        """Loads the model; `X` and `y` are ignored.

        >>> vitrail.ViTFeatures("runs/digits-1").fit(["digit.png"]).transform(["digit.png"]).ndim
        2
        """
        self.extractor_, device = make_extractor(
            self.model,
            self.features,
            self.layers,
            self.batch,
            self.device,
            skip_broken=False,
            preprocess=self.preprocess,
            vit=None,
        )
        self.extractor_.model.eval().to(device)
        self._n_features_out = self.extractor_.width
        return self

    def transform(self, X: "Images") -> "NDArray[np.float32]":
        """One row of features for each image.

        >>> from sklearn.datasets import load_digits
        >>> images = load_digits().images[:5] / 16
        >>> len(vitrail.ViTFeatures("runs/digits-1").fit_transform(images))
        5
        """
        check_is_fitted(self)
        batches = load_batches(list_images(X), self.extractor_.preprocess, self.batch)
        rows = [self.extractor_(x) for x in batches]
        return np.concatenate(rows) if rows else np.empty((0, self._n_features_out), np.float32)

    def __sklearn_tags__(self) -> Any:
        tags = _image_tags(super().__sklearn_tags__())
        tags.transformer_tags.preserves_dtype = []  # features are float32, whatever images are
        return tags

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "extractor_" in state:
            one: FeatureExtractor = state["extractor_"]
            state["extractor_"] = _pack_model(one.model, one.preprocess, {})
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if isinstance(packed := state.get("extractor_"), bytes):
            model, metadata = _unpack_model(packed)
            assert metadata.preprocess is not None
            state["extractor_"] = FeatureExtractor(
                model=model.to(pick_device(state["device"])),
                preprocess=metadata.preprocess,
                features=Features(kind=state["features"], layers=tuple(state["layers"])),
                batch=state["batch"],
            )
        super().__setstate__(state)


def _encode_labels(y: Any, count: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The distinct labels, and the index of each sample's label among them."""
    if y is None:
        raise UserError("ViTClassifier requires y to be passed, but the target y is None")
    if np.ndim(y) == 2 and np.shape(y)[1] > 1:
        raise UserError(
            "y has several columns; ViTClassifier learns one label per image: for several, train "
            "on a table with `vitrail.train(table, settings={'data': {'labels': 'multi'}})`"
        )
    y = column_or_1d(y, warn=True)
    check_classification_targets(y)
    if len(y) != count:
        raise UserError(f"X has {count} images and y {len(y)} labels; give one label per image")
    classes, labels = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise UserError(f"y has only one class, {classes[0]!r}; training needs at least 2 classes")
    return classes, labels.astype(np.int64)


def _image_tags(tags: Any) -> Any:
    """Tells scikit-learn that samples are images, not rows of a table."""
    tags.input_tags.two_d_array = False
    tags.input_tags.three_d_array = True
    tags.input_tags.string = True  # paths
    return tags


@contextmanager
def _run_folder(runs: str | Path | None) -> Iterator[Path]:
    """A new run folder in `runs`, or a temporary one."""
    if runs is not None:
        yield files.create_output_folder(None, files.expand_user(runs) / "fit")
        return
    with TemporaryDirectory(prefix="vitrail-") as folder:
        yield Path(folder) / "run"


def _pack_model(model: ViT, preprocess: Preprocess, metadata: Mapping[str, Any]) -> bytes:
    """The content of a model file: safetensors, never a pickle."""
    with TemporaryDirectory(prefix="vitrail-") as folder:
        path = Path(folder) / "model.safetensors"
        save_model(path, model, {**metadata, "preprocess": preprocess.to_dict()})
        return path.read_bytes()


def _unpack_model(content: bytes) -> tuple[ViT, Metadata]:
    with TemporaryDirectory(prefix="vitrail-") as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(content)
        return load_model(path)
