"""Agreeing views: crops of one image get the same features, and all features fill a Gaussian.

LeJEPA (Balestriero and LeCun, 2025). One network learns, without a copy of itself as a teacher, so
that nothing but its weights has to be saved for a resume.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.vit import ViT
from vitrail.pretraining.config import PretrainConfig
from vitrail.pretraining.objective import Pretrainer

GAUSSIAN = 0.02  # weight of the distance to a Gaussian, against the agreement
PROJECTION = 16  # outputs of the projector
SLICES = 256  # random directions in which the distribution is compared
KNOTS, LAST_KNOT = 17, 3.0  # of the numerical integral over the characteristic function
HIDDEN_RATIO, MAX_HIDDEN = 8, 2048  # hidden width of the projector over that of the backbone
LOCAL_CROP = (0.05, 0.3)  # area fractions of local views (Caron et al., 2021)
RATIO = 4 / 3  # maximum aspect ratio of a crop
GREY = 0.2  # probability that a view loses its colours
JITTER = 0.8  # probability that a view has its brightness, contrast and saturation changed


class AgreeingViews(Pretrainer):
    """The backbone with a projector, in which the views of an image are compared."""

    mean: Tensor
    std: Tensor

    def __init__(self, backbone: ViT, config: PretrainConfig, mean: Tensor, std: Tensor):
        super().__init__(backbone)
        self.config = config
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)
        hidden = min(MAX_HIDDEN, HIDDEN_RATIO * backbone.config.width)
        widths = [backbone.config.width, hidden, hidden]
        layers = [
            layer
            for one, other in pairwise(widths)
            for layer in (nn.Linear(one, other), nn.BatchNorm1d(other), nn.ReLU())
        ]
        self.projector = nn.Sequential(*layers, nn.Linear(hidden, PROJECTION))

    def forward(self, images: Tensor) -> Tensor:
        """The loss of each image, (B, 1); the distance to a Gaussian is that of the batch."""
        generator = self.generator(images.device)
        x = torch.stack(
            [self.projector(self.embed(view)) for view in self.draw_views(images, generator)]
        ).float()
        centre = x[: self.config.views].mean(dim=0)
        agreement = (x - centre).square().mean(dim=(0, 2))  # (B,)
        distance = gaussian_distance(x, SLICES, generator)
        loss = (1 - GAUSSIAN) * agreement + GAUSSIAN * distance
        return loss[:, None]

    def embed(self, images: Tensor) -> Tensor:
        """The features that are compared: the mean patch after the last block."""
        return self.backbone.features(images)[0].mean(dim=1)

    @torch.no_grad()
    def draw_views(self, images: Tensor, generator: torch.Generator | None) -> list[Tensor]:
        """Random crops, flips and colours: `views` of the full size, then the local ones."""
        full = images.shape[-2], images.shape[-1]
        patch = self.backbone.config.patch
        half = [max(2, round(side / 2 / patch)) * patch for side in full]
        sizes = [full] * self.config.views + [(half[0], half[1])] * self.config.local_views
        scales = [(self.config.crop, 1.0)] * self.config.views
        scales += [LOCAL_CROP] * self.config.local_views
        draws = Draws(len(images), images.device, generator)
        return [
            self.change_colours(crop_views(images, size, scale, self.config.flip, draws), draws)
            for size, scale in zip(sizes, scales, strict=True)
        ]

    def change_colours(self, images: Tensor, draws: "Draws") -> Tensor:
        """Brightness, contrast and saturation jitter, and grey; pixel values from 0 to 1."""
        if not self.config.colour:
            return images
        x = jitter_colours(images * self.std + self.mean, self.config.colour, draws)
        return (x - self.mean) / self.std


class Draws:
    """Random numbers, one for each image of a batch."""

    def __init__(self, images: int, device: torch.device, generator: torch.Generator | None):
        self.shape, self.device, self.generator = (images, 1, 1, 1), device, generator

    def uniform(self) -> Tensor:
        """From 0 to 1."""
        return torch.rand(self.shape, device=self.device, generator=self.generator)

    def symmetric(self) -> Tensor:
        """From -1 to 1."""
        return 2 * self.uniform() - 1


def crop_views(
    images: Tensor, size: tuple[int, int], scale: tuple[float, float], flip: float, draws: Draws
) -> Tensor:
    """A random resized crop of each image, mirrored with probability `flip`."""
    area = scale[0] + (scale[1] - scale[0]) * draws.uniform()
    ratio = torch.exp(math.log(RATIO) * draws.symmetric())
    width, height = ((area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1))
    x, y = (1 - width) * draws.symmetric(), (1 - height) * draws.symmetric()
    mirror = torch.where(draws.uniform() < flip, -1.0, 1.0)
    zero = torch.zeros_like(x)
    rows = [torch.cat([width * mirror, zero, x], -1), torch.cat([zero, height, y], -1)]
    matrix = torch.cat(rows, dim=2)[:, 0]  # (B, 2, 3)
    grid = F.affine_grid(matrix, [len(images), images.shape[1], *size], align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def jitter_colours(images: Tensor, strength: float, draws: Draws) -> Tensor:
    """Random brightness, contrast and saturation of most images; some become grey."""
    brightness, contrast, saturation = (1 + strength * draws.symmetric() for _ in range(3))
    x = images * brightness
    level = x.mean(dim=(1, 2, 3), keepdim=True)
    x = (x - level) * contrast + level
    if x.shape[1] == 3:
        grey = x.mean(dim=1, keepdim=True)
        saturation = torch.where(draws.uniform() < GREY, 0.0, saturation)
        x = (x - grey) * saturation + grey
    return torch.where(draws.uniform() < JITTER, x, images)


def gaussian_distance(x: Tensor, slices: int, generator: torch.Generator | None) -> Tensor:
    """SIGReg: how far features (views, B, D) are from a standard Gaussian, in random directions.

    The test of Epps and Pulley (1983) on each one-dimensional projection: the squared difference
    of the empirical characteristic function from exp(-t^2 / 2), integrated with that weight.
    """
    directions = torch.randn(x.shape[-1], slices, device=x.device, generator=generator)
    directions = directions / directions.norm(dim=0)
    t = torch.linspace(0, LAST_KNOT, KNOTS, device=x.device)
    expected = (-t.square() / 2).exp()
    weights = torch.full_like(t, 2 * LAST_KNOT / (KNOTS - 1))  # the integrand is even
    weights[[0, -1]] /= 2
    angles = (x @ directions)[..., None] * t  # (views, B, slices, knots)
    error = (angles.cos().mean(dim=1) - expected).square() + angles.sin().mean(dim=1).square()
    distance: Tensor = ((error * expected) @ weights).mean() * x.shape[1]
    return distance
