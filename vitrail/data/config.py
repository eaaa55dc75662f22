"""Settings of preprocessing, augmentation and data loading."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from vitrail.errors import UserError

MAX_SIZE = 65_536  # pixels of a side, or channels; no image format here has larger sides
MIN_CROP = 0.05  # a smaller ratio would resize images to more than 20 times `size`

Policy = Literal["none", "trivial", "rand"]
Interpolation = Literal["bilinear", "bicubic"]
PixelType = Literal["uint8", "uint16", "float32"]
LabelKind = Literal["single", "multi", "partial", "none"]
Shuffle = Literal["all", "windows"]
MAX_WORKERS = 1000  # processes; larger numbers are mistakes
CorruptionScope = Literal["quick", "full"]  # how many images and strengths are evaluated

# Mean and standard deviation of red, green and blue that published weights expect.
NORMALISATIONS = {
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # Google, AugReg, SigLIP
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # DeiT, DINO, MAE, torchvision
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    size: int | tuple[int, int] = 224  # input resolution in pixels, or (height, width)
    crop: float = 1.0  # center crop ratio: resize to size / crop, then center-crop to size
    interpolation: Interpolation = "bicubic"  # interpolation of the resize, with antialiasing
    mean: tuple[float, ...] = (0.5,)  # mean of pixels, white is 1, per channel or one for all
    std: tuple[float, ...] = (0.5,)  # their standard deviation, per channel or one for all
    channels: int = 3  # input channels: 1 greyscale, 3 RGB, other numbers for other sensors
    pixels: PixelType = "uint8"  # uint8; uint16 and float32 keep the range of such images

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
    def from_dict(cls, settings: Mapping[str, Any]) -> "Preprocess":
        """Rebuilds the settings from the result of `to_dict` or from JSON."""
        if unknown := settings.keys() - {field.name for field in fields(cls)}:
            raise UserError(
                f"preprocessing has no setting {', '.join(map(repr, sorted(unknown)))}; "
                f"a newer version of Vitrail may have written the file: upgrade"
            )
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """Converts the settings to values that JSON can hold."""
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
            raise UserError(f"size is {self.size!r}; give one number or (height, width)")
        for name, number in {
            "size": min(self.height, self.width),
            "channels": self.channels,
        }.items():
            if not isinstance(number, int) or number < 1:
                raise UserError(f"{name} is {number!r}; give a whole number of at least 1")
            if max(number, self.height, self.width) > MAX_SIZE:
                raise UserError(f"{name} is too large; give a whole number of at most {MAX_SIZE:,}")
        if not MIN_CROP <= self.crop <= 1:
            raise UserError(f"crop is {self.crop}; give a ratio from {MIN_CROP} to 1")
        if self.interpolation not in get_args(Interpolation):
            wanted = " or ".join(get_args(Interpolation))
            raise UserError(f"unknown interpolation {self.interpolation!r}; choose {wanted}")
        if self.pixels not in get_args(PixelType):
            wanted = ", ".join(get_args(PixelType))
            raise UserError(f"unknown pixel type {self.pixels!r}; choose one of {wanted}")
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, self.channels):
                count = len(getattr(self, name))
                raise UserError(
                    f"{name} has {count} values for {self.channels} channels; give one per channel"
                )
        if not all(math.isfinite(number) for number in (*self.mean, *self.std)):
            raise UserError(f"mean is {self.mean} and std is {self.std}; give finite numbers")
        if not min(self.std) > 0:
            raise UserError(f"std is {self.std}; give positive numbers")


@dataclass(frozen=True, kw_only=True)
class Augment:
    flip: float = 0.0  # probability of a horizontal flip
    shift: float = 0.0  # maximum translation, as a fraction of the side (pad and random crop)
    scale: float = 1.0  # minimum area fraction of a random resized crop; 1 disables it
    rotate: float = 0.0  # maximum rotation in degrees
    zoom: float = 0.0  # maximum zoom in or out, as a fraction of the side
    shear: float = 0.0  # maximum horizontal shear, in pixels per pixel of height
    policy: Policy = "none"  # random operations: TrivialAugment (one) or RandAugment (two)
    magnitude: float = 1.0  # policy magnitude in [0, 1]: the maximum (trivial) or fixed (rand)
    erase: float = 0.0  # probability of random erasing
    mixup: float = 0.0  # mixup alpha; 0 disables mixup (Zhang et al., 2018)
    cutmix: float = 0.0  # CutMix alpha; 0 disables CutMix (Yun et al., 2019)

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            wanted = ", ".join(get_args(Policy))
            raise UserError(f"unknown policy {self.policy!r}; choose one of {wanted}")
        for name in ("flip", "shift", "magnitude", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} is {getattr(self, name)}; give a number from 0 to 1")
        if not 0 < self.scale <= 1:
            raise UserError(f"scale is {self.scale}; give an area fraction above 0 and at most 1")
        if not 0 <= self.zoom < 1:
            raise UserError(f"zoom is {self.zoom}; give a fraction of at least 0 and below 1")
        for name in ("rotate", "shear", "mixup", "cutmix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}; give a number of at least 0")


AUGMENT_PRESETS = {  # a flip would turn digits and letters into others: "digits" has none
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
    path: str = "path"  # name of the column with image paths
    label: str = "label"  # name of the column with class labels
    split: str | None = None  # name of the column with train, val or test (default: "split" if any)
    separator: str | None = None  # between the labels of a multi-label cell (default: ; | or ,)

    def __post_init__(self) -> None:
        for entry in fields(self):
            name = getattr(self, entry.name)
            if name != entry.default and not (isinstance(name, str) and name):
                raise UserError(f"column {entry.name} is {name!r}; give the name of a column")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    augment: Augment = field(default_factory=Augment)  # augmentation of training images
    columns: Columns = field(default_factory=Columns)  # column names of a table
    labels: LabelKind | None = (
        None  # labels per image: single, multi, partial (some have none), none
    )
    labelled: float = 1.0  # fraction of the training images whose labels are used
    train_size: int | None = None  # resolution in training, if below that of preprocessing (FixRes)
    balanced: bool = False  # sample every class equally often, whatever its number of images
    shuffle: Shuffle = "all"  # order of an epoch: of all images, or of windows of remote shards
    skip_broken: bool = False  # skip unreadable images and report how many
    workers: int | None = None  # worker processes for loading (default: one per core, at most 8)
    cache_gb: float | None = None  # RAM for decoded images (default: a third of available memory)
    disk_gb: float | None = None  # disk for decoded images beyond RAM (default: half of free space)

    def __post_init__(self) -> None:
        if self.labels not in (None, *get_args(LabelKind)):
            raise UserError(f"labels is {self.labels!r}; choose single, multi, partial or none")
        if self.labels == "multi" and self.balanced:
            raise UserError(
                "balanced sampling needs one label per image; use `train.class_weights=True`"
            )
        if self.shuffle not in get_args(Shuffle):
            raise UserError(f"shuffle is {self.shuffle!r}; choose {' or '.join(get_args(Shuffle))}")
        if self.shuffle == "windows" and self.balanced:
            raise UserError(
                "balanced sampling needs images in any order; use `train.class_weights=True`, or "
                "`data.shuffle='all'`"
            )
        if not 0 < self.labelled <= 1:
            raise UserError(
                f"data.labelled is {self.labelled!r}; give a fraction above 0, at most 1"
            )
        if self.train_size is not None and not self.train_size > 0:
            raise UserError(f"train_size is {self.train_size}; give a number of pixels above 0")
        for name, most in (("workers", MAX_WORKERS), ("cache_gb", 1e9), ("disk_gb", 1e9)):
            number = getattr(self, name)
            if number is not None and not 0 <= number <= most:
                raise UserError(f"{name} is {number}; give a number from 0 to {most:g}")
        if self.workers is not None and not isinstance(self.workers, int):
            raise UserError(f"workers is {self.workers}; give a whole number of at least 0")
