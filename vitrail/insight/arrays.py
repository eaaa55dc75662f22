"""The content of an explanation: labels and arrays, which other modules draw."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.insight.faithfulness import Faithfulness
from vitrail.insight.patch_attention import PatchAttention

Heatmap = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ExplanationArrays:
    """One image, its prediction, its heatmaps and its attention."""

    name: str  # of the image
    pixels: NDArray[np.uint8]  # the model's input before normalisation, (height, width, channels)
    top: tuple[tuple[str, float], ...]  # the most likely classes with their probabilities
    target: str  # the explained class
    probability: float  # of the explained class
    target_given: bool  # whether the caller chose the class; otherwise it is the predicted one
    method: str  # the method of `heatmap`
    heatmaps: dict[str, Heatmap]  # of each method, (rows, columns), not negative
    faithfulness: dict[str, Faithfulness]  # of each method
    attention: NDArray[np.float32]  # of `query` in all layers and heads, (L, h, N)
    query: str  # whose attention that is: [CLS] or the average patch
    layers: tuple[int, ...]  # shown in figures
    heads: tuple[int, ...]  # shown in figures
    patch_attention: PatchAttention  # of every patch, for the page

    @property
    def heatmap(self) -> Heatmap:
        """How much each patch contributes to the explained class, by `method`: (rows, columns)."""
        return self.heatmaps[self.method]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        rows, columns = self.heatmap.shape
        return rows, columns

    @property
    def scores(self) -> dict[str, float]:
        """Insertion AUC minus deletion AUC of each method on this image, the best first."""
        scores = {method: one.score.item() for method, one in self.faithfulness.items()}
        return dict(sorted(scores.items(), key=lambda pair: -pair[1]))

    @property
    def aspect(self) -> float:
        """Height of the image over its width."""
        height, width = self.pixels.shape[:2]
        return float(height / width)

    def attention_maps(self, layer: int) -> Heatmap:
        """The attention of `query` to the patches in one layer, (h, rows, columns)."""
        patches = self.grid[0] * self.grid[1]
        return self.attention[layer, :, -patches:].reshape(-1, *self.grid)  # (h, rows, columns)

    def npz(self) -> bytes:
        """All arrays as an .npz file for `numpy.load`; heatmaps are named "heatmap METHOD"."""
        labels, probabilities = zip(*self.top, strict=True) if self.top else ((), ())
        arrays = {
            "pixels": self.pixels,
            "labels": np.array(labels),
            "probabilities": np.array(probabilities),
            "target": np.array(self.target),
            "method": np.array(self.method),
            "attention": self.attention,
            "patch_attention": self.patch_attention.levels,
            "patch_attention_row_max": self.patch_attention.row_max,
            "patch_attention_maps": np.array(self.patch_attention.maps),
        }
        arrays |= {f"heatmap {method}": heatmap for method, heatmap in self.heatmaps.items()}
        return pack_npz(arrays)


def pack_npz(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays as the bytes of an .npz file."""
    stream = io.BytesIO()
    np.savez_compressed(stream, allow_pickle=False, **arrays)
    return stream.getvalue()
