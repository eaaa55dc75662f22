"""All figures of what a model has learned, each with its array."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from vitrail.errors import UserError
from vitrail.insight import learned, learned_figures
from vitrail.insight.patch_attention import spaced_subset
from vitrail.model.vit import ViT

SHOWN = 5  # images, and layers, in a figure of tokens
NEED_IMAGES = (
    "attention distance, attention entropy, token norms and feature PCA are measured on images, "
    "and this model's own are not available; give some with `learned=True`"
)

Pixels = Sequence[NDArray[np.uint8]]


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnedFigure:
    name: str  # of the file, without its suffix
    figure: Figure
    array: NDArray[np.float32]  # the values in the figure


def draw_gallery(
    model: ViT,
    x: Tensor | None = None,
    pixels: Pixels = (),
    log: Callable[[str], None] = lambda message: None,
) -> Iterator[LearnedFigure]:
    """Every figure that this model and these images allow; `log` gets the reason for the others.

    `x` are images as the model's input, `pixels` the same images to draw.
    """
    makers: list[Callable[[], LearnedFigure]] = [
        partial(positions_figure, model),
        partial(filters_figure, model),
    ]
    if x is None:
        log(NEED_IMAGES)
    else:
        makers += [
            partial(distance_figure, model, x),
            partial(entropy_figure, model, x),
            partial(norms_figure, model, x, pixels),
            partial(pca_figure, model, x, pixels),
        ]
    for make in makers:
        try:
            yield make()
        except UserError as error:
            log(str(error))


def positions_figure(model: ViT) -> LearnedFigure:
    similarity = learned.position_similarity(model).cpu().numpy()
    figure = learned_figures.draw_positions(similarity, model.config.positions)
    return LearnedFigure(name="positions", figure=figure, array=similarity)


def filters_figure(model: ViT) -> LearnedFigure:
    components = learned.patch_filters(model).cpu().numpy()
    figure = learned_figures.draw_filters(components)
    return LearnedFigure(name="filters", figure=figure, array=components)


def distance_figure(model: ViT, x: Tensor) -> LearnedFigure:
    distance = learned.attention_distance(model, x).cpu().numpy()
    figure = learned_figures.draw_attention_distance(distance, (x.shape[2], x.shape[3]))
    return LearnedFigure(name="attention_distance", figure=figure, array=distance)


def entropy_figure(model: ViT, x: Tensor) -> LearnedFigure:
    entropy = learned.attention_entropy(model, x).cpu().numpy()
    dead = learned.dead_heads(model, x).cpu().numpy()
    rows, columns = model.grid(x)
    tokens = model.config.prefix + rows * columns
    figure = learned_figures.draw_attention_entropy(entropy, tokens, dead)
    return LearnedFigure(name="attention_entropy", figure=figure, array=entropy)


def norms_figure(model: ViT, x: Tensor, pixels: Pixels) -> LearnedFigure:
    layers = spaced_subset(range(model.config.depth), SHOWN)
    norms = [one.cpu().numpy() for one in learned.token_norms(model, x[:SHOWN])]
    shown = [norms[layer] for layer in layers]
    figure = learned_figures.draw_token_norms(pixels[:SHOWN], shown, layers)
    return LearnedFigure(name="token_norms", figure=figure, array=np.stack(norms))


def pca_figure(model: ViT, x: Tensor, pixels: Pixels) -> LearnedFigure:
    layers = spaced_subset(range(model.config.depth), SHOWN)
    components = [learned.feature_pca(model, x[:SHOWN], layer).cpu().numpy() for layer in layers]
    figure = learned_figures.draw_feature_pca(pixels[:SHOWN], components, layers)
    return LearnedFigure(name="feature_pca", figure=figure, array=np.stack(components))
