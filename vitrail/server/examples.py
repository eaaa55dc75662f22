"""Examples for the page: a few validation images of the run that is served."""

import logging
from pathlib import Path
from typing import Any

from vitrail.data.image import load_image
from vitrail.display.page import make_thumbnail, pick_evenly
from vitrail.errors import UserError
from vitrail.server.model import ServedModel

log = logging.getLogger(__name__)

RECIPE = "recipe.toml"  # of a run folder; a lone model file has no examples
SIDE = 448  # pixels, at most


def read_examples(model: ServedModel, count: int) -> list[dict[str, Any]]:
    """Images with their labels, evenly chosen; none if the data of the run are gone."""
    from vitrail.data.source import split_indices
    from vitrail.inference.labelled_data import open_evaluation_data

    place, source = Path(model.path), model.document.get("data", {}).get("source")
    if not count or not source or not (place / RECIPE).is_file():
        return []
    try:
        data, _ = open_evaluation_data(model.predictor, source, "val")
        items = [data[number] for number in pick_evenly(split_indices(data, "val"), count)]
        channels = model.classifier.preprocess.channels
        return [
            {
                "label": model.classifier.classes[item.label],
                **make_thumbnail(load_image(item.content, channels), SIDE),
            }
            for item in items
        ]
    except UserError as error:
        log.info(f"the page shows no examples: {error}")
        return []
