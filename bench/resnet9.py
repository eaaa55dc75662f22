"""A ResNet-9 of widths 16, 32, 64 and 128: the ConvNet that a user would train instead of a ViT."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.config import ViTConfig

WIDTHS = (16, 32, 64, 128)
LOGIT_SCALE = 0.125  # as in Page's, which trains best with small logits


class Layer(nn.Module):
    """A 3 x 3 convolution, max-pooling where asked, batch norm and ReLU."""

    def __init__(self, in_channels: int, out_channels: int, pool: bool = False):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm, self.pool = nn.BatchNorm2d(out_channels), pool

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return F.relu(self.norm(F.max_pool2d(x, 2) if self.pool else x))


class Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.layers = nn.Sequential(Layer(channels, channels), Layer(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layers(x)
        return x


class ResNet9(nn.Module):
    """David Page's ResNet-9 (2018), a quarter as wide; takes channels and classes of `config`."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        a, b, c, d = WIDTHS
        self.layers = nn.Sequential(
            *(Layer(config.channels, a), Layer(a, b, pool=True), Residual(b)),
            *(Layer(b, c, pool=True), Layer(c, d, pool=True), Residual(d)),
        )
        self.head = nn.Linear(d, config.classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        if x.shape[1] == 1:  # for which that changes nothing
            x = x.as_strided(x.shape, (x[0].numel(), 1, x.shape[3], 1))
        x = self.layers(x)
        return LOGIT_SCALE * self.head(x.amax((2, 3)))
