"""Histograms of oriented gradients: the edges of an image, whatever its colours and contrast."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

DIRECTIONS = 8
ANGLE = 2 * math.pi / DIRECTIONS  # from one direction to the next
SCALE = 4.0  # the standard deviation becomes about 1, like that of normalised pixels
EPSILON = 0.015  # added to the norm of a histogram, keeps flat cells near 0


def cell_size(patch: int) -> int:
    """The side of a cell in pixels: half a patch, or a whole one of up to 4 pixels."""
    return patch // 2 if patch > 4 and patch % 2 == 0 else patch


def oriented_gradients(images: Tensor, cell: int) -> Tensor:
    """HOG (Dalal and Triggs, 2005) of each cell: (B, DIRECTIONS, H / cell, W / cell).

    The gradient of a pixel counts for the directions that are less than `ANGLE` away from it.
    """
    grey = F.pad(images.float().mean(dim=1, keepdim=True), (1, 1, 1, 1), mode="replicate")
    right = grey[..., 1:-1, 2:] - grey[..., 1:-1, :-2]
    down = grey[..., 2:, 1:-1] - grey[..., :-2, 1:-1]
    least = right.hypot(down) * math.cos(ANGLE)
    planes = []
    for direction in range(DIRECTIONS):  # one at a time fits in the cache
        angle = direction * ANGLE
        along = torch.add(right * math.cos(angle), down, alpha=math.sin(angle))
        planes.append(F.avg_pool2d((along - least).clamp(min=0), cell))
    histograms = torch.cat(planes, dim=1)
    norm: Tensor = histograms.norm(dim=1, keepdim=True)
    return SCALE * histograms / (norm + EPSILON)
