"""Every number that defines what the model is fed: preprocessing, augmentation, reading."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from vitrail.errors import UserError

Policy = Literal["none", "trivial", "rand"]
Interpolation = Literal["bilinear", "bicubic"]

# Mean and standard deviation of red, green and blue, as published weights expect them.
MEANS = {
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # Google, AugReg, SigLIP
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # DeiT, DINO, MAE, torchvision
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}


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
        pair = isinstance(self.size, tuple) and len(self.size) == 2
        if not (isinstance(self.size, int) or pair):
            raise UserError(f"size {self.size} is no size; give one number or (height, width)")
        for name, number in {
            "size": min(self.height, self.width),
            "channels": self.channels,
        }.items():
            if not isinstance(number, int) or number < 1:
                raise UserError(f"{name} is {number!r}; give a whole number of at least 1")
        if not 0.05 <= self.crop <= 1:  # below, the whole image would be made too large
            raise UserError(f"crop is {self.crop}; give a share from 0.05 to 1")
        if self.interpolation not in get_args(Interpolation):
            wanted = " or ".join(get_args(Interpolation))
            raise UserError(f"interpolation {self.interpolation!r} is unknown; choose {wanted}")
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, self.channels):
                count = len(getattr(self, name))
                raise UserError(
                    f"{name} has {count} numbers for {self.channels} channels; give one for each"
                )
        if not all(math.isfinite(number) for number in (*self.mean, *self.std)):
            raise UserError(f"mean is {self.mean}, std {self.std}; give finite numbers")
        if not min(self.std) > 0:
            raise UserError(f"std is {self.std}; give numbers above 0")


@dataclass(frozen=True, kw_only=True)
class Augment:
    flip: float = 0.0  # chance to mirror left and right
    shift: float = 0.0  # farthest move, as a share of the side: padded and cropped
    scale: float = 1.0  # smallest area of a random resized crop, as a share of the image; 1 is off
    rotate: float = 0.0  # farthest turn in degrees
    zoom: float = 0.0  # farthest zoom in or out, as a share of the side
    shear: float = 0.0  # farthest slant, sideways pixels per pixel of height
    policy: Policy = "none"  # random operations: TrivialAugment (one) or RandAugment (two)
    magnitude: float = 1.0  # how far those go, from 0 to 1: at most (trivial), always (rand)
    erase: float = 0.0  # chance to paint a random rectangle over
    mixup: float = 0.0  # alpha of the blend of two images; 0 is off (Zhang et al., 2018)
    cutmix: float = 0.0  # alpha of pasting part of one into another; 0 is off (Yun et al., 2019)

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            wanted = ", ".join(get_args(Policy))
            raise UserError(f"policy {self.policy!r} is unknown; choose one of {wanted}")
        for name in ("flip", "shift", "magnitude", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} is {getattr(self, name)}; give a number from 0 to 1")
        if not 0 < self.scale <= 1:
            raise UserError(f"scale is {self.scale}; give a share of the area above 0, at most 1")
        if not 0 <= self.zoom < 1:
            raise UserError(f"zoom is {self.zoom}; give a share from 0 to below 1")
        for name in ("rotate", "shear", "mixup", "cutmix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}; give a number of at least 0")


AUGMENTS = {  # by how often an image will be seen; digits and letters must not be mirrored
    "none": Augment(),
    "digits": Augment(shift=0.1, rotate=12.0, zoom=0.1, shear=0.1),
    "gentle digits": Augment(shift=0.06, rotate=8.0, zoom=0.06, shear=0.05),
    "flips": Augment(flip=0.5),
    "light": Augment(flip=0.5, shift=0.125),
    "medium": Augment(flip=0.5, scale=0.35, policy="trivial", magnitude=0.5, erase=0.1),
    "strong": Augment(
        flip=0.5, scale=0.2, policy="rand", magnitude=0.3, erase=0.25, mixup=0.8, cutmix=1.0
    ),
}


@dataclass(frozen=True, kw_only=True)
class Columns:
    path: str = "path"  # column of a table that holds the path of the image
    label: str = "label"  # column of a table that holds the class
    split: str | None = None  # column with train, val or test; none: "split" if it is there

    def __post_init__(self) -> None:
        for entry in fields(self):
            name = getattr(self, entry.name)
            if name != entry.default and not (isinstance(name, str) and name):
                raise UserError(f"the {entry.name} is in column {name!r}; give a column's name")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    augment: Augment = field(default_factory=Augment)  # how training images are varied
    columns: Columns = field(default_factory=Columns)  # what the columns of a table are called
    balanced: bool = False  # show every class equally often, however many images it has
    skip_broken: bool = False  # go on without images that cannot be read, and say how many
    workers: int | None = None  # processes that read ahead; none: one per core, at most 8
    cache_gb: float | None = None  # memory for decoded images; none: a third of what is free
    disk_gb: float | None = None  # else a file in the cache folder; none: half of the free disk

    def __post_init__(self) -> None:
        for name in ("workers", "cache_gb", "disk_gb"):
            number = getattr(self, name)
            if number is not None and not 0 <= number <= 1e9:
                raise UserError(f"{name} is {number}; give a number from 0 to 1e9")
        if self.workers is not None and not isinstance(self.workers, int):
            raise UserError(f"workers is {self.workers}; give a whole number of at least 0")
