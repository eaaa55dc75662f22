"""Explains one prediction: heatmaps, their faithfulness and attention, to draw, save or show."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail import files
from vitrail.arguments import check_arguments
from vitrail.errors import UserError
from vitrail.evaluation.loop import eval_mode
from vitrail.insight.arrays import ExplanationArrays
from vitrail.insight.canvas import render_png
from vitrail.insight.explain import explain
from vitrail.insight.faithfulness import Faithfulness, compare_heatmaps
from vitrail.insight.maps import attention, resolve_indices
from vitrail.insight.methods import BEST, CLASS_AGNOSTIC, FAST, METHODS
from vitrail.insight.overview import draw_overview
from vitrail.insight.page import embed_page, render_page
from vitrail.insight.patch_attention import MAX_BYTES, quantize_attention, spaced_subset
from vitrail.model.vit import ViT

# Points of a curve after its first: 29 forwards for the four fast methods. On 16 photos, ViT-Ti:
# 4, 5, 7 steps choose the method that 14 do 13, 10, 14 times, at a loss of 0.008, 0.019, 0.005.
STEPS = 4
MAX_MAPS = 48  # attention maps in an overview
TOP = 5  # most likely classes in `top`


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Explanation(ExplanationArrays):
    """One prediction explained: `heatmap`, `scores`, `attention`, and figures of them.

    `save` writes a figure (.png), an interactive page (.html) or the arrays (.npz); a notebook
    shows the page. `Classifier.explain` returns it for an image file.

    >>> import numpy, torch, vitrail
    >>> from vitrail.insight.explanation import explain_image
    >>> config = vitrail.ViTConfig(image=32, patch=8, width=48, depth=2, heads=3, classes=2)
    >>> pixels = numpy.zeros((32, 32, 3), numpy.uint8)
    >>> x, names = torch.zeros(1, 3, 32, 32), ["cat", "dog"]
    >>> one = explain_image(vitrail.ViT(config), x, pixels, names, name="a.jpg")
    >>> one  # an untrained model: all classes are equally likely, and no patch contributes
    Explanation('a.jpg', target='cat', probability=0.5, method='relevance', score=0.0, grid=(4, 4))
    >>> one.heatmap.shape, one.attention.shape  # patches; layers, heads, tokens
    ((4, 4), (2, 3, 17))
    """

    @check_arguments
    def save(self, path: str | Path) -> None:
        """Writes a figure (.png), an interactive page (.html) or the arrays (.npz).

        >>> vitrail.load("runs/digits-1").explain("digit.png").save("why.png")
        """
        path = Path(path)
        if path.suffix == ".png":
            files.write_file(path, self.overview)
        elif path.suffix == ".html":
            files.write_file(path, explanation_page([self]))
        elif path.suffix == ".npz":
            files.write_file(path, self.npz())
        else:
            raise UserError(f"{path} has an unknown suffix; name it .png, .html or .npz")

    @cached_property
    def overview(self) -> bytes:
        """The overview figure as a PNG."""
        return render_png(draw_overview(self))

    def __repr__(self) -> str:
        return (
            f"Explanation({self.name!r}, target={self.target!r}, "
            f"probability={self.probability:.4g}, method={self.method!r}, "
            f"score={self.scores[self.method]:.3}, grid={self.grid})"
        )

    def _repr_png_(self) -> bytes:
        return self.overview

    def _repr_html_(self) -> str:
        return embed_page(explanation_page([self]))


def explanation_page(explanations: Sequence[Explanation], title: str = "Explanations") -> str:
    """Several explanations as one interactive HTML page that loads nothing from elsewhere."""
    return render_page(explanations, [one.overview for one in explanations], title)


def explain_image(
    model: ViT,
    x: Tensor,
    pixels: NDArray[np.uint8],
    classes: Sequence[str],
    *,
    name: str = "image",
    target: int | None = None,
    method: str = BEST,
    occlusion: bool = False,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    max_bytes: int = MAX_BYTES,
    temperature: float | None = None,
    multi_label: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Explanation:
    """Explains one image: `x` is the model's input (1, C, H, W), `pixels` are the image to draw.

    All fast methods are compared on this image. `method` "best" is the most faithful of them; for a
    given `target`, the most faithful class-specific one. `occlusion` adds the slow method.
    `layers` and `heads` are those that figures show. `temperature` calibrates the probabilities
    `top` and `probability`; None is 1. `multi_label` holds slope and intercept of each label, whose
    probability is sigmoid(slope * logit + intercept).
    """
    if method not in (BEST, *METHODS):
        raise UserError(
            f"method {method!r} is unknown; choose one of {', '.join((BEST, *METHODS))}"
        )
    config = model.config
    shown_heads = resolve_indices(heads, config.heads, "heads")
    shown_layers = resolve_indices(layers, config.depth, "layers")
    query_attention = torch.cat(attention(model, x))[:, :, 0]  # (L, h, N)
    layer_count = max(2, MAX_MAPS // len(shown_heads)) if layers is None else len(shown_layers)
    with eval_mode(model), torch.inference_mode():
        logits = model(x)[0].double().cpu()
    if multi_label is None:
        probabilities = (logits / (temperature or 1)).softmax(dim=0).tolist()
    else:
        slopes, intercepts = torch.tensor(multi_label, dtype=torch.float64)
        probabilities = (slopes * logits + intercepts).sigmoid().tolist()
    order = sorted(range(len(classes)), key=lambda number: -probabilities[number])
    index = order[0] if target is None else target
    names = (*FAST, "occlusion") if occlusion or method == "occlusion" else FAST
    independent = multi_label is not None
    settings = {"occlusion": {"multi_label": independent}}
    heatmaps = {
        each: explain(model, x, each, target=index, **settings.get(each, {})) for each in names
    }
    faithfulness = compare_heatmaps(
        model, x, heatmaps, target=index, steps=STEPS, multi_label=independent
    )
    return Explanation(
        name=name,
        pixels=pixels,
        top=tuple((classes[number], probabilities[number]) for number in order[:TOP]),
        target=classes[index],
        probability=probabilities[index],
        target_given=target is not None,
        method=best_method(faithfulness, target is not None) if method == BEST else method,
        heatmaps={each: heatmap[0].float().cpu().numpy() for each, heatmap in heatmaps.items()},
        faithfulness=faithfulness,
        attention=query_attention.float().cpu().numpy(),
        query="[CLS]" if config.has_cls else "the average patch",
        layers=tuple(spaced_subset(shown_layers, layer_count)),
        heads=tuple(shown_heads),
        patch_attention=quantize_attention(model, x, shown_layers, shown_heads, max_bytes),
    )


def best_method(faithfulness: dict[str, Faithfulness], target_given: bool) -> str:
    """The most faithful method; for a given class, among those that depend on the class."""
    candidates = [name for name in faithfulness if name not in CLASS_AGNOSTIC or not target_given]
    return max(candidates, key=lambda name: faithfulness[name].score.item())
