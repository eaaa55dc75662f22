"""From pixels to tokens: patch embedding and position embeddings, for any grid of patches."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.config import STAGES, ViTConfig
from vitrail.model.resnet import ResNet
from vitrail.model.stem import ConvStem, ResNet9

WITHOUT_FLOAT64 = ("mps",)  # types of devices; the CPU computes position embeddings for them


class PatchEmbed(nn.Module):
    """Multiplies each flattened patch by one matrix: x E of equation 1.

    A convolution whose stride equals its kernel size does exactly that, without copying patches.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.backbone: nn.Module = nn.Identity()
        channels, patch = config.channels, config.patch
        if config.small_stem:
            stem = ConvStem if config.stem == "conv" else ResNet9
            self.backbone = stem(channels, config.width, patch)
            channels, patch = config.width, 1
        elif config.stem != "patch":
            self.backbone = resnet = ResNet(channels, STAGES[config.stem, patch])
            channels, patch = resnet.width, 1
        self.proj = nn.Conv2d(channels, config.width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W)
        x = self.proj(self.backbone(x))  # (B, D, rows, columns)
        return x.flatten(2).mT  # (B, P, D)


def blank_patches(x: Tensor, keep: Tensor, patch: int) -> Tensor:  # (B, C, H, W)
    """Zeroes the pixels of all patches that are not in `keep`, the indices of shape (B, P')."""
    grid = x.shape[2] // patch, x.shape[3] // patch
    dropped = torch.ones(len(x), math.prod(grid), dtype=torch.bool, device=x.device)
    dropped = dropped.scatter(1, keep, False).unflatten(1, grid)  # (B, rows, columns)
    dropped = dropped.repeat_interleave(patch, 1).repeat_interleave(patch, 2)  # (B, H, W)
    return x.masked_fill(dropped[:, None], 0)  # (B, C, H, W)


def interpolate_positions(positions: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Position embeddings of one grid of patches, resampled to another: bicubic, like timm."""
    if old == new:
        return positions
    # half precision would round the interpolation; double precision must stay double
    exact = positions.to(torch.promote_types(positions.dtype, torch.float32))
    x = exact.unflatten(1, old).permute(0, 3, 1, 2)  # (1, D, rows, columns)
    x = F.interpolate(x, size=new, mode="bicubic", antialias=True)  # (1, D, rows, columns)
    return x.flatten(2).mT.to(positions.dtype)  # (1, P, D)


def float64_device(device: torch.device) -> torch.device:
    """The device itself, or the CPU if the device does not support float64."""
    return torch.device("cpu") if device.type in WITHOUT_FLOAT64 else device


def sincos_positions(grid: tuple[int, int], width: int, like: Tensor) -> Tensor:
    """Fixed 2D sine-cosine position embeddings (Beyer et al., 2022), in the dtype of `like`."""
    device = float64_device(like.device)
    omega = 10_000 ** -torch.linspace(0, 1, width // 4, dtype=torch.float64, device=device)
    rows, columns = (torch.arange(n, dtype=torch.float64, device=device) for n in grid)
    y, x = torch.meshgrid(rows, columns, indexing="ij")  # each (rows, columns)
    y, x = y.flatten()[:, None] * omega, x.flatten()[:, None] * omega  # each (P, D / 4)
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).to(like)  # (P, D)


def rotary_positions(grid: tuple[int, int], head_width: int, prefix: int, like: Tensor) -> Tensor:
    """The cosines and sines that rotate queries and keys: RoPE as in DINOv3 (Siméoni et al., 2025).

    The angles grow linearly with row and column, so that the product of a query and a key depends
    on the offset between their patches. The `prefix` tokens are not rotated.
    """
    device = float64_device(like.device)
    frequencies = torch.arange(head_width // 4, dtype=torch.float64, device=device)
    period = 100 ** (frequencies * 4 / head_width)
    # patch centres, scaled to the range -1 to 1 for any grid
    rows, columns = (
        torch.arange(0.5, n, dtype=torch.float64, device=device) / n * 2 - 1 for n in grid
    )
    centres = torch.cartesian_prod(rows, columns)  # (P, 2)
    angle = (2 * math.pi * centres[:, :, None] / period).flatten(1).tile(2)  # (P, d)
    angle = F.pad(angle, (0, 0, prefix, 0))  # (N, d)
    return torch.stack([angle.cos(), angle.sin()])[:, None, None].to(like)  # (2, 1, 1, N, d)


def apply_rotary(x: Tensor, rope: Tensor | None) -> Tensor:  # (B, h, N, d)
    """Rotates each pair of numbers (i, i + d/2) by its angle; without `rope`, returns `x`."""
    if rope is None:
        return x
    cos, sin = rope
    left, right = x.chunk(2, dim=-1)
    rotated: Tensor = x * cos + torch.cat([-right, left], dim=-1) * sin
    return rotated.to(x.dtype)
