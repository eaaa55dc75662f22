"""Why a model said what it said of one image: arrays that can be drawn, saved and shown."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail import files
from vitrail.errors import UserError
from vitrail.insight.explain import CLASSLESS, METHODS, explain
from vitrail.insight.faithfulness import Faithfulness, compared
from vitrail.insight.looks import ROOM, Looks, looks, spread
from vitrail.insight.maps import attention, chosen, resting
from vitrail.model.vit import ViT

QUICK = ("relevance", "gradient-rollout", "rollout", "attention")  # a few passes, not hundreds
# Points of a curve after its first: 29 forwards for the four quick methods. On 16 photos, ViT-Ti:
# 4, 5, 7 steps choose as 14 do 13, 10, 14 times, and give away 0.008, 0.019, 0.005 of the score.
STEPS = 4
DRAWN = 48  # small maps of heads in an overview

Heat = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Explanation:
    """One image, what the model said of it, and where it looked.

    `save` writes a picture, a page or the arrays; a notebook shows it by itself.
    """

    name: str  # of the image
    pixels: NDArray[np.uint8]  # what the model saw, (height, width, channels)
    top: tuple[tuple[str, float], ...]  # the most likely classes with their probabilities
    target: str  # the class that is explained
    probability: float  # of that class, plain softmax
    asked: bool  # whether that class was asked for; else it is the most likely one
    method: str  # the method behind `heat`
    heats: dict[str, Heat]  # of each method, (rows, columns), not negative
    faithfulness: dict[str, Faithfulness]  # how far to trust each of them
    attention: NDArray[np.float32]  # the reader's, (all layers, all heads, tokens), rows sum to 1
    reader: str  # whose attention that is: [CLS] or the average patch
    layers: tuple[int, ...]  # that are drawn
    heads: tuple[int, ...]  # that are drawn
    looks: Looks  # where every patch looks, for the page

    @property
    def heat(self) -> Heat:
        """What speaks for the class, patch by patch, by the method that was chosen."""
        return self.heats[self.method]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        rows, columns = self.heat.shape
        return rows, columns

    @property
    def scores(self) -> dict[str, float]:
        """How faithful each method is on this image, the best first: 0 is chance, 1 the most."""
        found = {method: one.score.item() for method, one in self.faithfulness.items()}
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def maps(self, layer: int) -> Heat:
        """The reader's attention to the patches, head by head: (all heads, rows, columns)."""
        patches = self.grid[0] * self.grid[1]
        return self.attention[layer, :, -patches:].reshape(-1, *self.grid)

    def save(self, path: str | Path) -> None:
        """A picture (.png), a page to move about in (.html), or the arrays (.npz)."""
        path = Path(path)
        if path.suffix == ".png":
            files.write(path, self.overview)
        elif path.suffix == ".html":
            from vitrail.insight.page import page

            files.write(path, page([self]))
        elif path.suffix == ".npz":
            files.write(path, self.npz())
        else:
            raise UserError(f"{path} has no known form; name it .png, .html or .npz")

    def npz(self) -> bytes:
        """All arrays, to be read with numpy; names of methods have "heat" in front."""
        labels, probabilities = zip(*self.top, strict=True)
        arrays = {
            "pixels": self.pixels,
            "labels": np.array(labels),
            "probabilities": np.array(probabilities),
            "target": np.array(self.target),
            "method": np.array(self.method),
            "attention": self.attention,
            "looks": self.looks.shares,
            "looks_most": self.looks.most,
            "looks_maps": np.array(self.looks.maps),
        }
        return packed(arrays | {f"heat {method}": heat for method, heat in self.heats.items()})

    @cached_property
    def overview(self) -> bytes:
        """The picture of it all, as PNG."""
        from vitrail.insight.draw import overview, png

        return png(overview(self))

    def _repr_png_(self) -> bytes:
        return self.overview

    def _repr_html_(self) -> str:
        from vitrail.insight.page import framed

        return framed(self)


def explained(
    model: ViT,
    x: Tensor,
    pixels: NDArray[np.uint8],
    classes: Sequence[str],
    *,
    name: str = "image",
    target: int | None = None,
    method: str = "best",
    occlusion: bool = False,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    room: int = ROOM,
) -> Explanation:
    """Explains one image: `x` as the model takes it (1, C, H, W), `pixels` as people see it.

    The quick methods are judged against each other on this very image, and "best" is the most
    faithful of them; where a class is asked for, of those that tell classes apart. Occlusion, the
    slow one, is added when it is named or asked for. `layers` and `heads` choose what is drawn.
    """
    if method not in ("best", *METHODS):
        raise UserError(f"there is no method {method!r}; choose best, {', '.join(METHODS)}")
    config = model.config
    drawn_heads = chosen(heads, config.heads, "heads")
    drawn_layers = chosen(layers, config.depth, "layers")
    seen = torch.cat(attention(model, x))[:, :, 0]  # (L, h, N)
    room_for = max(2, DRAWN // len(drawn_heads)) if layers is None else len(drawn_layers)
    with resting(model), torch.inference_mode():
        probabilities = model(x)[0].softmax(dim=0).tolist()
    order = sorted(range(len(classes)), key=lambda index: -probabilities[index])
    aim = order[0] if target is None else target
    names = (*QUICK, "occlusion") if occlusion or method == "occlusion" else QUICK
    heats = {each: explain(model, x, each, target=aim) for each in names}
    trust = compared(model, x, heats, target=aim, steps=STEPS)
    return Explanation(
        name=name,
        pixels=pixels,
        top=tuple((classes[index], probabilities[index]) for index in order[:5]),
        target=classes[aim],
        probability=probabilities[aim],
        asked=target is not None,
        method=best(trust, target is not None) if method == "best" else method,
        heats={each: heat[0].float().cpu().numpy() for each, heat in heats.items()},
        faithfulness=trust,
        attention=seen.float().cpu().numpy(),
        reader="[CLS]" if config.pool == "cls" else "the average patch",
        layers=tuple(spread(drawn_layers, room_for)),
        heads=tuple(drawn_heads),
        looks=looks(model, x, drawn_layers, drawn_heads, room),
    )


def best(trust: dict[str, Faithfulness], asked: bool) -> str:
    """The most faithful method; of a class that was asked for, one that tells classes apart."""
    fit = [method for method in trust if method not in CLASSLESS or not asked]
    return max(fit, key=lambda method: trust[method].score.item())


def packed(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays as an .npz file."""
    stream = io.BytesIO()
    np.savez_compressed(stream, allow_pickle=False, **arrays)
    return stream.getvalue()
