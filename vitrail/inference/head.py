"""A scikit-learn classifier on the frozen features of a model: fitted, used and saved."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from vitrail.arguments import check_arguments
from vitrail.data.config import Columns, LabelKind, Preprocess
from vitrail.data.open import make_columns, open_data, resolve_data
from vitrail.data.source import SPLITS, EvaluationSplit, Source, fingerprint, is_multi_label
from vitrail.decoding import decode_table
from vitrail.errors import UserError
from vitrail.heads.features import (
    Examples,
    FeatureExtractor,
    FeatureKind,
    Features,
    hash_weights,
)
from vitrail.heads.file import read_head_file, write_head_file
from vitrail.heads.fit import ignore_convergence_warnings
from vitrail.heads.head import Head, fit_head_temperature, has_probabilities
from vitrail.heads.kinds import require_sklearn
from vitrail.inference.classifier import Classifier
from vitrail.inference.multi_label_evaluation import fit_labelling
from vitrail.inference.prediction import ImageInput, Prediction, as_images, is_single_image
from vitrail.inference.torch_predictor import TorchPredictor
from vitrail.model.vit import ViT
from vitrail.training.device import pick_device
from vitrail.zoo import load as zoo
from vitrail.zoo.load import log_weight_changes, missing_preprocess
from vitrail.zoo.metadata import MultiLabel, TrainingData
from vitrail.zoo.weights import Normalisation

if TYPE_CHECKING:
    from vitrail.inference.evaluate import Evaluation
    from vitrail.inference.multi_label_evaluation import MultiLabelEvaluation

# Long annotations are quoted, so that `help` shows the names and not what they stand for.


class HeadNetwork(nn.Module):
    """Preprocessed images in, the logits of a fitted head out."""

    def __init__(self, extractor: FeatureExtractor, head: Head):
        super().__init__()
        self.model, self.extractor, self.head = extractor.model, extractor, head

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.head.logits(self.extractor(x)))


class FeatureClassifier:
    """A scikit-learn classifier on the frozen features of a Vision Transformer.

    `vitrail.head` makes one; `fit` trains it, `save` writes it to a file that `vitrail predict`
    and `vitrail evaluate` accept as `--head`.

    >>> from sklearn.neighbors import NearestCentroid
    >>> classifier = vitrail.head("runs/digits-1", NearestCentroid()).fit("digits")
    >>> classifier.predict("digit.png").label in classifier.classes
    True
    """

    @check_arguments
    def __init__(
        self,
        extractor: FeatureExtractor,
        device: torch.device,
        *,
        estimator: Any = None,
        head: Head | None = None,
    ):
        """
        Args:
            extractor: the model, its preprocessing, and which features the head reads
            device: where the model runs
            estimator: a scikit-learn classifier that `fit` clones
            head: an already fitted head
        """
        extractor.model.eval().to(device)
        self.extractor, self.device = extractor, device
        self.estimator, self.head = estimator, head

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names of the data that the head was fitted on.

        >>> from sklearn.neighbors import NearestCentroid
        >>> vitrail.head("runs/digits-1", NearestCentroid()).fit("digits").classes[-1]
        '9'
        """
        return self._fitted_head().classes

    @property
    def predictor(self) -> TorchPredictor:
        """What turns images into predictions, once the head is fitted.

        >>> from sklearn.neighbors import NearestCentroid
        >>> vitrail.head("runs/digits-1", NearestCentroid()).predictor
        Traceback (most recent call last):
        vitrail.errors.UserError: this head is not fitted yet; call .fit(data) first
        """
        head = self._fitted_head()
        return TorchPredictor(
            network=HeadNetwork(self.extractor, head),
            classes=head.classes,
            preprocess=self.extractor.preprocess,
            device=self.device,
            # logits of heads without probabilities are already divided by the temperature
            temperature=head.temperature if has_probabilities(head.estimator) else 1.0,
            multi_label=None
            if head.labelling is None
            else decode_table(MultiLabel, head.labelling, "labelling"),
            training_data=decode_table(TrainingData, head.data, "data"),
        )

    @check_arguments
    def fit(
        self,
        data: str | Path | Source,
        *,
        columns: Mapping[str, str] | None = None,
        labels: LabelKind | None = None,
    ) -> "FeatureClassifier":
        """Fits the estimator on the training images of `data`, whose classes become the head's.

        Args:
            data: folder, table, shards, built-in name, or what `vitrail.open_data` returned
            columns: the columns of a table, such as {"label": "species"}
            labels: "multi" if an image may have any number of labels: one estimator for each

        >>> from sklearn.neighbors import NearestCentroid
        >>> vitrail.head("runs/digits-1", NearestCentroid()).fit("digits").score("digits") > 0.5
        True
        """
        from sklearn.base import clone

        source, names = open_training_data(data, columns, labels)
        train, val = (self.extractor.extract_split(source, split) for split in SPLITS[:2])
        with ignore_convergence_warnings():
            if is_multi_label(source):
                fitted = [clone(self.estimator).fit(train.x, column) for column in train.y.T]
            else:
                fitted = clone(self.estimator).fit(train.x, train.y)
        origin, kind = describe_head_data(source, data, names), type(self.estimator).__name__
        self.head = make_head(self.extractor, kind, fitted, source, origin, val)
        return self

    # a path is an Iterable[str] for the type checker, and yet one image
    @overload
    def predict(  # type: ignore[overload-overlap]
        self, images: "ImageInput", *, top: int = 5, raw: bool = False
    ) -> Prediction: ...
    @overload
    def predict(
        self, images: "Iterable[ImageInput]", *, top: int = 5, raw: bool = False
    ) -> list[Prediction]: ...
    @check_arguments
    def predict(
        self, images: "ImageInput | Iterable[ImageInput]", *, top: int = 5, raw: bool = False
    ) -> "Prediction | list[Prediction]":
        """Classifies one image, or each of several, like `Classifier.predict`.

        Args:
            images: path, bytes, PIL image or array; or an iterable of them
            top: number of most likely classes in `Prediction.top`
            raw: the estimator's own probabilities instead of calibrated ones

        >>> from sklearn.neighbors import NearestCentroid
        >>> classifier = vitrail.head("runs/digits-1", NearestCentroid()).fit("digits")
        >>> len(classifier.predict(["digit.png", "digit.png"]))
        2
        """
        predictions = self.predictor.predict_images(as_images(images), top=top, raw=raw)
        return predictions[0] if is_single_image(images) else predictions

    @check_arguments
    def predict_each(
        self, images: "Iterable[ImageInput]", *, top: int = 5, raw: bool = False
    ) -> "Iterator[tuple[ImageInput, Prediction | UserError]]":
        """Yields each image with its prediction, or with the error that prevented it.

        >>> from sklearn.neighbors import NearestCentroid
        >>> classifier = vitrail.head("runs/digits-1", NearestCentroid()).fit("digits")
        >>> [type(result).__name__ for image, result in classifier.predict_each(["no.png"])]
        ['UserError']
        """
        return self.predictor.predict_each(images, top, raw)

    @check_arguments
    def evaluate(
        self,
        data: str | Path | Source,
        *,
        split: "EvaluationSplit | None" = None,
        batch: int = 64,
        skip_broken: bool = False,
        columns: Mapping[str, str] | None = None,
        raw: bool = False,
    ) -> "Evaluation | MultiLabelEvaluation":
        """Measures accuracy and calibration on labelled images, like `Classifier.evaluate`.

        >>> from sklearn.neighbors import NearestCentroid
        >>> classifier = vitrail.head("runs/digits-1", NearestCentroid()).fit("digits")
        >>> classifier.evaluate("digits").split
        'test'
        """
        from vitrail.inference.evaluate import evaluate
        from vitrail.inference.labelled_data import open_evaluation_data

        predictor = self.predictor
        source, part = open_evaluation_data(predictor, data, split, columns)
        return evaluate(predictor, source, part, batch=batch, skip_broken=skip_broken, raw=raw)

    @check_arguments
    def score(self, data: str | Path | Source) -> float:
        """Accuracy on the test split of `data`, or on all images if it has none.

        >>> from sklearn.neighbors import NearestCentroid
        >>> vitrail.head("runs/digits-1", NearestCentroid()).fit("digits").score("digits") > 0.5
        True
        """
        return self.evaluate(data).accuracy

    @check_arguments
    def save(self, path: str | Path) -> None:
        """Writes the fitted head to a file, without the model.

        >>> from sklearn.linear_model import LogisticRegression
        >>> vitrail.head("runs/digits-1", LogisticRegression()).fit("digits").save("head.skops")
        """
        write_head_file(path, self._fitted_head())

    def _fitted_head(self) -> Head:
        if self.head is None:
            raise UserError("this head is not fitted yet; call .fit(data) first")
        return self.head

    def __repr__(self) -> str:
        state = "not fitted" if self.head is None else f"{len(self.head.classes)} classes"
        kind = type(self.estimator).__name__ if self.head is None else self.head.kind
        features = self.extractor.features.kind
        return f"FeatureClassifier({kind} on {features} features; {state}; {self.device})"


