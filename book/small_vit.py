"""A Vision Transformer without options: the paper's equations in 60 lines, equal to the package."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PatchEmbed(nn.Module):
    def __init__(self, channels: int, patch: int, width: int):
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W)
        return self.proj(x).flatten(2).mT  # (B, P, D)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D)
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (B, N, 3, h, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, h, N, d)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)  # (B, h, N, N)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))  # (B, N, D)


class Mlp(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D)
        return self.fc2(F.gelu(self.fc1(x)))  # (B, N, D)


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width, eps=1e-6), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width, eps=1e-6), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D)
        x = x + self.attn(self.norm1(x))  # equation 2
        return x + self.mlp(self.norm2(x))  # equation 3


class SmallViT(nn.Module):
    def __init__(
        self,
        image: int,
        patch: int,
        channels: int,
        classes: int,
        width: int,
        depth: int,
        heads: int,
    ):
        super().__init__()
        self.patch_embed = PatchEmbed(channels, patch, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + (image // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W)
        cls = self.cls_token.expand(len(x), -1, -1)  # (B, 1, D)
        z = torch.cat([cls, self.patch_embed(x)], dim=1) + self.pos_embed  # equation 1, (B, N, D)
        return self.head(self.norm(self.blocks(z)[:, 0]))  # equation 4, (B, K)
