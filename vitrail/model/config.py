"""The settings that define an architecture, checked when a config is created."""

from dataclasses import dataclass
from typing import Literal, get_args

from vitrail.arguments import check_fields
from vitrail.errors import UserError

MlpKind = Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"]
PositionKind = Literal["learned", "sincos", "rotary", "none"]
PoolKind = Literal["cls", "avg", "cls_avg", "map"]
HeadKind = Literal["linear", "mlp", "none"]
StemKind = Literal["patch", "conv", "r9", "r26", "r50"]

# Bottleneck blocks in each stage of the ResNet, by its name and its total stride. For stride 16,
# the paper moves the blocks of the fourth stage into the third (Dosovitskiy et al., 2021,
# section 4.1).
STAGES = {("r26", 32): (2, 2, 2, 2), ("r50", 16): (3, 4, 9), ("r50", 32): (3, 4, 6, 3)}


MAX_SETTING = 1_000_000  # larger numbers are mistakes, and products of them overflow


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """An architecture: every setting that a published Vision Transformer needs, and no other.

    >>> import vitrail
    >>> config = vitrail.ViTConfig(image=224, patch=16, width=384, heads=6)
    >>> config.grid, config.tokens  # 14 x 14 patches and [CLS]
    ((14, 14), 197)
    >>> vitrail.ViTConfig(heads=7)
    Traceback (most recent call last):
    vitrail.errors.UserError: 7 heads do not divide width 768; try 6 heads
    """

    image: int | tuple[int, int] = 224  # pixels, or (height, width); forward accepts others
    patch: int = 16  # side of a patch in pixels; with a stem of convolutions, its total stride
    channels: int = 3  # 1 for greyscale, 3 for RGB, any other number for other sensors
    classes: int = 1000  # number of logits
    width: int = 768  # embedding dimension of a token
    depth: int = 12  # number of encoder blocks
    heads: int = 12  # attention heads per block; each has width / heads channels
    mlp_ratio: float = 4.0  # hidden width of the MLP over the width of a token
    mlp: MlpKind = "gelu"  # GELU: exact, tanh (Google), sigmoid (quick, CLIP); or SwiGLU (DINOv2)
    positions: PositionKind = "learned"  # embeddings: learned, fixed sin-cos, rotary (RoPE) or none
    pool: PoolKind = "cls"  # [CLS], average of the patches, both (DINOv2), or attention (MAP head)
    norm_after_pool: bool = False  # with pool "avg": final norm after the average, as in MAE
    registers: int = 0  # extra tokens that the head does not read (Darcet et al., 2024)
    distilled: bool = False  # DeiT's distillation token; the logits are the mean of both heads
    layer_scale: float | None = None  # initial layer scale (Touvron et al., 2021); none by default
    drop_path: float = 0.0  # stochastic depth: rate in the last block, rising linearly from 0
    dropout: float = 0.0  # rate after embedding, after attention and after both MLP layers
    attention_dropout: float = 0.0  # rate on the attention weights, after the softmax
    qk_norm: bool = False  # layer norm on the queries and keys of each head (Dehghani et al., 2023)
    pre_norm: bool = False  # one more layer norm before the blocks, as in CLIP
    eps: float = 1e-6  # of layer norms: 1e-6 Google, timm; 1e-5 DINOv3, CLIP; 1e-12 Hugging Face
    head: HeadKind = "linear"  # linear, the paper's pretraining MLP with tanh, or none (features)
    stem: StemKind = "patch"  # before the patch embedding: nothing, convolutions, or a ResNet

    def __post_init__(self) -> None:
        if isinstance(self.image, list):  # JSON and TOML have no tuples
            object.__setattr__(self, "image", tuple(self.image))
        check_fields(self)
        self._check_choices()
        self._check_numbers()
        self._check_combinations()

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels.

        >>> vitrail.ViTConfig(image=224).size
        (224, 224)
        """
        return (self.image, self.image) if isinstance(self.image, int) else self.image

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches.

        >>> vitrail.ViTConfig(image=(160, 224), patch=16).grid
        (10, 14)
        """
        return self.size[0] // self.patch, self.size[1] // self.patch

    @property
    def patches(self) -> int:
        """Number of patches.

        >>> vitrail.ViTConfig(image=224, patch=16).patches
        196
        """
        return self.grid[0] * self.grid[1]

    @property
    def has_cls(self) -> bool:
        """Whether the sequence starts with a [CLS] token, which the head reads.

        >>> vitrail.ViTConfig(pool="avg").has_cls
        False
        """
        return self.pool in ("cls", "cls_avg")

    @property
    def class_tokens(self) -> int:
        """Tokens in front of the patches that a head reads: [CLS] and the distillation token.

        >>> vitrail.ViTConfig(distilled=True).class_tokens
        2
        """
        return self.has_cls + self.distilled

    @property
    def prefix(self) -> int:
        """All tokens in front of the patches: class tokens, then registers.

        >>> vitrail.ViTConfig(registers=4).prefix
        5
        """
        return self.class_tokens + self.registers

    @property
    def tokens(self) -> int:
        """Length of the sequence in the blocks.

        >>> vitrail.ViTConfig(image=224, patch=16).tokens
        197
        """
        return self.prefix + self.patches

    @property
    def feature_width(self) -> int:
        """Length of the vector that the head reads.

        >>> vitrail.ViTConfig(width=192, heads=3, pool="cls_avg").feature_width  # two of 192
        384
        """
        return 2 * self.width if self.pool == "cls_avg" else self.width

    @property
    def hidden(self) -> int:
        """Hidden width of the MLP.

        >>> vitrail.ViTConfig(width=192, heads=3).hidden
        768
        """
        return round(self.width * self.mlp_ratio)

    @property
    def small_stem(self) -> bool:
        """Whether the stem consists of a few convolutions with batch norm, for any patch size.

        >>> vitrail.ViTConfig(stem="conv").small_stem
        True
        """
        return self.stem in ("conv", "r9")

    def _check_choices(self) -> None:
        kinds = {
            "mlp": MlpKind,
            "positions": PositionKind,
            "pool": PoolKind,
            "head": HeadKind,
            "stem": StemKind,
        }
        for name, kind in kinds.items():
            value = getattr(self, name)
            if value not in get_args(kind):
                choices = ", ".join(get_args(kind))
                raise UserError(f"{name} {value!r} is unknown; choose one of {choices}")

    def _check_numbers(self) -> None:
        counts = {"image": min(self.size)}
        for name in ("patch", "channels", "classes", "width", "depth", "heads"):
            counts[name] = getattr(self, name)
        for name, number in counts.items():
            _check_count(name, number, 1)
        _check_count("image", max(self.size), 1)
        _check_count("registers", self.registers, 0)
        for name in ("mlp_ratio", "eps"):
            value = getattr(self, name)
            if not 0 < value <= MAX_SETTING:
                raise UserError(
                    f"{name} is {value}; give a number above 0, at most {MAX_SETTING:,}"
                )
        for name in ("drop_path", "dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(
                    f"{name} is {getattr(self, name)}; give a probability from 0 to below 1"
                )

    def _check_combinations(self) -> None:
        check_image_size(*self.size, self.patch)
        if self.hidden < 1:
            raise UserError(f"mlp_ratio {self.mlp_ratio} makes the MLP's hidden width 0; try 4")
        if self.width % self.heads:
            candidates = range(1, min(self.width, 2 * self.heads) + 1)
            divisors = [n for n in candidates if self.width % n == 0]
            near = min(divisors, key=lambda n: abs(n - self.heads))
            raise UserError(
                f"{self.heads} heads do not divide width {self.width}; try {near} heads"
            )
        if self.positions == "sincos" and (self.width % 4 or self.width < 8):
            raise UserError(
                f"sincos positions need a width that is a multiple of 4 from 8 on, not {self.width}"
            )
        if self.positions == "rotary" and self.width // self.heads % 4:
            raise UserError(
                f"rotary positions need a head width that is a multiple of 4, not "
                f"{self.width // self.heads}; change width or heads"
            )
        if self.distilled and self.pool != "cls":
            raise UserError(
                f'a distilled model needs pool "cls", not "{self.pool}": its heads read tokens'
            )
        if self.distilled and self.head != "linear":
            raise UserError(f'a distilled model needs head "linear", not "{self.head}"')
        if self.pool == "cls_avg" and self.head == "mlp":
            raise UserError('pool "cls_avg" needs head "linear" or "none", not "mlp"')
        if self.norm_after_pool and self.pool != "avg":
            raise UserError(f'norm_after_pool needs pool "avg", not "{self.pool}"')
        self._check_stem()

    def _check_stem(self) -> None:
        if self.small_stem:
            if self.patch < 2 or self.patch.bit_count() != 1:
                raise UserError(
                    f"stem {self.stem} halves the image once or more, so patch is 2, 4, 8, ..., "
                    f"not {self.patch}; use patch 4 or 8"
                )
            if self.width % self.patch:
                fit = max(1, round(self.width / self.patch)) * self.patch
                raise UserError(
                    f"stem {self.stem} doubles its channels with each halving: width {self.width} "
                    f"is not a multiple of patch {self.patch}; use width {fit}"
                )
        elif self.stem != "patch" and (self.stem, self.patch) not in STAGES:
            known = " or ".join(str(patch) for stem, patch in STAGES if stem == self.stem)
            raise UserError(
                f"stem {self.stem} has no variant with patch {self.patch}; use patch {known}"
            )


def _check_count(name: str, number: int, least: int) -> None:
    """Raises unless a setting is a whole number from `least` to `MAX_SETTING`."""
    if number < least:
        raise UserError(f"{name} is {number!r:.40}; give a whole number of at least {least}")
    if number > MAX_SETTING:
        raise UserError(f"{name} is {number!r:.40}; give a whole number of at most {MAX_SETTING:,}")


def stem_widths(width: int, patch: int) -> list[int]:
    """Channels of a convolutional stem: doubled with each halving of the image, up to `width`."""
    return [width >> i for i in range(patch.bit_length() - 1, -1, -1)]


def check_image_size(height: int, width: int, patch: int) -> None:
    """Rejects an image that patches do not tile exactly, and names a size that they do."""
    if height % patch or width % patch:
        # at least 3 x 3 patches: attention over fewer has little to compare
        fit = [max(3, round(side / patch)) * patch for side in (height, width)]
        raise UserError(
            f"image {height} x {width} is not a multiple of patch {patch}; "
            f"resize it to {fit[0]} x {fit[1]}, or choose another patch"
        )
