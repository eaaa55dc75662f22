"""Pixels to tokens; positions, and stretching them to a new grid."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.config import STAGES, ViTConfig
from vitrail.model.resnet import ResNet


class PatchEmbed(nn.Module):
    """Cuts the image into patches and multiplies each by the same matrix: x E of equation 1.

    A convolution whose stride is its size does just that, and faster than cutting.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.backbone: nn.Module = nn.Identity()
        channels, patch = config.channels, config.patch
        if config.stem != "patch":
            self.backbone = resnet = ResNet(channels, STAGES[config.stem, patch])
            channels, patch = resnet.width, 1
        self.proj = nn.Conv2d(channels, config.width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W)
        x = self.proj(self.backbone(x))  # (B, D, rows, columns)
        return x.flatten(2).mT  # (B, P, D)


def stretch(positions: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Learned positions of one grid of patches, seen on another one: bicubic, as timm does it."""
    if old == new:
        return positions
    # half precision would round the interpolation, double must stay double
    exact = positions.to(torch.promote_types(positions.dtype, torch.float32))
    x = exact.unflatten(1, old).permute(0, 3, 1, 2)
    x = F.interpolate(x, size=new, mode="bicubic", antialias=True)
    return x.flatten(2).mT.to(positions.dtype)  # (1, P, D)


def sincos(grid: tuple[int, int], width: int, like: Tensor) -> Tensor:
    """Fixed positions: columns and rows as waves of many lengths (Beyer et al., 2022)."""
    speed = 10_000 ** -torch.linspace(0, 1, width // 4, dtype=torch.float64, device=like.device)
    rows, columns = (torch.arange(n, dtype=torch.float64, device=like.device) for n in grid)
    y, x = (
        wave.flatten()[:, None] * speed for wave in torch.meshgrid(rows, columns, indexing="ij")
    )
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).to(like.dtype)  # (P, D)


def rotary(grid: tuple[int, int], width: int, prefix: int, like: Tensor) -> Tensor:
    """Cosines and sines by which queries and keys of each token are turned (Siméoni et al., 2025).

    A patch turns by an angle that grows with its row and column, so that the product of a query and
    a key depends on how far apart their patches are. Tokens in front of the patches do not turn.
    """
    period = 100 ** (torch.arange(width // 4, dtype=torch.float64, device=like.device) * 4 / width)
    # the middles of the patches, on a scale from -1 to 1 whatever the grid
    rows, columns = (
        torch.arange(0.5, n, dtype=torch.float64, device=like.device) / n * 2 - 1 for n in grid
    )
    middle = torch.cartesian_prod(rows, columns)  # (P, 2)
    angle = (2 * math.pi * middle[:, :, None] / period).flatten(1).tile(2)  # (P, d)
    angle = F.pad(angle, (0, 0, prefix, 0))  # (N, d)
    return torch.stack([angle.cos(), angle.sin()])[:, None, None].to(like.dtype)  # (2, 1, 1, N, d)


def rotate(x: Tensor, rope: Tensor | None) -> Tensor:  # (B, h, N, d)
    """Turns each pair of numbers (i, i + d/2) by its angle, if positions rotate at all."""
    if rope is None:
        return x
    cos, sin = rope
    left, right = x.chunk(2, dim=-1)
    turned: Tensor = x * cos + torch.cat([-right, left], dim=-1) * sin
    return turned.to(x.dtype)
