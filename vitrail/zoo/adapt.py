"""Weights made for one image, patch or number of channels, fitted to another."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.embed import stretch


def stretch_positions(
    positions: Tensor, old: ViTConfig, new: ViTConfig, notes: list[str]
) -> Tensor:
    """Positions of patches on another grid; those of the tokens in front stay as they are."""
    if old.grid == new.grid:
        return positions
    front, patches = positions[:, : old.readers], positions[:, old.readers :]
    notes.append(
        f"positions {old.grid[0]} x {old.grid[1]} -> {new.grid[0]} x {new.grid[1]}: "
        f"bicubic, antialiased"
    )
    return torch.cat([front, stretch(patches, old.grid, new.grid)], dim=1)


def resize_kernel(kernel: Tensor, patch: int, notes: list[str]) -> Tensor:
    """A patch projection for larger or smaller patches (Beyer et al., 2023, FlexiViT).

    With B the matrix that resizes a patch, w' = pinv(B)^T w makes <Bx, w'> = <x, w>: a resized
    image gives the tokens that the image itself gave.
    """
    old = kernel.shape[-1]
    if old == patch:
        return kernel
    basis = torch.eye(old * old, dtype=torch.float64).view(-1, 1, old, old)
    size = (patch, patch)
    resized = F.interpolate(basis, size=size, mode="bicubic", antialias=True)
    inverse = torch.linalg.pinv(resized.flatten(1).T)
    notes.append(f"patch kernel {old} x {old} -> {patch} x {patch}: pseudo-inverse")
    fitted: Tensor = (kernel.double().flatten(2) @ inverse).unflatten(2, size)
    return fitted.to(kernel.dtype)


def spread_channels(kernel: Tensor, channels: int, notes: list[str]) -> Tensor:
    """A first convolution for other inputs, as timm makes it.

    Grey: the sum over colours. More: red, green, blue, red ... scaled to the same total.
    """
    old = kernel.shape[1]
    if old == channels:
        return kernel
    if channels == 1:
        notes.append(f"channels {old} -> 1: the kernel is the sum over channels")
        return kernel.sum(dim=1, keepdim=True)
    if old not in (1, 3):
        raise UserError(
            f"weights for {old} channels cannot be spread over {channels}; start from 1 or 3"
        )
    notes.append(f"channels {old} -> {channels}: the kernel is repeated, times {old}/{channels}")
    repeated = kernel.repeat(1, -(-channels // old), 1, 1)[:, :channels]
    return repeated * (old / channels)