@check_arguments
def head(
    model: str | Path | Classifier,
    estimator: Any,
    *,
    features: FeatureKind = "pooled",
    layers: Sequence[int] = (),
    batch: int = 64,
    device: str = "auto",
    skip_broken: bool = False,
    preprocess: Normalisation | None = None,
    vit: Mapping[str, Any] | None = None,
) -> FeatureClassifier:
    """Puts a scikit-learn classifier on the frozen features of a model.

    The model does not change. Call `.fit(data)`, then `.predict(images)` and `.evaluate(data)`.

    Args:
        model: run folder, model file, weights with or without a head, or a `Classifier`
        estimator: any scikit-learn classifier; `fit` clones it
        features: input of the model's own head (pooled), its [CLS] token, or the average of the
            patch tokens
        layers: blocks whose features are concatenated, from 0, or from -1 down; by default the
            last one
        batch: images in each forward pass
        device: "cpu", "cuda", "cuda:1", "mps"; "auto" picks a GPU if there is one
        skip_broken: ignore images that cannot be read instead of raising
        preprocess: mean and standard deviation that foreign weights expect, if their file does
            not say
        vit: settings that the file does not contain, or to adapt the model to, such as
            {"image": 384}

    >>> from sklearn.ensemble import RandomForestClassifier
    >>> forest = vitrail.head("runs/digits-1", RandomForestClassifier(20)).fit("digits")
    >>> forest.score("digits") > 0.5
    True
    """
    require_sklearn()
    extractor, chosen = make_extractor(
        model, features, layers, batch, device, skip_broken, preprocess, vit
    )
    return FeatureClassifier(extractor, chosen, estimator=estimator)


