"""Heatmaps for the report: what a few predictions and the most confident errors are based on."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.config import Preprocess
from vitrail.data.image import load_image
from vitrail.data.preprocess import preprocess, resize_and_crop
from vitrail.data.source import Source
from vitrail.display.page import data_uri, encode_image, pick_evenly, stretch_to_uint8
from vitrail.display.text import format_percent
from vitrail.errors import UserError
from vitrail.evaluation import metrics
from vitrail.insight.explain import explain
from vitrail.insight.overlay import overlay_heatmap, to_rgb
from vitrail.model.vit import ViT
from vitrail.run.storage.predictions import SplitPredictions

METHOD = "relevance"  # the most faithful of the fast methods on published weights
SAMPLES = 4  # of correct predictions, and as many errors
SIDE = 220  # pixels of an image on the page


def explain_samples(
    model: ViT,
    settings: Preprocess,
    source: Source,
    predictions: SplitPredictions,
    classes: tuple[str, ...],
) -> list[dict[str, Any]]:
    """Images with heatmaps for the predicted class; for an error also for the true class."""
    correct = np.flatnonzero(predictions.correct.numpy())
    errors = metrics.most_confident_errors(
        predictions.calibrated, predictions.predicted, predictions.labels, SAMPLES
    )
    indices = pick_evenly(correct, SAMPLES) + [error.index for error in errors]
    try:
        images = [
            load_image(
                source[int(predictions.items[index])].content, settings.channels, settings.pixels
            )
            for index in indices
        ]
        x = torch.stack([preprocess(settings, image) for image in images])
        for_predicted, for_label = (
            explain(model, x, METHOD, target=labels[indices])
            for labels in (predictions.predicted, predictions.labels)
        )
    except UserError:  # an image has become unreadable, or the model has too few patches
        return []
    samples = []
    for number, index in enumerate(indices):
        pixels = stretch_to_uint8(resize_and_crop(settings, images[number]))
        is_correct = bool(predictions.correct[index])
        samples.append(
            {
                "path": source.ids[int(predictions.items[index])],
                "correct": is_correct,
                "label": classes[int(predictions.labels[index])],
                "predicted": classes[int(predictions.predicted[index])],
                "confidence": f"{100 * float(predictions.calibrated[index]):.0f} %",
                "image": embed_image(to_rgb(pixels)),
                "for_predicted": embed_image(
                    overlay_heatmap(pixels, for_predicted[number].numpy())
                ),
                "for_label": None
                if is_correct
                else embed_image(overlay_heatmap(pixels, for_label[number].numpy())),
            }
        )
    return samples


def explain_labels(
    model: ViT,
    settings: Preprocess,
    source: Source,
    items: NDArray[np.int64],
    likely: Tensor,
    confidence: Tensor,
    labels: Tensor,
    classes: tuple[str, ...],
) -> list[dict[str, Any]]:
    """Images of a multi-label run with the heatmap of their most likely label."""
    indices = pick_evenly(np.arange(len(items)), SAMPLES)
    samples = []
    for index in indices:
        try:
            content = source[int(items[index])].content
            image = load_image(content, settings.channels, settings.pixels)
            x = preprocess(settings, image)[None]
            heatmap = explain(model, x, METHOD, target=likely[index : index + 1])[0].numpy()
        except UserError:  # an image has become unreadable, or the model has too few patches
            continue
        pixels, target = stretch_to_uint8(resize_and_crop(settings, image)), int(likely[index])
        names = [classes[k] for k in labels[index].nonzero()[:, 0].tolist()]
        samples.append(
            {
                "path": source.ids[int(items[index])],
                "correct": bool(labels[index, target]),
                "label": classes[target] if labels[index, target] else ", ".join(names) or "none",
                "predicted": classes[target],
                "confidence": format_percent(float(confidence[index]) % 1),
                "image": embed_image(to_rgb(pixels)),
                "for_predicted": embed_image(overlay_heatmap(pixels, heatmap)),
                "for_label": None,
            }
        )
    return samples


def embed_image(pixels: NDArray[np.uint8]) -> str:
    """An image at the size shown on the page, as a data URI; enlarged without smoothing."""
    image = Image.fromarray(pixels)
    method = Image.Resampling.NEAREST if max(image.size) < SIDE else Image.Resampling.BICUBIC
    scale = SIDE / max(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), method)
    return data_uri(encode_image(image, "JPEG", quality=84), "jpeg")
