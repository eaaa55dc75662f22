"""Calibrates a model with labelled images: temperature, prediction sets, abstention, odd images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail import files
from vitrail.arguments import check_arguments
from vitrail.data.config import DataConfig
from vitrail.data.loader import Loader
from vitrail.data.source import Source, Split, split_indices
from vitrail.display.progress import progress_bar
from vitrail.errors import UserError
from vitrail.evaluation.calibration import Calibration, fit_calibration
from vitrail.evaluation.loop import compute_logits
from vitrail.evaluation.metrics import fit_temperature
from vitrail.inference.classifier import Classifier
from vitrail.inference.labelled_data import open_with_classes
from vitrail.inference.load import load
from vitrail.inference.torch_predictor import LogitsAndFeatures, TorchPredictor
from vitrail.model.config import ViTConfig
from vitrail.model.cost import count_macs
from vitrail.training.learner import compute_dtype
from vitrail.zoo.file import save_model
from vitrail.zoo.metadata import decode_metadata
from vitrail.zoo.reference import compute_reference, describe_reference
from vitrail.zoo.weights import Normalisation

# Training images whose features are computed: as many as cost about 1e12 multiply-adds, which two
# CPU cores compute in about 20 seconds.
MAX_MACS, MIN_REFERENCE, MAX_REFERENCE = 10**12, 256, 10_000


def count_reference_images(config: ViTConfig) -> int:
    """How many training images a model is compared with to recognise odd ones."""
    return max(MIN_REFERENCE, min(MAX_REFERENCE, MAX_MACS // max(1, count_macs(config))))


@check_arguments
def calibrate(
    model: str | Path,
    data: str | Path | Source,
    *,
    out: str | Path | None = None,
    batch: int = 64,
    device: str = "auto",
    skip_broken: bool = False,
    preprocess: Normalisation | None = None,
    vit: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
) -> Classifier:
    """Calibrates a model with labelled images that it was not trained on.

    Fits the temperature, prediction sets and abstention on the validation images of `data`, and
    compares their features with those of its training images, to recognise odd ones. If `data` has
    no splits, all of its images serve, every second one as a training image. `vitrail.train` does
    this for its models.

    Args:
        model: run folder, weight file or folder, name of published weights, or "hf:owner/name"
        data: folder, table, shards, built-in name, or what `vitrail.open_data` returned
        out: model file to write; by default the result is only returned
        batch: images in each forward pass
        device: "cpu", "cuda", "cuda:1", "mps"; "auto" picks a GPU if there is one
        skip_broken: ignore images that cannot be read instead of raising
        preprocess: mean and standard deviation that foreign weights expect, if their file does
            not say
        vit: settings that the file does not contain, such as {"heads": 6}, or to adapt the
            model to, such as {"image": 384}
        columns: the columns of a table, such as {"label": "species"}

    >>> classifier = vitrail.calibrate("runs/digits-1", "digits", out="calibrated.safetensors")
    >>> classifier.predict("digit.png", coverage=0.9).set
    (...)
    """
    path = None if out is None else files.expand_user(out)
    if path is not None and path.suffix != ".safetensors":
        raise UserError(f"`out` is {path}; give the name of a file that ends in .safetensors")
    classifier = load(model, device=device, preprocess=preprocess, vit=vit)
    calibrated = calibrate_classifier(
        classifier, data, batch=batch, skip_broken=skip_broken, columns=columns
    )
    if path is not None:
        save_model(path, calibrated.model, calibrated.metadata.document)
    return calibrated


def calibrate_classifier(
    classifier: Classifier,
    data: str | Path | Source,
    *,
    batch: int = 64,
    skip_broken: bool = False,
    columns: Mapping[str, str] | None = None,
) -> Classifier:
    """The same model with a temperature and calibration from the images of `data`."""
    predictor = classifier.predictor
    if not isinstance(predictor, TorchPredictor):
        raise UserError("an exported model cannot be calibrated; calibrate the model, then export")
    source, _ = open_with_classes(predictor, data, columns)
    config = DataConfig(skip_broken=skip_broken, disk_gb=0)
    loader = Loader(source, classifier.preprocess, config, batch=batch, device=predictor.device)
    network = LogitsAndFeatures(classifier.model)
    limit = count_reference_images(classifier.model.config)
    if len(split_indices(source, "val")):
        outputs, labels = compute_outputs(network, loader, "val")
        known = outputs
        train = None
        if len(split_indices(source, "train")):
            train, _ = compute_outputs(network, loader, "train", limit)
    elif len(split_indices(source, "test")) == len(source):  # the data has no splits
        outputs, labels = compute_outputs(network, loader, "test")
        train, known = outputs[::2], outputs[1::2]
    else:
        raise UserError(f"{source.name} has no validation images; add a split named val")
    calibration, temperature = fit_outputs(
        outputs, labels, len(classifier.classes), source.name, train, known
    )
    reference = compute_reference(classifier.model, classifier.preprocess)
    document = {
        **classifier.metadata.drop("checksums").document,
        "classes": list(classifier.classes),
        "preprocess": classifier.preprocess.to_dict(),
        "temperature": temperature,
        "calibration": calibration.to_dict(),
        "reference": describe_reference(reference),
    }
    return Classifier(
        classifier.model,
        classifier.classes,
        classifier.preprocess,
        decode_metadata(document),
        predictor.device,
    )


def compute_outputs(
    network: LogitsAndFeatures,
    loader: Loader,
    split: Split,
    limit: int | None = None,
    *,
    quiet: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logits with features, and labels, of a split or of `limit` evenly spaced images of it."""
    count = len(split_indices(loader.source, split))
    batches = ((one.images, one.labels) for one in loader.evaluation(split, limit=limit))
    dtype = compute_dtype("auto", loader.device)
    if quiet:
        return compute_logits(network, batches, dtype)
    with progress_bar("calibrating", min(count, limit or count)) as advance:
        return compute_logits(network, batches, dtype, advance)


def fit_outputs(
    outputs: Tensor,
    labels: Tensor,
    classes: int,
    data: str,
    train: Tensor | None,
    known: Tensor | None = None,
) -> tuple[Calibration, float]:
    """The calibration and the temperature, from outputs of validation and training images."""
    logits, known = outputs[:, :classes], outputs if known is None else known
    temperature = fit_temperature(logits, labels)
    calibration = fit_calibration(
        logits.numpy(),
        labels.numpy(),
        temperature,
        data,
        None if train is None else train.numpy(),
        known.numpy(),
    )
    return calibration, temperature
