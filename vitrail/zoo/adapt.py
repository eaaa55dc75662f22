"""Adapts pretrained weights to another image size, patch size or number of channels."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.embed import interpolate_positions


def resize_position_embedding(
    positions: Tensor, old: ViTConfig, new: ViTConfig, resized: list[str]
) -> Tensor:
    """Interpolates the positions of patches to another grid; keeps those of prefix tokens."""
    if old.grid == new.grid:
        return positions
    prefix, patches = positions[:, : old.class_tokens], positions[:, old.class_tokens :]
    resized.append(
        f"positions {old.grid[0]} x {old.grid[1]} -> {new.grid[0]} x {new.grid[1]}: "
        f"bicubic, antialiased"
    )
    return torch.cat([prefix, interpolate_positions(patches, old.grid, new.grid)], dim=1)


def resize_patch_kernel(kernel: Tensor, patch: int, resized: list[str]) -> Tensor:
    """A patch projection for another patch size (Beyer et al., 2023, FlexiViT).

    With B the matrix that resizes a patch, w' = pinv(B)^T w makes <Bx, w'> = <x, w>: a patch
    that is enlarged gives the same token.
    """
    old = kernel.shape[-1]
    if old == patch:
        return kernel
    basis = torch.eye(old * old, dtype=torch.float64).view(-1, 1, old, old)
    size = (patch, patch)
    matrix = F.interpolate(basis, size=size, mode="bicubic", antialias=True)
    inverse = torch.linalg.pinv(matrix.flatten(1).T)
    resized.append(f"patch kernel {old} x {old} -> {patch} x {patch}: pseudo-inverse")
    fitted: Tensor = (kernel.double().flatten(2) @ inverse).unflatten(2, size)
    return fitted.to(kernel.dtype)


def adapt_input_channels(kernel: Tensor, channels: int, adapted: list[str]) -> Tensor:
    """A first convolution for another number of input channels, as timm adapts it.

    For one channel the kernel is summed over channels. For more it is repeated (red, green, blue,
    red ...) and scaled by the ratio of the channel counts.
    """
    old = kernel.shape[1]
    if old == channels:
        return kernel
    if channels == 1:
        adapted.append(f"channels {old} -> 1: the kernel is summed over channels")
        return kernel.sum(dim=1, keepdim=True)
    if old not in (1, 3):
        raise UserError(
            f"weights for {old} channels cannot be adapted to {channels}; use weights for 1 or 3"
        )
    adapted.append(f"channels {old} -> {channels}: the kernel is repeated, times {old}/{channels}")
    repeated = kernel.repeat(1, -(-channels // old), 1, 1)[:, :channels]
    return repeated * (old / channels)
