"""Where a model looked: a few of its right answers and its surest mistakes, for the report."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.config import Preprocess
from vitrail.data.image import load_image
from vitrail.data.preprocess import fit, preprocess
from vitrail.data.source import Source
from vitrail.display.page import evenly, packed, uri
from vitrail.errors import UserError
from vitrail.evaluation import metrics
from vitrail.insight.draw import colour, overlaid
from vitrail.insight.explain import explain
from vitrail.model.vit import ViT
from vitrail.run.predictions import Seen

METHOD = "relevance"  # the most faithful of the quick ones on published weights
EACH = 4  # right answers, and wrong ones
SIDE = 220  # pixels of a picture


def reasons(
    model: ViT, view: Preprocess, source: Source, seen: Seen, classes: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Each image, what it was called, and what spoke for that; a wrong one also for the truth."""
    right = np.flatnonzero(seen.right.numpy())
    wrong = metrics.surest_mistakes(seen.probability, seen.predicted, seen.labels, EACH)
    places = evenly(right, EACH) + [mistake.index for mistake in wrong]
    try:
        pictures = [
            load_image(source[int(seen.items[place])].content, view.channels) for place in places
        ]
        x = torch.stack([preprocess(view, picture) for picture in pictures])
        called, truth = (
            explain(model, x, METHOD, target=labels[places])
            for labels in (seen.predicted, seen.labels)
        )
    except UserError:  # unreadable by now, or too few patches to tell apart
        return []
    found = []
    for number, place in enumerate(places):
        pixels, ok = fit(view, pictures[number]), bool(seen.right[place])
        found.append(
            {
                "path": source.ids[int(seen.items[place])],
                "right": ok,
                "label": classes[int(seen.labels[place])],
                "predicted": classes[int(seen.predicted[place])],
                "sure": f"{100 * float(seen.probability[place]):.0f} %",
                "image": shown(colour(pixels)),
                "called": shown(overlaid(pixels, called[number].numpy())),
                "truth": None if ok else shown(overlaid(pixels, truth[number].numpy())),
            }
        )
    return found


def shown(pixels: NDArray[np.uint8]) -> str:
    """A picture as large as the page shows it, with hard edges if it is tiny."""
    image = Image.fromarray(pixels)
    way = Image.Resampling.NEAREST if max(image.size) < SIDE else Image.Resampling.BICUBIC
    scale = SIDE / max(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), way)
    return uri(packed(image, "JPEG", quality=84), "jpeg")
