"""Explanations in a thread of their own, so that predictions do not wait for them."""

import asyncio
import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from vitrail.errors import UserError
from vitrail.server.admission import Refusal
from vitrail.server.batching import limit_torch_threads
from vitrail.server.model import ImageOptions, ServedModel

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.inference.classifier import Classifier

Result = TypeVar("Result")

MAX_WAIT = 15.0  # seconds that an explanation may wait
MAX_WAITING = 8  # explanations, each with its image in memory
SMOOTHING = 0.7  # weight of the past in the average time of an explanation
PACKED_BYTES = 3_000_000  # of quantized attention maps in one answer
MAX_NUMBERS = 1_000_000  # attention weights in one answer


class NotExplainable(UserError):
    """The engine of this model computes logits only."""


class Explainer:
    """One thread, and a copy of the model's structure for it."""

    def __init__(self, threads: int):
        self.threads = threads
        self.thread = ThreadPoolExecutor(
            1, "explain", initializer=limit_torch_threads, initargs=(threads,)
        )
        self.waiting = 0
        self.seconds = 1.0  # average time of an explanation
        self.copies: dict[bool, tuple[ServedModel, Classifier]] = {}

    def admit(self) -> None:
        """Raises `Refusal` if an explanation would wait too long."""
        wait = (self.waiting + 1) * self.seconds
        if self.waiting and (wait > MAX_WAIT or self.waiting >= MAX_WAITING):
            raise Refusal(max(self.seconds, wait - MAX_WAIT))

    async def run(self, function: Callable[[], Result]) -> Result:
        """Calls the function in the thread; a cancelled caller leaves the queue."""
        loop = asyncio.get_running_loop()
        self.waiting += 1
        try:
            return await loop.run_in_executor(self.thread, self._time, function)
        finally:
            self.waiting -= 1

    def _time(self, function: Callable[[], Result]) -> Result:
        start = time.monotonic()
        try:
            return function()
        finally:
            seconds = time.monotonic() - start
            self.seconds = SMOOTHING * self.seconds + (1 - SMOOTHING) * seconds

    def forget(self) -> None:
        """Frees the copies of a model that was replaced."""
        self.copies.clear()

    def stop(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)

    def check(self, model: ServedModel, output: str = "") -> None:
        """Raises unless there are weights for PyTorch, or the exported file returns `output`."""
        if not model.explains and output not in model.predictor.engine.outputs:
            missing = output or "the weights of PyTorch"
            raise NotExplainable(
                f"{model.name} was exported without {missing}; serve the run folder or weight file"
                + (f", or export it with --{output}" if output else "")
            )

    def classifier(self, model: ServedModel, cropped: bool) -> "Classifier":
        """The classifier with modules of its own and shared weights.

        Explanations register hooks on modules, and predictions run through theirs at the same time.
        """
        own, classifier = self.copies.get(cropped, (None, None))
        if own is model and classifier is not None:
            return classifier
        given = model.torch_classifier
        limit_torch_threads(self.threads)  # again: torch may have been imported just now
        vit = given.model
        shared = {id(x): x for x in (*vit.parameters(), *vit.buffers())}
        view = replace(given.preprocess, crop=1.0) if cropped else given.preprocess
        classifier = type(given)(
            copy.deepcopy(vit, shared), given.classes, view, given.metadata, given.device
        )
        self.copies[cropped] = (model, classifier)
        return classifier

    # --- what the endpoints answer, computed in the thread ----------------------------------------

    def explain(
        self, model: ServedModel, body: bytes, cropped: bool, target: int | None, method: str
    ) -> dict[str, Any]:
        """Heatmaps of all methods with their faithfulness, and the prediction."""
        from vitrail.insight.methods import METHODS

        classifier = self.classifier(model, cropped)
        found = classifier.explain(
            model.load_pixels(body, cropped), target, method=method, max_bytes=1
        )
        index = classifier.classes.index(found.target) if target is None else target
        return {
            "label": found.top[0][0],
            "probability": found.top[0][1],
            "class": {"label": found.target, "index": index, "probability": found.probability},
            "method": found.method,
            "grid": found.grid,
            "heatmaps": [
                {
                    "method": name,
                    "summary": METHODS[name].summary,
                    "class_specific": METHODS[name].class_specific,
                    "faithfulness": round(score, 4),
                    "values": found.heatmaps[name].tolist(),
                }
                for name, score in found.scores.items()
            ],
            "sha256": model.sha256,
        }

    def attention(
        self,
        model: ServedModel,
        body: bytes,
        cropped: bool,
        *,
        layer: int,
        head: int | None,
        row: Any,
    ) -> dict[str, Any]:
        """The attention of one layer: a map for each requested row, and what the prefix gets."""
        from vitrail.insight.maps import attention, default_rows, resolve_indices

        classifier = self.classifier(model, cropped)
        vit, x = classifier.model, self._input(classifier, model, body, cropped)
        rows = default_rows(vit) if row is None else row
        maps = attention(vit, x, layers=layer, heads=head, rows=rows)[0][0].mean(dim=0)
        if maps.numel() > MAX_NUMBERS:
            raise UserError(f"{maps.numel()} attention weights; ask for one row, or format=packed")
        grid = vit.grid(x)
        patches = maps[:, maps.shape[1] - grid[0] * grid[1] :].unflatten(1, grid)
        return {
            "layer": resolve_indices(layer, vit.config.depth, "layers")[0],
            "head": "mean" if head is None else resolve_indices(head, vit.config.heads, "heads")[0],
            "row": rows,
            "grid": grid,
            "attention": (patches if rows == "all" else patches[0]).tolist(),
            "prefix": (1 - patches.sum(dim=(1, 2))).clamp(min=0).tolist(),
            "sha256": model.sha256,
        }

    def packed_attention(self, model: ServedModel, body: bytes, cropped: bool) -> dict[str, Any]:
        """Maps of all layers and heads that fit, quantized to bytes."""
        from vitrail.insight.page import encode_array
        from vitrail.insight.patch_attention import quantize_attention

        classifier = self.classifier(model, cropped)
        vit, x = classifier.model, self._input(classifier, model, body, cropped)
        config = vit.config
        packed = quantize_attention(vit, x, range(config.depth), range(config.heads), PACKED_BYTES)
        return {
            "query": "[CLS]" if config.has_cls else "the average patch",
            "prefix_tokens": config.prefix,
            "grid": packed.grid,
            "cell_side": packed.cell_side,
            "maps": packed.maps,
            "levels": encode_array(packed.levels),
            "row_max": encode_array(packed.row_max.astype("<f4")),
            "prefix": encode_array(packed.prefix.astype("<f4")),
            "sha256": model.sha256,
        }

    def features(self, model: ServedModel, body: bytes, cropped: bool) -> dict[str, Any]:
        """The input of the head."""
        if not model.explains:  # an exported file that returns features
            x = model.decode(body, ImageOptions(cropped=cropped))
            row = model.predictor.run(x[None])["features"][0]
            return {"features": row.tolist(), "sha256": model.sha256}
        classifier = self.classifier(model, cropped)
        row = classifier.features(model.load_pixels(body, cropped))[0]
        return {"features": row.tolist(), "sha256": model.sha256}

    def _input(
        self, classifier: "Classifier", model: ServedModel, body: bytes, cropped: bool
    ) -> "Tensor":
        import torch

        x = torch.as_tensor(classifier.predictor.load(model.load_pixels(body, cropped)))
        return x[None].to(classifier.device)