@check_arguments
def make_extractor(
    model: str | Path | Classifier,
    features: FeatureKind,
    layers: Sequence[int],
    batch: int,
    device: str,
    skip_broken: bool,
    preprocess: Normalisation | None,
    vit: Mapping[str, Any] | None,
) -> tuple[FeatureExtractor, torch.device]:
    if isinstance(model, Classifier):
        network, view, chosen = model.model, model.preprocess, model.device
    else:
        network, view, chosen = load_frozen_model(model, device, preprocess=preprocess, vit=vit)
    wanted = Features(kind=features, layers=tuple(layers))
    network.block_indices(wanted.layers or None)  # raises before any image is read
    extractor = FeatureExtractor(
        model=network, preprocess=view, features=wanted, batch=batch, skip_broken=skip_broken
    )
    return extractor, chosen


def load_frozen_model(
    path: str | Path,
    device: str,
    *,
    preprocess: Normalisation | None = None,
    vit: Mapping[str, Any] | None = None,
) -> tuple[ViT, Preprocess, torch.device]:
    """Any weights, with or without a head."""
    loaded = log_weight_changes(zoo.load_weights(path, preprocess=preprocess, vit=vit))
    if loaded.preprocess is None:
        raise missing_preprocess(path)
    return loaded.model, loaded.preprocess, pick_device(device)


def load_with_head(
    path: str | Path,
    file: str | Path,
    *,
    device: str = "auto",
    preprocess: Normalisation | None = None,
    vit: Mapping[str, Any] | None = None,
) -> FeatureClassifier:
    """A model with a head that was fitted on its features; refuses a head of other weights."""
    saved = read_head_file(file)
    model, view, chosen = load_frozen_model(path, device, preprocess=preprocess, vit=vit)
    if view.to_dict() != dict(saved.preprocess):
        raise UserError(
            f"the head {file} was fitted on images with other preprocessing; "
            f"use the same image size, or fit it again with `vitrail head`"
        )
    if hash_weights(model) != saved.weights_hash:
        raise UserError(
            f"the head {file} was fitted on features of other weights than {path}; "
            f"fit it again with `vitrail head {path} DATA`"
        )
    extractor = FeatureExtractor(model=model, preprocess=view, features=saved.features)
    return FeatureClassifier(extractor, chosen, head=saved)


def make_head(
    extractor: FeatureExtractor,
    kind: str,
    fitted: Any,
    source: Source,
    data: Mapping[str, Any],
    held_out: Examples,
) -> Head:
    """A fitted estimator with all that is needed to use it again."""
    head = Head(
        kind=kind,
        estimator=fitted,
        classes=tuple(source.classes),
        features=extractor.features,
        width=extractor.width,
        weights_hash=hash_weights(extractor.model),
        preprocess=extractor.preprocess.to_dict(),
        data=data,
    )
    if not is_multi_label(source):
        return replace(
            head, temperature=fit_head_temperature(fitted, len(source.classes), held_out)
        )
    labelling = MultiLabel.plain(len(source.classes))
    if len(held_out):
        logits = torch.from_numpy(head.logits(held_out.x))
        labelling = fit_labelling(logits, torch.from_numpy(held_out.y))
    return replace(head, labelling=asdict(labelling))


def open_training_data(
    data: str | Path | Source, columns: Mapping[str, str] | None, labels: LabelKind | None
) -> tuple[Source, Columns]:
    names = make_columns(columns)
    if not isinstance(data, str | Path):
        return data, names
    source = open_data(data, columns=names, labels=labels)
    return source, names


def describe_head_data(
    source: Source, data: str | Path | Source, columns: Columns
) -> dict[str, Any]:
    """What a head's file says about the data it was fitted on."""
    return {
        "name": source.name,
        "source": resolve_data(data) if isinstance(data, str | Path) else str(source.path or ""),
        "columns": {name: value for name, value in vars(columns).items() if value is not None},
        "fingerprint": fingerprint(source),
    }
