"""The model in BentoML with adaptive batching, as its documentation shows it."""

import os
from typing import Any

import bentoml
from PIL import Image

BATCH = 16


@bentoml.service(workers=1, traffic={"timeout": 60})
class Classifier:
    """One model, with BentoML's adaptive batching."""

    def __init__(self) -> None:
        import vitrail

        self.predictor: Any = vitrail.load(os.environ["BENTO_MODEL"], device="cpu").predictor

    @bentoml.api(batchable=True, max_batch_size=BATCH, max_latency_ms=10_000)
    def classify(self, image: list[Image.Image]) -> list[dict[str, Any]]:
        import numpy as np

        rows = self.predictor.logits(np.stack([self.predictor.load(one) for one in image]))
        return [self.predictor.prediction(row, 1).to_dict() for row in rows]
