"""The ViT of common from-scratch tutorials: [CLS], learned positions, attention not fused."""

import math

import torch
from torch import Tensor, nn

from vitrail.model.config import ViTConfig


class TutorialAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1)
        x = self.out((weights @ v).transpose(1, 2).flatten(2))
        return x


class TutorialBlock(nn.Module):
    def __init__(self, config: ViTConfig):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = TutorialAttention(config.width, config.heads)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, config.hidden),
            nn.GELU(approximate="tanh"),
            nn.Linear(config.hidden, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class TutorialViT(nn.Module):
    """Initialises [CLS] and positions from N(0, 1), as the tutorials do; has a final norm."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        width = config.width
        self.patches = nn.Conv2d(config.channels, width, config.patch, stride=config.patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 1 + config.patches, width))
        self.blocks = nn.Sequential(*(TutorialBlock(config) for _ in range(config.depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        x = self.head(self.norm(self.blocks(x))[:, 0])
        return x
