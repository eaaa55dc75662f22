"""What a backbone sees in an image: attention, rollout, similar patches, PCA colours."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail import files
from vitrail.arguments import check_arguments
from vitrail.errors import UserError
from vitrail.evaluation.loop import eval_mode
from vitrail.insight.arrays import ExplanationArrays
from vitrail.insight.canvas import EDGE, INK, MAGNITUDE, Canvas, render_png
from vitrail.insight.explain import explain
from vitrail.insight.learned import feature_pca
from vitrail.insight.maps import attention, resolve_indices
from vitrail.insight.methods import CLASS_AGNOSTIC
from vitrail.insight.overlay import overlay_heatmap, tile_maps, to_rgb
from vitrail.insight.page import embed_page, render_page
from vitrail.insight.patch_attention import (
    MAX_BYTES,
    MEAN,
    SIMILARITY,
    PatchAttention,
    cell_indices,
    quantize_attention,
    quantize_maps,
    spaced_subset,
)
from vitrail.model.vit import ViT

SHOWN_LAYERS = 4  # whose attention the overview draws
PANEL = 2.4  # inches


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BackboneExplanation(ExplanationArrays):
    """One image as a backbone sees it.

    `heatmaps` are attention, rollout, and the similarity of the chosen patch to all others. `save`
    writes a figure (.png), an interactive page (.html) or the arrays (.npz).
    """

    patch: tuple[int, int]  # row and column of the patch whose similarity is shown
    pca: NDArray[np.float32]  # the first three principal components as RGB, (rows, columns, 3)

    @check_arguments
    def save(self, path: str | Path) -> None:
        """Writes a figure (.png), an interactive page (.html) or the arrays (.npz)."""
        path = Path(path)
        if path.suffix == ".png":
            files.write_file(path, self.overview)
        elif path.suffix == ".html":
            files.write_file(path, render_page([self], [self.overview], "Backbone"))
        elif path.suffix == ".npz":
            files.write_file(path, self.npz())
        else:
            raise UserError(f"{path} has an unknown suffix; name it .png, .html or .npz")

    @cached_property
    def overview(self) -> bytes:
        """The overview figure as a PNG."""
        return render_png(draw_backbone(self))

    def __repr__(self) -> str:
        return f"BackboneExplanation({self.name!r}, patch={self.patch}, grid={self.grid})"

    def _repr_png_(self) -> bytes:
        return self.overview

    def _repr_html_(self) -> str:
        return embed_page(render_page([self], [self.overview], "Backbone"))


def patch_similarity(model: ViT, x: Tensor) -> Tensor:
    """Cosine similarity of all patches of each image after the last block: (B, P, P)."""
    with eval_mode(model), torch.no_grad():
        features = F.normalize(model.features(x)[0].float(), dim=-1)  # (B, P, D)
    return features @ features.mT  # (B, P, P)


def explain_backbone(
    model: ViT,
    x: Tensor,
    pixels: NDArray[np.uint8],
    *,
    name: str = "image",
    patch: tuple[int, int] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    max_bytes: int = MAX_BYTES,
) -> BackboneExplanation:
    """Explains one image `x` (1, C, H, W), by default for the patch with the highest rollout."""
    config = model.config
    shown_heads = resolve_indices(heads, config.heads, "heads")
    shown_layers = resolve_indices(layers, config.depth, "layers")
    heatmaps = {each: explain(model, x, each)[0].float().cpu().numpy() for each in CLASS_AGNOSTIC}
    rows, columns = heatmaps["rollout"].shape
    if patch is None:
        row, column = divmod(int(heatmaps["rollout"].argmax()), columns)
    else:
        row, column = patch
        if not (0 <= row < rows and 0 <= column < columns):
            raise UserError(
                f"`patch` is row {row}, column {column}; the image has {rows} rows and "
                f"{columns} columns of patches"
            )
    similarity = patch_similarity(model, x)[0].cpu()  # (P, P)
    chosen = similarity[row * columns + column].view(rows, columns).clamp(min=0).numpy()
    packed = quantize_attention(model, x, shown_layers, shown_heads, max_bytes)
    query_attention = torch.cat(attention(model, x))[:, :, 0]  # (L, h, N)
    return BackboneExplanation(
        name=name,
        pixels=pixels,
        top=(),
        target="",
        probability=0.0,
        target_given=False,
        method="similarity",
        heatmaps={**heatmaps, "similarity": chosen},
        faithfulness={},
        attention=query_attention.float().cpu().numpy(),
        query="[CLS]" if config.has_cls else "the average patch",
        layers=tuple(spaced_subset(shown_layers, SHOWN_LAYERS)),
        heads=tuple(shown_heads),
        patch_attention=add_similarity(packed, similarity, (rows, columns)),
        patch=(row, column),
        pca=feature_pca(model, x)[0].float().cpu().numpy(),
    )


def add_similarity(
    packed: PatchAttention, similarity: Tensor, grid: tuple[int, int]
) -> PatchAttention:
    """The maps of the page with one more: the similarity between its cells, 0 where negative."""
    cells = cell_indices(1, grid, packed.cell_side)[1:] - 1  # (P)
    count = packed.grid[0] * packed.grid[1]
    share = F.one_hot(cells, count).float()
    share = share / share.sum(dim=0).clamp(min=1)  # (P, cells)
    between = (share.T @ similarity @ share).clamp(min=0)  # (cells, cells)
    rows = torch.cat([between.mean(dim=0, keepdim=True), between])  # (1 + cells, cells)
    padded = F.pad(rows, (1, 0))  # (1 + cells, 1 + cells)
    one = quantize_maps({(SIMILARITY, MEAN): padded}, 0, packed.grid, packed.cell_side)
    return replace(
        packed,
        maps=(*packed.maps, *one.maps),
        levels=np.concatenate([packed.levels, one.levels]),
        row_max=np.concatenate([packed.row_max, one.row_max]),
        prefix=np.concatenate([packed.prefix, one.prefix]),
    )


def draw_backbone(one: BackboneExplanation) -> Figure:
    """The image, its rollout, last attention, similarity and PCA colours; attention of heads."""
    height = PANEL * one.aspect
    panels = {
        "image": to_rgb(one.pixels),
        "rollout": overlay_heatmap(one.pixels, one.heatmaps["rollout"]),
        "attention, last layer": overlay_heatmap(one.pixels, one.heatmaps["attention"]),
        f"similarity to patch {one.patch}": overlay_heatmap(one.pixels, one.heatmaps["similarity"]),
        "PCA of patches": (one.pca * 255).round().astype(np.uint8),
    }
    heads, gap = len(one.heads), 0.1
    width = 2 * EDGE + len(panels) * (PANEL + gap)
    side = (width - 2 * EDGE - 1.0) / max(heads, 8)
    canvas = Canvas(width, 1.5 + height + len(one.layers) * side * one.aspect + EDGE)
    canvas.add_title(EDGE, one.name, f"{one.query}: attention to patches; no head, no class")
    for number, (title, pixels) in enumerate(panels.items()):
        left = EDGE + number * (PANEL + gap)
        canvas.add_text(left, 0.95, title, 8.5)
        axes = canvas.add_image(pixels, left, 1.15, PANEL, height)
        if title.startswith("similarity"):
            mark_patch(axes, one, pixels.shape)
    for number, layer in enumerate(one.layers):
        maps = one.attention_maps(layer)[list(one.heads)]
        scaled = maps / np.maximum(maps.max(axis=(1, 2), keepdims=True), 1e-30)
        top = 1.35 + height + number * side * one.aspect
        canvas.add_text(EDGE, top + 0.05, f"layer {layer}", 8.5, color=INK)
        tiles = tile_maps(scaled[None], MAGNITUDE, 0.05)
        canvas.add_image(tiles, EDGE + 0.7, top, side * heads, side * one.aspect * 0.95)
    return canvas.figure


def mark_patch(axes: object, one: BackboneExplanation, shape: tuple[int, ...]) -> None:
    """A white frame around the chosen patch."""
    from matplotlib.patches import Rectangle

    height, width = shape[0] / one.grid[0], shape[1] / one.grid[1]
    corner = one.patch[1] * width - 0.5, one.patch[0] * height - 0.5
    frame = Rectangle(corner, width, height, fill=False, edgecolor="white", linewidth=1.5)
    axes.add_patch(frame)  # type: ignore[attr-defined]
