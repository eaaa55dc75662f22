"""How pixels become a tensor, as plain data saved with every model, and the one function for it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from vitrail.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Interpolation = Literal["bilinear", "bicubic"]

# Mean and standard deviation of red, green and blue, as published weights expect them.
MEANS = {
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # Google, AugReg, SigLIP
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # DeiT, DINO, MAE, torchvision
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}
LONGEST = 8  # sides longer than this many short ones are cut before resizing: they fill the memory


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    size: int | tuple[int, int] = 224  # pixels the model sees, or (height, width)
    crop: float = 1.0  # share of the short side kept: resize to size / crop, cut the centre out
    interpolation: Interpolation = "bicubic"  # between pixels; smoothed when it makes smaller
    mean: tuple[float, ...] = (0.5,)  # taken off, one number per channel or one for all, 1 is white
    std: tuple[float, ...] = (0.5,)  # divided by then, one number per channel or one for all
    channels: int = 3  # 1 for grey, 3 for colour, any other count for other sensors

    def __post_init__(self) -> None:
        for name in ("size", "mean", "std"):
            if isinstance(getattr(self, name), list):  # as JSON and TOML have it
                object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check()
        for name in ("mean", "std"):
            numbers = getattr(self, name)
            if len(numbers) == 1:
                object.__setattr__(self, name, numbers * self.channels)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Preprocess":
        """The settings again, from what `plain` gave or JSON kept."""
        if unknown := plain.keys() - {field.name for field in fields(cls)}:
            raise UserError(
                f"preprocessing has no {sorted(unknown)}; is the file of a newer version?"
            )
        return cls(**plain)

    def plain(self) -> dict[str, Any]:
        """The settings as JSON has them."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @property
    def height(self) -> int:
        return self.size if isinstance(self.size, int) else self.size[0]

    @property
    def width(self) -> int:
        return self.size if isinstance(self.size, int) else self.size[1]

    def _check(self) -> None:
        if isinstance(self.size, tuple) and len(self.size) != 2:
            raise UserError(f"size {self.size} is no size; give one number or (height, width)")
        for name, number in {
            "size": min(self.height, self.width),
            "channels": self.channels,
        }.items():
            if not isinstance(number, int) or number < 1:
                raise UserError(f"{name} is {number!r}; give a whole number of at least 1")
        if not 0 < self.crop <= 1:
            raise UserError(f"crop is {self.crop}; give a share above 0, at most 1")
        if self.interpolation not in get_args(Interpolation):
            wanted = " or ".join(get_args(Interpolation))
            raise UserError(f"interpolation {self.interpolation!r} is unknown; choose {wanted}")
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, self.channels):
                count = len(getattr(self, name))
                raise UserError(
                    f"{name} has {count} numbers for {self.channels} channels; give one for each"
                )
        if not min(self.std) > 0:
            raise UserError(f"std is {self.std}; give numbers above 0")


def preprocess(settings: Preprocess, pixels: np.ndarray) -> "Tensor":
    """What the model sees of an image (H, W, C) in uint8: float32 (C, H, W), normalised.

    Evaluation, prediction, explanation, export and serving all come through here.
    """
    import torch

    fitted = torch.from_numpy(fit(settings, pixels))
    return normalise(settings, fitted.permute(2, 0, 1).contiguous())


def fit(settings: Preprocess, pixels: np.ndarray) -> np.ndarray:
    """The image resized and its centre cut out, still uint8 (height, width, C)."""
    if pixels.ndim != 3 or pixels.dtype != np.uint8 or pixels.shape[2] != settings.channels:
        raise UserError(
            f"pixels are {pixels.dtype} of shape {pixels.shape}; give uint8 of shape "
            f"(height, width, {settings.channels})"
        )
    height, width = settings.height, settings.width
    # rounded down, as timm does: 224 / 0.9 is 248
    target = math.floor(height / settings.crop), math.floor(width / settings.crop)
    pixels = resize_to_cover(pixels, target, settings.interpolation)
    return cut(pixels, height, width)


def normalise(settings: Preprocess, images: "Tensor") -> "Tensor":
    """uint8 (..., C, H, W) to float32 with the mean taken off, on whatever device they are."""
    import torch

    mean = torch.tensor([255 * m for m in settings.mean], device=images.device)[:, None, None]
    std = torch.tensor([255 * s for s in settings.std], device=images.device)[:, None, None]
    return images.to(torch.float32).sub_(mean).div_(std)


def shrink(pixels: np.ndarray, short: int, interpolation: Interpolation) -> np.ndarray:
    """The image with its short side made `short`, unless it is that small already."""
    if min(pixels.shape[:2]) <= short:
        return pixels
    return resize_to_cover(pixels, (short, short), interpolation)


def resize_to_cover(
    pixels: np.ndarray, target: tuple[int, int], interpolation: Interpolation
) -> np.ndarray:
    """Keeps the proportions: one side becomes as long as wanted, the other one at least so."""
    height, width = pixels.shape[:2]
    if max(height, width) > LONGEST * min(height, width) * max(target) / min(target):
        longest = LONGEST * min(height, width) * max(target) // min(target)
        pixels = cut(pixels, min(height, longest), min(width, longest))
        height, width = pixels.shape[:2]
    if target[0] * width >= target[1] * height:  # the height decides
        return resize(pixels, (target[0], target[0] * width // height), interpolation)
    return resize(pixels, (target[1] * height // width, target[1]), interpolation)


def resize(pixels: np.ndarray, size: tuple[int, int], interpolation: Interpolation) -> np.ndarray:
    """Equals Pillow's resize to one grey level, seldom two, and is faster."""
    if pixels.shape[:2] == size:
        return pixels
    import torch
    from torch.nn import functional as F

    # a view of (H, W, C) as (1, C, H, W): the layout for which torch has its fast kernel
    image = torch.from_numpy(np.require(pixels, requirements="W")).permute(2, 0, 1)[None]
    resized = F.interpolate(image, size=size, mode=interpolation, antialias=True)
    return resized[0].permute(1, 2, 0).contiguous().numpy()


def cut(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """The centre of an image."""
    top = round((pixels.shape[0] - height) / 2)
    left = round((pixels.shape[1] - width) / 2)
    return np.ascontiguousarray(pixels[top : top + height, left : left + width])
