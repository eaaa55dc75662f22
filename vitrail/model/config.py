"""Every number that defines an architecture, checked the moment it is written down."""

from dataclasses import dataclass
from typing import Literal, get_args

from vitrail.errors import UserError

Mlp = Literal["gelu", "gelu_tanh", "swiglu"]
Positions = Literal["learned", "sincos", "rotary", "none"]
Pool = Literal["cls", "avg", "map"]
Head = Literal["linear", "mlp", "none"]
Stem = Literal["patch", "r26", "r50"]

# Blocks in each stage of the ResNet, by the pixels between two tokens. For 16, the paper moves
# the blocks of the fourth stage into the third (Dosovitskiy et al., 2021, section 4.1).
STAGES = {("r26", 32): (2, 2, 2, 2), ("r50", 16): (3, 4, 9), ("r50", 32): (3, 4, 6, 3)}


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    image: int | tuple[int, int] = (
        224  # pixels, or (height, width); a forward takes other sizes too
    )
    patch: int = 16  # side of a patch in pixels: with a ResNet stem, pixels between two tokens
    channels: int = 3  # 1 for grey, 3 for colour, any other count for other sensors
    classes: int = 1000  # length of the output
    width: int = 768  # length of a token
    depth: int = 12  # blocks
    heads: int = 12  # attention heads in each block; they share the width evenly
    mlp_ratio: float = 4.0  # width inside the MLP over the width of a token
    mlp: Mlp = "gelu"  # exact GELU, its tanh form (Google's JAX code), or SwiGLU (DINOv2 giant)
    positions: Positions = (
        "learned"  # added vectors, fixed waves, rotated queries and keys, or none
    )
    pool: Pool = "cls"  # read a [CLS] token, the average of the patches, or an attention over them
    norm_after_pool: bool = False  # average first and normalise then, as MAE does for pool "avg"
    registers: int = 0  # extra tokens without position that nobody reads (Darcet et al., 2024)
    distilled: bool = False  # DeiT's second [CLS]; the logits are the mean of both heads
    layer_scale: float | None = None  # initial scale of each residual branch (Touvron et al., 2021)
    drop_path: float = 0.0  # chance to skip the last block for an image; earlier blocks skip less
    dropout: float = 0.0  # after positions and after each linear layer but queries, keys, values
    qk_norm: bool = False  # normalise queries and keys of each head (Dehghani et al., 2023)
    pre_norm: bool = False  # one more norm before the blocks, as in CLIP
    eps: float = 1e-6  # of the layer norms: Google, timm; DINOv3, CLIP 1e-5; Hugging Face 1e-12
    head: Head = "linear"  # one matrix, the paper's pretraining MLP with tanh, or pooled features
    stem: Stem = "patch"  # cut patches, or run a ResNet-26 or ResNet-50 first

    def __post_init__(self) -> None:
        if isinstance(self.image, list):  # as JSON and TOML have it
            object.__setattr__(self, "image", tuple(self.image))
        self._check_kinds()
        self._check_numbers()
        self._check_fit()

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return (self.image, self.image) if isinstance(self.image, int) else self.image

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.size[0] // self.patch, self.size[1] // self.patch

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def readers(self) -> int:
        """Tokens in front of the patches that a head reads: [CLS] and distillation."""
        return (self.pool == "cls") + self.distilled

    @property
    def prefix(self) -> int:
        """All tokens in front of the patches: the readers, then the registers."""
        return self.readers + self.registers

    @property
    def tokens(self) -> int:
        """Length of the sequence that the blocks see."""
        return self.prefix + self.patches

    @property
    def hidden(self) -> int:
        """Width inside the MLP."""
        return round(self.width * self.mlp_ratio)

    def _check_kinds(self) -> None:
        kinds = {"mlp": Mlp, "positions": Positions, "pool": Pool, "head": Head, "stem": Stem}
        for name, kind in kinds.items():
            if getattr(self, name) not in get_args(kind):
                wanted = ", ".join(get_args(kind))
                raise UserError(
                    f"{name} {getattr(self, name)!r} is unknown; choose one of {wanted}"
                )

    def _check_numbers(self) -> None:
        if not (isinstance(self.image, int) or len(self.image) == 2):
            raise UserError(f"image {self.image} is no size; give one number or (height, width)")
        counts = {"image": min(self.size)}
        for name in ("patch", "channels", "classes", "width", "depth", "heads"):
            counts[name] = getattr(self, name)
        for name, number in counts.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise UserError(f"{name} is {number!r}; give a whole number of at least 1")
        if not isinstance(self.registers, int) or self.registers < 0:
            raise UserError(f"registers is {self.registers!r}; give a whole number of at least 0")
        for name in ("mlp_ratio", "eps"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"{name} is {getattr(self, name)}; give a number above 0")
        for name in ("drop_path", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; give a chance from 0 to below 1")

    def _check_fit(self) -> None:
        check_divides(*self.size, self.patch)
        if self.hidden < 1:
            raise UserError(f"mlp_ratio {self.mlp_ratio} leaves nothing inside the MLP; try 4")
        if self.width % self.heads:
            fits = [n for n in range(1, min(self.width, 2 * self.heads) + 1) if self.width % n == 0]
            near = min(fits, key=lambda n: abs(n - self.heads))
            raise UserError(
                f"{self.heads} heads do not divide width {self.width}; try {near} heads"
            )
        if self.positions == "sincos" and (self.width % 4 or self.width < 8):
            raise UserError(
                f"width {self.width} has no sincos positions; make it a multiple of 4 from 8 on"
            )
        if self.positions == "rotary" and self.width // self.heads % 4:
            raise UserError(
                f"head width {self.width // self.heads} cannot be rotated in two directions; "
                f"choose width and heads so that width / heads is a multiple of 4"
            )
        if self.distilled and self.pool != "cls":
            raise UserError(
                f'a distilled model reads [CLS], not pool "{self.pool}"; set pool to "cls"'
            )
        if self.distilled and self.head != "linear":
            raise UserError(
                f'a distilled model has linear heads, not "{self.head}"; set head to "linear"'
            )
        if self.norm_after_pool and self.pool != "avg":
            raise UserError(f'norm_after_pool needs pool "avg", not "{self.pool}"; leave it out')
        if self.stem != "patch" and (self.stem, self.patch) not in STAGES:
            known = " or ".join(str(patch) for stem, patch in STAGES if stem == self.stem)
            raise UserError(
                f"stem {self.stem} with patch {self.patch} was never published; use {known}"
            )


def check_divides(height: int, width: int, patch: int) -> None:
    """Stops unless patches cover the image exactly."""
    if height % patch or width % patch:
        # three a side at least: of fewer, attention has little to look at
        fit = [max(3, round(side / patch)) * patch for side in (height, width)]
        raise UserError(
            f"image {height} x {width} is no multiple of patch {patch}; "
            f"resize it to {fit[0]} x {fit[1]}, or choose another patch"
        )
