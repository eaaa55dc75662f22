"""A model with its classes and preprocessing: what `vitrail.load` returns.

Importing this module does not import torch: exported models are classifiers too.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from vitrail.arguments import check_arguments
from vitrail.data.config import CorruptionScope, Preprocess
from vitrail.data.source import EvaluationSplit, Source
from vitrail.errors import UserError
from vitrail.exporting.engine import PixelKind
from vitrail.exporting.formats import FormatName
from vitrail.inference.prediction import (
    ImageInput,
    Prediction,
    as_images,
    class_index,
    is_single_image,
    name_image_in_errors,
)
from vitrail.inference.predictor import Predictor
from vitrail.zoo.metadata import Metadata, decode_metadata

if TYPE_CHECKING:
    import torch

    from vitrail.exporting.export import Export
    from vitrail.inference.evaluate import Evaluation
    from vitrail.inference.multi_label_evaluation import MultiLabelEvaluation
    from vitrail.insight.explanation import Explanation
    from vitrail.model.vit import ViT

# Long annotations are quoted, so that `help` shows the names and not what they stand for.


class NoHead(UserError):
    """The model is a backbone: it has features, and no classes."""


class Classifier:
    """A Vision Transformer that predicts, evaluates and explains.

    Images are paths, bytes, PIL images or arrays of height x width x channels. Probabilities are
    calibrated by the temperature that training fitted on validation images; `raw=True` gives the
    plain softmax. Weights from other libraries have no temperature, so both are the same.

    >>> classifier = vitrail.load("runs/digits-1")
    >>> classifier
    Classifier(10 classes: 0, 1, 2, 3, 4, ...; 8 x 8 pixels, 1 channel; temperature ...; cpu)
    >>> classifier.predict("digit.png").label in classifier.classes
    True
    """

    predictor: Predictor

    @check_arguments
    def __init__(
        self,
        model: "ViT",
        classes: Sequence[str],
        preprocess: Preprocess,
        metadata: Metadata | Mapping[str, Any] | None = None,
        device: "str | torch.device" = "auto",
    ):
        """
        Args:
            model: a ViT with a head
            classes: one name for each output of the head
            preprocess: how images become the input of the model
            metadata: what the model file says, such as the temperature
            device: "cpu", "cuda", "cuda:1", "mps"; "auto" picks a GPU if there is one
        """
        from vitrail.inference.torch_predictor import TorchPredictor
        from vitrail.training.device import pick_device

        if model.config.head == "none":
            raise NoHead(describe_no_head("this model", "MODEL"))
        if len(classes) != model.config.classes:
            count = model.config.classes
            raise UserError(f"{len(classes)} names for {count} classes; give one for each class")
        self.device = pick_device(device) if isinstance(device, str) else device
        self.model = model.eval().to(self.device)
        self.classes = tuple(classes)
        self.preprocess = preprocess
        self.metadata = (
            metadata if isinstance(metadata, Metadata) else decode_metadata(metadata or {})
        )
        self.predictor = TorchPredictor(
            network=self.model,
            classes=self.classes,
            preprocess=preprocess,
            device=self.device,
            temperature=self.metadata.temperature,
            multi_label=self.metadata.labelling(len(self.classes)),
            training_data=self.metadata.data,
            calibration=self.metadata.calibration,
        )

    @property
    def temperature(self) -> float | None:
        """Divides the logits to calibrate probabilities; None if it was not fitted.

        >>> vitrail.load("runs/digits-1").temperature > 0
        True
        """
        return self.predictor.temperature

    # a path is an Iterable[str] for the type checker, and yet one image
    @overload
    def predict(  # type: ignore[overload-overlap]
        self,
        images: "ImageInput",
        *,
        top: int = 5,
        raw: bool = False,
        coverage: float | None = None,
        abstain: float | None = None,
    ) -> Prediction: ...
    @overload
    def predict(
        self,
        images: "Iterable[ImageInput]",
        *,
        top: int = 5,
        raw: bool = False,
        coverage: float | None = None,
        abstain: float | None = None,
    ) -> list[Prediction]: ...
    @check_arguments
    def predict(
        self,
        images: "ImageInput | Iterable[ImageInput]",
        *,
        top: int = 5,
        raw: bool = False,
        coverage: float | None = None,
        abstain: float | None = None,
    ) -> "Prediction | list[Prediction]":
        """Classifies one image, or each of several.

        Args:
            images: path, bytes, PIL image or array; or an iterable of them
            top: number of most likely classes in `Prediction.top`
            raw: plain softmax instead of calibrated probabilities
            coverage: also give the set of classes that contains the true one with this
                probability, such as 0.95
            abstain: do not answer where more than this fraction of the answers would be wrong,
                such as 0.01

        >>> classifier = vitrail.load("runs/digits-1")
        >>> classifier.predict("digit.png", top=3)
        Prediction(...)
        >>> len(classifier.predict(["digit.png", "digit.png"]))
        2
        """
        promise = self.predictor.promise(coverage, abstain)
        predictions = self.predictor.predict_images(
            as_images(images), top=top, raw=raw, promise=promise
        )
        return predictions[0] if is_single_image(images) else predictions

    @check_arguments
    def predict_each(
        self,
        images: "Iterable[ImageInput]",
        *,
        top: int = 5,
        raw: bool = False,
        coverage: float | None = None,
        abstain: float | None = None,
    ) -> "Iterator[tuple[ImageInput, Prediction | UserError]]":
        """Yields each image with its prediction, or with the error that prevented it.

        Only a few images are in memory at once, so this suits any number of them.

        >>> classifier = vitrail.load("runs/digits-1")
        >>> for image, result in classifier.predict_each(["digit.png", "missing.png"]):
        ...     print(image, type(result).__name__)
        digit.png Prediction
        missing.png UserError
        """
        promise = self.predictor.promise(coverage, abstain)
        return self.predictor.predict_each(images, top, raw, promise)

    @check_arguments
    def with_views(self, views: int) -> Self:
        """The same classifier, whose logits are the mean over several views of each image.

        Its temperature, prediction sets and abstention are fitted again, on the validation images
        of the training data. It does not flag odd images.

        Args:
            views: 1 is the image, 2 adds its mirror image, up to 10 add shifts by a few pixels

        >>> classifier = vitrail.load("runs/digits-1").with_views(2)
        >>> classifier.evaluate("digits").views
        2
        """
        from vitrail.inference.views import add_views

        other = copy(self)
        other.predictor = add_views(self.predictor, views)
        return other

    @check_arguments
    def probabilities(
        self, images: "ImageInput | Iterable[ImageInput]", *, raw: bool = False
    ) -> "NDArray[np.float32]":
        """The probability of every class: one row for each image, one column for each class.

        >>> classifier = vitrail.load("runs/digits-1")
        >>> classifier.probabilities(["digit.png", "digit.png"]).shape
        (2, 10)
        """
        return self.predictor.probabilities(as_images(images), raw=raw)

    @check_arguments
    def features(self, images: "ImageInput | Iterable[ImageInput]") -> "NDArray[np.float32]":
        """The input of the head: one vector for each image.

        >>> classifier = vitrail.load("runs/digits-1")
        >>> classifier.features("digit.png").shape == (1, classifier.model.config.feature_width)
        True
        """
        import torch

        from vitrail.inference.torch_predictor import TorchPredictor
        from vitrail.inference.views import without_views

        predictor = without_views(self.predictor)
        rows = [np.empty((0, self.model.config.feature_width), np.float32)]
        assert isinstance(predictor, TorchPredictor)
        for x in predictor.batches(as_images(images)):
            with torch.inference_mode(), predictor.autocast():
                tokens = self.model.encode(torch.from_numpy(x).to(self.device))
                rows.append(self.model.pool(tokens).float().cpu().numpy())
        return np.concatenate(rows)

    @check_arguments
    def evaluate(
        self,
        data: "str | Path | Source",
        *,
        split: "EvaluationSplit | None" = None,
        batch: int = 64,
        skip_broken: bool = False,
        columns: Mapping[str, str] | None = None,
        raw: bool = False,
        coverage: float | None = None,
        abstain: float | None = None,
        corruptions: "CorruptionScope | None" = None,
        foreign: "str | Path | Source | None" = None,
    ) -> "Evaluation | MultiLabelEvaluation":
        """Measures accuracy and calibration on labelled images.

        Args:
            data: folder, table, shards, built-in name, or what `vitrail.open_data` returned
            split: train, val, test or all; by default the test split, or all images of data that
                has none
            batch: images in each forward pass
            skip_broken: ignore images that cannot be read instead of raising
            columns: the columns of a table, such as {"label": "species"}; by default as in training
            raw: log-loss, calibration error and confidence of the plain softmax
            coverage: promised coverage of the prediction sets that are measured; by default 0.95
            abstain: promised error rate of the abstention that is measured; by default 0.01
            corruptions: also measure the accuracy under 15 common corruptions and three more:
                "quick" on 100 images at two strengths, "full" on up to 1000 images at five
            foreign: also measure how well images of this other kind are recognised as odd

        >>> classifier = vitrail.load("runs/digits-1")
        >>> evaluation = classifier.evaluate("digits")
        >>> evaluation.interval[0] < evaluation.accuracy < evaluation.interval[1]
        True
        """
        from vitrail.inference.evaluate import evaluate
        from vitrail.inference.labelled_data import open_evaluation_data

        source, part = open_evaluation_data(self.predictor, data, split, columns)
        return evaluate(
            self.predictor,
            source,
            part,
            batch=batch,
            skip_broken=skip_broken,
            raw=raw,
            coverage=coverage,
            abstain=abstain,
            corruptions=corruptions,
            foreign=foreign,
        )

    @check_arguments
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
        """Computes which patches of an image support its predicted class, or `target`.

        Args:
            image: path, bytes, PIL image or array
            target: name or index of the class to explain; by default the predicted one
            method: relevance, gradient-rollout, grad-cam, rollout, attention or occlusion; best is
                the most faithful of the first five on this image
            occlusion: compute occlusion too, which takes hundreds of forward passes
            layers: blocks whose attention is drawn; by default a selection
            heads: attention heads that are drawn; by default all
            raw: plain softmax instead of calibrated probabilities
            max_bytes: size limit of the attention maps on the page; by default 3 MB

        >>> explanation = vitrail.load("runs/digits-1").explain("digit.png")
        >>> explanation.heatmap.shape == explanation.grid
        True
        """
        from vitrail.data.image import load_image
        from vitrail.data.preprocess import preprocess, resize_and_crop
        from vitrail.display.page import stretch_to_uint8
        from vitrail.insight.explanation import explain_image
        from vitrail.insight.patch_attention import MAX_BYTES

        with name_image_in_errors(image, 1):
            pixels = load_image(image, self.preprocess.channels, self.preprocess.pixels)
        return explain_image(
            self.model,
            preprocess(self.preprocess, pixels)[None].to(self.device),
            stretch_to_uint8(resize_and_crop(self.preprocess, pixels)),
            self.classes,
            name=str(image) if isinstance(image, str | Path) else "image",
            target=None if target is None else self.index(target),
            method=method,
            occlusion=occlusion,
            layers=layers,
            heads=heads,
            max_bytes=MAX_BYTES if max_bytes is None else max_bytes,
            temperature=None if raw else self.temperature,
            multi_label=self._link(raw),
        )

    def _link(self, raw: bool) -> "tuple[Sequence[float], Sequence[float]] | None":
        """Slope and intercept of each label of a multi-label model; None for others."""
        labelling = self.predictor.multi_label
        if labelling is None:
            return None
        if raw:
            return [1.0] * len(self.classes), [0.0] * len(self.classes)
        return labelling.slopes, labelling.intercepts

    @check_arguments
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
        """Writes the model for another runtime, proved equal to PyTorch before the file exists.

        The same images go through both: those of `data`, else the validation images of the run,
        else generated ones. A proof card is written beside the file, as JSON and as a page.

        Args:
            out: file to write, for triton a folder; by default the name of the model, here
            to: onnx, openvino, torch or triton; by default what the suffix of `out` says, else onnx
            int8: quantise weights and activations to 8 bits
            attention: also return the attention weights of every block
            features: also return the pooled features
            odd: also return the features that tell odd images, so that predictions flag them;
                not for int8
            pixels: float32 for normalised images; uint8 if the file is to normalise them
            any_size: accept images of any size that patches tile; not for learned positions
            data: images to compare on: a folder, table, shards or built-in name; labelled for int8
            most: percentage points of accuracy that int8 may lose
            force: write the int8 file even if it loses more
            overwrite: replace an existing file
            name: the model's name in a Triton repository

        >>> vitrail.load("runs/digits-1").export("small.onnx")  # doctest: +SKIP
        Export(small.onnx, ... kB, largest difference ..., agreement 100 %, ... x the speed of ...)
        """
        from vitrail.inference.export import export_classifier

        return export_classifier(
            self,
            out,
            to=to,
            int8=int8,
            attention=attention,
            features=features,
            pixels=pixels,
            odd=odd,
            any_size=any_size,
            data=data,
            most=most,
            force=force,
            overwrite=overwrite,
            name=name,
        )

    @check_arguments
    def index(self, name: str | int) -> int:
        """The index of a class, given its name, one of its comma-separated names, or its index.

        >>> vitrail.load("runs/digits-1").index("7")
        7
        """
        return class_index(self.classes, name)

    def __repr__(self) -> str:
        names = ", ".join(self.classes[:SHOWN_CLASSES])
        names += ", ..." if len(self.classes) > SHOWN_CLASSES else ""
        view = self.preprocess
        channels = f"{view.channels} channel{'s' * (view.channels != 1)}"
        temperature = "none" if self.temperature is None else f"{self.temperature:.3g}"
        return (
            f"{type(self).__name__}({len(self.classes)} classes: {names}; "
            f"{view.height} x {view.width} pixels, {channels}; "
            f"temperature {temperature}; {self._where()})"
        )

    def _where(self) -> str:
        """What computes the logits, for the repr."""
        return str(self.device)


SHOWN_CLASSES = 5  # in the repr


def describe_no_head(subject: str, model: str) -> str:
    advice = (
        "train it with `vitrail train DATA --from MODEL`, fit a classifier on its features with "
        "`vitrail head MODEL DATA`, or load it with `vitrail.load_backbone`"
    )
    return f"{subject} has no classification head; {advice.replace('MODEL', model)}"
