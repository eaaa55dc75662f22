"""What a model learned, drawn: positions, filters, how heads look, what tokens hold."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from vitrail.errors import UserError
from vitrail.insight import draw, learned
from vitrail.insight.looks import spread
from vitrail.model.vit import ViT

SHOWN = 5  # images, and layers, in a picture of tokens
NEED_IMAGES = (
    "how heads look and what tokens hold is measured on images, and the model's own are not here; "
    "give some, with --learned"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    name: str  # of the file, without its ending
    figure: Figure
    array: NDArray[np.float32]  # what is drawn


def gallery(
    model: ViT,
    x: Tensor | None = None,
    pixels: Sequence[NDArray[np.uint8]] = (),
    say: Callable[[str], None] = lambda words: None,
) -> Iterator[Picture]:
    """Every picture that can be made: `x` are images as the model takes them, `pixels` as we do.

    What this model does not have, or what would need images, is said.
    """
    makers: list[Callable[[], Picture]] = [lambda: positions(model), lambda: filters(model)]
    if x is None:
        say(NEED_IMAGES)
    else:
        makers += [
            lambda: distance(model, x),
            lambda: entropy(model, x),
            lambda: norms(model, x, pixels),
            lambda: colours(model, x, pixels),
        ]
    for make in makers:
        try:
            yield make()
        except UserError as error:
            say(str(error))


def positions(model: ViT) -> Picture:
    found = learned.position_similarity(model).cpu().numpy()
    return Picture(name="positions", figure=draw.positions(found), array=found)


def filters(model: ViT) -> Picture:
    found = learned.filters(model).cpu().numpy()
    return Picture(name="filters", figure=draw.filters(found), array=found)


def distance(model: ViT, x: Tensor) -> Picture:
    found = learned.attention_distance(model, x).cpu().numpy()
    size = x.shape[2], x.shape[3]
    return Picture(name="attention_distance", figure=draw.distances(found, size), array=found)


def entropy(model: ViT, x: Tensor) -> Picture:
    found = learned.attention_entropy(model, x).cpu().numpy()
    rows, columns = model.grid(x)
    dead = learned.dead_heads(model, x).cpu().numpy()
    figure = draw.entropies(found, model.config.prefix + rows * columns, dead)
    return Picture(name="attention_entropy", figure=figure, array=found)


def norms(model: ViT, x: Tensor, pixels: Sequence[NDArray[np.uint8]]) -> Picture:
    layers = spread(range(model.config.depth), SHOWN)
    found = [one.cpu().numpy() for one in learned.token_norms(model, x[:SHOWN])]
    figure = draw.norms(pixels[:SHOWN], [found[layer] for layer in layers], layers)
    return Picture(name="token_norms", figure=figure, array=np.stack(found))


def colours(model: ViT, x: Tensor, pixels: Sequence[NDArray[np.uint8]]) -> Picture:
    layers = spread(range(model.config.depth), SHOWN)
    found = [learned.feature_colours(model, x[:SHOWN], block).cpu().numpy() for block in layers]
    figure = draw.colours(pixels[:SHOWN], found, layers)
    return Picture(name="feature_colours", figure=figure, array=np.stack(found))
