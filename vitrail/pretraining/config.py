"""The settings of a pretraining, checked on construction."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from vitrail.errors import UserError

Method = Literal["masked", "views", "teacher"]

RANGES = {  # minimum and maximum of each whole number
    "decoder_depth": (1, 64),
    "decoder_width": (8, 4096),
    "views": (2, 32),
    "local_views": (0, 32),
}
MAX_FEATURES = 100_000  # width of the features of a teacher
MAX_RATIO = 64  # images without labels for each labelled one
MAX_REGIONS = 32  # their similarities are as many as the fourth power


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    method: Method = "masked"  # masked patches (MAE), views of an image (LeJEPA), or a teacher
    mask: float = 0.75  # masked: fraction of the patches that is masked
    decoder_depth: int = 1  # masked: blocks of the decoder, discarded at the end
    decoder_width: int = 128  # masked: width of the decoder's tokens
    normalise: bool = False  # masked: targets with mean 0 and variance 1 in each patch
    hog: float = 0.0  # masked: weight of oriented gradients (HOG) in the loss, against pixels
    views: int = 4  # views: random crops of each image at full resolution
    local_views: int = 0  # views: small crops of each image at about half the resolution
    crop: float = 0.2  # views: minimum area fraction of a crop at full resolution
    flip: float = 0.5  # views: probability of a horizontal flip
    colour: float = 0.4  # views: strength of brightness, contrast and saturation jitter
    comparison: float = 0.05  # fraction of the time for runs with labels, which measure it

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            known = ", ".join(get_args(Method))
            raise UserError(f"pretrain.method {self.method!r} is unknown; choose one of {known}")
        for name, (least, most) in RANGES.items():
            number = getattr(self, name)
            if not isinstance(number, int) or not least <= number <= most:
                raise UserError(
                    f"pretrain.{name} is {number!r:.40}; give a whole number from {least} to {most}"
                )
        for name in ("mask", "crop"):
            if not 0 < getattr(self, name) < 1:
                raise UserError(
                    f"pretrain.{name} is {getattr(self, name)!r}; give a number between 0 and 1"
                )
        for name in ("hog", "flip", "colour", "comparison"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(
                    f"pretrain.{name} is {getattr(self, name)!r}; give a number from 0 to 1"
                )
        if self.decoder_width % 4:
            raise UserError(
                f"pretrain.decoder_width is {self.decoder_width}; give a multiple of 4, as its "
                f"position embeddings need"
            )


@dataclass(frozen=True, kw_only=True)
class JointConfig:
    ratio: int = 3  # images without labels for each labelled one of a batch; 0 ignores them
    start: float = 0.3  # fraction of the steps after which images without labels are used
    crop: float = 0.35  # minimum area fraction of the crop in a distorted view
    flip: float = 0.5  # probability of a horizontal flip
    colour: float = 0.4  # strength of brightness, contrast and saturation jitter

    def __post_init__(self) -> None:
        if not isinstance(self.ratio, int) or not 0 <= self.ratio <= MAX_RATIO:
            raise UserError(
                f"joint.ratio is {self.ratio!r:.40}; give a whole number from 0 to {MAX_RATIO}"
            )
        if not 0 < self.crop <= 1:
            raise UserError(f"joint.crop is {self.crop!r}; give an area fraction above 0, up to 1")
        for name in ("start", "flip", "colour"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(
                    f"joint.{name} is {getattr(self, name)!r}; give a number from 0 to 1"
                )


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    weights: str = ""  # run, weight file or folder that the training learns from
    temperature: float = 4.0  # softens the predictions of a teacher with the same classes
    features: int = 0  # width of the features of a teacher with other classes; 0: it predicts
    regions: int = 0  # per side of the image, whose tokens' similarities are learned; 0: none

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise UserError(
                f"teacher.temperature is {self.temperature!r}; give a number above 0, such as 4"
            )
        if not 0 <= self.features <= MAX_FEATURES:
            raise UserError(f"teacher.features is {self.features!r}; give a number of features")
        if not 0 <= self.regions <= MAX_REGIONS:
            raise UserError(f"teacher.regions is {self.regions!r}; give 0 to {MAX_REGIONS}")
