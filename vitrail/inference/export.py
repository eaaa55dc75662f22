"""Exports a classifier, with images of its data set as proof: `vitrail.export`."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail import files
from vitrail.arguments import check_arguments
from vitrail.data.config import Preprocess
from vitrail.data.image import load_image
from vitrail.data.open import open_data
from vitrail.data.preprocess import resize_and_crop
from vitrail.data.source import Source, split_indices
from vitrail.display.page import pick_evenly
from vitrail.display.progress import progress_bar
from vitrail.display.text import format_count
from vitrail.errors import UserError
from vitrail.exporting.engine import ENGINE_SUFFIXES, PixelKind
from vitrail.exporting.export import MOST_LOST, Export, export_model
from vitrail.exporting.formats import FORMATS, FormatName
from vitrail.inference.classifier import Classifier
from vitrail.inference.labelled_data import open_evaluation_data
from vitrail.inference.load import make_classifier
from vitrail.inference.verify import check_same_answers
from vitrail.zoo.files.find import STANDARD_FILES, WEIGHT_SUFFIXES
from vitrail.zoo.load import LoadedModel, load_weights, log_weight_changes, missing_preprocess
from vitrail.zoo.weights import Normalisation

log = logging.getLogger(__name__)

PROOF_IMAGES = 256  # of the data set that are compared
INT8_IMAGES = 2048  # accuracies need more: half a point is one image of 200
MAP_IMAGES = 32  # with attention maps, which take megabytes for each image

ProofImages = tuple[NDArray[np.uint8], NDArray[np.int64] | None]


@check_arguments
def export(
    model: str | Path,
    out: str | Path | None = None,
    *,
    to: FormatName | None = None,
    int8: bool = False,
    attention: bool = False,
    features: bool = False,
    odd: bool = False,
    pixels: PixelKind = "float32",
    any_size: bool = False,
    data: str | Path | Source | None = None,
    most: float = MOST_LOST,
    force: bool = False,
    overwrite: bool = False,
    name: str | None = None,
    preprocess: Normalisation | None = None,
    vit: Mapping[str, Any] | None = None,
) -> Export:
    """Writes a model for another runtime, proved equal to PyTorch before the file exists.

    Unlike `Classifier.export` this also exports weights without a head, which return features.

    Args:
        model: run folder, weight file or folder, name of published weights, or "hf:owner/name"
        out: file to write, for triton a folder; by default the name of the model, here
        to: onnx, openvino, torch or triton; by default what the suffix of `out` says, else onnx
        int8: quantise weights and activations to 8 bits
        attention: also return the attention weights of every block
        features: also return the pooled features
        odd: also return the features that tell odd images, so that predictions flag them; not
            for int8
        pixels: float32 for normalised images; uint8 if the file is to normalise them
        any_size: accept images of any size that patches tile; not for learned positions
        data: images to compare on: a folder, table, shards or built-in name; labelled for int8
        most: percentage points of accuracy that int8 may lose
        force: write the int8 file even if it loses more
        overwrite: replace an existing file
        name: the model's name in a Triton repository
        preprocess: mean and standard deviation that foreign weights expect, if their file does
            not say
        vit: settings that the file does not contain, such as {"heads": 6}, or to adapt the
            model to, such as {"image": 384}

    >>> exported = vitrail.export("runs/digits-1", "bytes.onnx", pixels="uint8")
    >>> exported.agreement
    1.0
    """
    settings: dict[str, Any] = {
        **{"int8": int8, "attention": attention, "features": features, "pixels": pixels},
        **{"odd": odd, "any_size": any_size, "most": most, "force": force, "overwrite": overwrite},
    }
    if Path(model).suffix.lower() in ENGINE_SUFFIXES:
        raise UserError(
            f"{model} is an exported model; give the run or weight file that it was exported from"
        )
    name = name or name_model(model)
    loaded = log_weight_changes(load_weights(model, preprocess=preprocess, vit=vit))
    if loaded.model.config.head == "none":
        return export_backbone(loaded, out, data, source=str(model), to=to, name=name, **settings)
    classifier = make_classifier(loaded, path=model, device="cpu")
    return export_classifier(
        classifier, out, to=to, data=data, name=name, source=str(model), **settings
    )


def export_classifier(
    classifier: Classifier,
    out: str | Path | None,
    *,
    to: FormatName | None,
    data: str | Path | Source | None,
    name: str | None,
    source: str = "",
    **settings: Any,
) -> Export:
    """Exports a classifier; `settings` are those of `export_model`."""
    check_same_answers(classifier, source or "the model")
    name = name or name_model(source or classifier.metadata.name or "model")
    to, target = choose_target(out, to, name)
    images, labels = choose_proof_images(classifier, data, count_images(settings)) or (None, None)
    labelling = classifier.predictor.multi_label
    return export_model(
        classifier.model,
        target,
        classes=classifier.classes,
        preprocess=classifier.preprocess,
        metadata=classifier.metadata.document,
        images=images,
        labels=labels,
        rule=None if labelling is None else np.array(labelling.rule()),
        source=source,
        to=to,
        name=name,
        **settings,
    )


def export_backbone(
    loaded: LoadedModel,
    out: str | Path | None,
    data: str | Path | Source | None,
    *,
    source: str,
    to: FormatName | None,
    name: str,
    **settings: Any,
) -> Export:
    """Exports weights without a head, which return features."""
    if loaded.preprocess is None:
        raise missing_preprocess(source)
    to, target = choose_target(out, to, name)
    images = None
    if data is not None:
        opened = open_data(data, split=False) if isinstance(data, str | Path) else data
        chosen = pick_evenly(np.arange(len(opened)), count_images(settings))
        images, _ = read_images(opened, chosen, loaded.preprocess)
    return export_model(
        loaded.model,
        target,
        classes=(),
        preprocess=loaded.preprocess,
        metadata=loaded.metadata.document,
        images=images,
        source=source,
        to=to,
        name=name,
        **settings,
    )


def choose_target(
    out: str | Path | None, to: FormatName | None, name: str
) -> tuple[FormatName, Path]:
    """The format and the path of an export, each by default what the other says."""
    if to is not None and to not in FORMATS:
        raise UserError(f"unknown format {to!r}; choose {', '.join(FORMATS)}")
    if to is None:
        suffix = Path(out).suffix.lower() if out is not None else ""
        known: dict[str, FormatName] = {".xml": "openvino", ".pt2": "torch"}
        to = known.get(suffix, "onnx")
    if out is None:
        return to, Path("repository" if to == "triton" else f"{name}{FORMATS[to].suffix}")
    return to, files.expand_user(out)


def name_model(path: str | Path) -> str:
    """The name of a model: of its run folder, weight file, or published weights."""
    text = str(path)
    if text.startswith("hf:"):
        text = text.removeprefix("hf:").partition("@")[0]
    place = files.expand_user(text)
    if place.name in STANDARD_FILES:  # the same name in every folder
        place = place.resolve().parent
    if place.exists():
        place = place.resolve()
    stem = place.stem if place.suffix in WEIGHT_SUFFIXES else place.name
    return re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "model"


def count_images(settings: Mapping[str, Any]) -> int:
    if settings["attention"]:
        return MAP_IMAGES
    return INT8_IMAGES if settings["int8"] else PROOF_IMAGES


def choose_proof_images(
    classifier: Classifier, data: str | Path | Source | None, count: int
) -> ProofImages | None:
    """Labelled images of `data`, else validation images of the run; None if there are none."""
    if data is not None:
        source, split = open_evaluation_data(classifier.predictor, data, None)
        return read_images(
            source, pick_evenly(split_indices(source, split), count), classifier.preprocess
        )
    origin = classifier.metadata.data.source
    if not origin:
        return None
    try:
        source, _ = open_evaluation_data(classifier.predictor, origin, "val")
    except UserError as error:
        log.info(f"cannot read the training data of this model: {error}")
        return None
    return read_images(
        source, pick_evenly(split_indices(source, "val"), count), classifier.preprocess
    )


def read_images(source: Source, items: list[int], preprocess: Preprocess) -> ProofImages:
    """Cropped images, uint8 (N, C, H, W), and their labels; unreadable ones are skipped."""
    images, labels, broken = [], [], 0
    with progress_bar("reading images", len(items)) as advance:
        for item in items:
            try:
                pixels = load_image(source[item].content, preprocess.channels, preprocess.pixels)
            except UserError:
                broken += 1
            else:
                images.append(resize_and_crop(preprocess, pixels).transpose(2, 0, 1))
                labels.append(source.labels[item])
            advance(1)
    if broken:
        log.warning(f"skipped {format_count(broken, 'image')} of {source.name}: unreadable")
    if not images:
        raise UserError(f"{source.name} has no images that can be read; give other `data`")
    return np.stack(images), np.array(labels, np.int64)
