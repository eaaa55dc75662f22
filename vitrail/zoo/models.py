"""The list of named models with their size and cost, and of published weights."""

from dataclasses import dataclass
from typing import Any, Literal, overload

from vitrail.arguments import check_arguments
from vitrail.data.config import Interpolation
from vitrail.model.cost import count_macs, count_parameters
from vitrail.zoo.presets import PRESETS, preset
from vitrail.zoo.weights import PUBLISHED, Normalisation, PublishedWeights


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """A named architecture; its fields are the keys of `vitrail models --json`.

    >>> vitrail.models()[0]
    ModelInfo(name='Ti/16', parameters=5717416, gmacs=1.2537, tokens=197, image=224, patch=16)
    """

    name: str
    parameters: int
    gmacs: float  # billions of multiply-adds for one image
    tokens: int  # length of the sequence that the blocks process
    image: int | tuple[int, int]  # pixels
    patch: int  # pixels


@dataclass(frozen=True, kw_only=True)
class WeightsInfo:
    """Published weights; its fields are the keys of `vitrail models --weights --json`.

    >>> [info.name for info in vitrail.models(weights=True) if (info.accuracy or 0) > 0.88]
    ['L/16 swag-in1k-512', 'H/14 swag-in1k-518']
    """

    name: str  # what `vitrail.load` accepts
    hub: str | None  # owner/name on huggingface.co
    files: list[str]  # names of files and hub repositories, with * for any characters
    architecture: str  # a name for `preset`
    changes: dict[str, Any]  # settings that differ from the preset
    image: int | tuple[int, int]  # pixels
    parameters: int
    preprocess: Normalisation  # mean and standard deviation
    crop: float
    interpolation: Interpolation
    accuracy: float | None  # top-1 on the ImageNet validation set; None: not a classifier
    source: str | None  # of the accuracy
    licence: str


@overload
def models(*, weights: Literal[False] = False) -> list[ModelInfo]: ...


@overload
def models(*, weights: Literal[True]) -> list[WeightsInfo]: ...


@check_arguments
def models(*, weights: bool = False) -> list[ModelInfo] | list[WeightsInfo]:
    """Lists the named models, or with `weights=True` the published weights.

    >>> [model.name for model in vitrail.models() if model.parameters > 1e9]
    ['g/16', 'g/14', 'G/14', 'DINOv2-g/14']
    >>> vitrail.models(weights=True)[0].hub
    'timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k'
    """
    if weights:
        return [build_weights_info(published) for published in PUBLISHED]
    return [build_model_info(name) for name in PRESETS]


def build_model_info(name: str) -> ModelInfo:
    vit = preset(name)
    return ModelInfo(
        name=name,
        parameters=count_parameters(vit),
        gmacs=round(count_macs(vit) / 1e9, 4),
        tokens=vit.tokens,
        image=vit.image,
        patch=vit.patch,
    )


def build_weights_info(published: PublishedWeights) -> WeightsInfo:
    vit = published.vit
    return WeightsInfo(
        name=published.name,
        hub=published.hub or None,
        files=list(published.files),
        architecture=published.preset,
        changes=published.changes,
        image=vit.image,
        parameters=count_parameters(vit),
        preprocess=published.normalisation,
        crop=published.crop,
        interpolation=published.interpolation,
        accuracy=published.accuracy,
        source=published.source or None,
        licence=published.licence,
    )
