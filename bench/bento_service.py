"""The model in BentoML, as its documentation shows it: one image a call, and adaptive batching."""

import os
from typing import Any

import bentoml
import numpy as np
from PIL import Image

BATCH = 16


def load_predictor() -> Any:
    import vitrail

    return vitrail.load(os.environ["BENTO_MODEL"], device="cpu").predictor


@bentoml.service(workers=1, traffic={"timeout": 60})
class Classifier:
    """One image a call."""

    def __init__(self) -> None:
        self.predictor = load_predictor()

    @bentoml.api
    def classify(self, image: Image.Image) -> dict[str, Any]:
        (row,) = self.predictor.logits(self.predictor.load(image)[None])
        answer: dict[str, Any] = self.predictor.prediction(row, 1).to_dict()
        return answer


@bentoml.service(workers=1, traffic={"timeout": 60})
class Batching:
    """BentoML's adaptive batching."""

    def __init__(self) -> None:
        self.predictor = load_predictor()

    @bentoml.api(batchable=True, max_batch_size=BATCH, max_latency_ms=10_000)
    def classify(self, image: list[Image.Image]) -> list[dict[str, Any]]:
        rows = self.predictor.logits(np.stack([self.predictor.load(one) for one in image]))
        return [self.predictor.prediction(row, 1).to_dict() for row in rows]
