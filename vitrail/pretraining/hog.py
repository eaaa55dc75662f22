"""Histograms of oriented gradients: the shapes of an image without its colours and brightness."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

DIRECTIONS = 8
SCALE = 4.0  # the standard deviation becomes about 1, like that of normalised pixels
EPSILON = 0.05  # added to the norm of a histogram, so that flat cells are near 0


def cell_size(patch: int) -> int:
    """The side of a cell in pixels: half a patch, or a whole one of up to 4 pixels."""
    return patch // 2 if patch > 4 and patch % 2 == 0 else patch


def oriented_gradients(images: Tensor, cell: int) -> Tensor:
    """HOG (Dalal and Triggs, 2005) of each cell: (B, DIRECTIONS, H / cell, W / cell).

    The gradient of a pixel counts with its length for the two nearest directions.
    """
    grey = F.pad(images.float().mean(dim=1, keepdim=True), (1, 1, 1, 1), mode="replicate")
    right = grey[..., 1:-1, 2:] - grey[..., 1:-1, :-2]
    down = grey[..., 2:, 1:-1] - grey[..., :-2, 1:-1]
    length, angle = right.hypot(down), torch.atan2(down, right) * (DIRECTIONS / 2 / math.pi)
    centres = torch.arange(DIRECTIONS, device=images.device)[:, None, None]
    apart = (angle - centres).remainder(DIRECTIONS)  # (B, DIRECTIONS, H, W)
    shares = (1 - torch.minimum(apart, DIRECTIONS - apart)).clamp(min=0)
    histograms = F.avg_pool2d(shares * length, cell)
    norm = histograms.norm(dim=1, keepdim=True)
    return SCALE * histograms / (norm + EPSILON)
