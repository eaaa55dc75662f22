"""Masked autoencoding: most patches are hidden, and a light decoder rebuilds their pixels."""

import math

import torch
from torch import Tensor, nn

from vitrail.model.block import Block
from vitrail.model.config import ViTConfig
from vitrail.model.embed import sincos_positions
from vitrail.model.vit import ViT
from vitrail.pretraining.config import PretrainConfig
from vitrail.pretraining.objective import Pretrainer

HEAD_WIDTH = 32  # channels of an attention head of the decoder
EPSILON = 1e-6  # added to the variance of a patch


class MaskedAutoencoder(Pretrainer):
    """MAE (He et al., 2022): the backbone sees only the visible patches, so a step is cheap.

    Convolutional stems see the hidden patches as zeros, the mean of the normalised pixels.
    """

    def __init__(self, backbone: ViT, config: PretrainConfig):
        super().__init__(backbone)
        self.mask, self.normalise = config.mask, config.normalise
        vit = backbone.config
        pixels = vit.patch**2 * vit.channels
        self.decoder = Decoder(vit.width, pixels, config.decoder_width, config.decoder_depth)

    def forward(self, images: Tensor) -> Tensor:
        """The mean squared error of the hidden patches, for each image: (B, 1)."""
        visible, hidden = self.draw_masks(images)
        predicted = self.predict_patches(images, visible, hidden)
        targets = take(patchify(images, self.backbone.config.patch), hidden)
        if self.normalise:
            targets = normalise_patches(targets)[0]
        return (predicted.float() - targets).square().mean(dim=(1, 2))[:, None]

    def draw_masks(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Indices of the visible and of the hidden patches, random for each image."""
        patches = math.prod(self.backbone.grid(images))
        generator = self.generator(images.device)
        noise = torch.rand(len(images), patches, device=images.device, generator=generator)
        order = noise.argsort(dim=1)
        visible = min(patches - 1, max(1, round(patches * (1 - self.mask))))
        return order[:, :visible], order[:, visible:]

    def predict_patches(self, images: Tensor, visible: Tensor, hidden: Tensor) -> Tensor:
        """The pixels of the hidden patches, (B, P', pixels), from the visible ones."""
        tokens = self.backbone.norm(self.backbone.encode(images, visible))
        patches: Tensor = self.decoder(
            tokens[:, self.backbone.config.prefix :], visible, hidden, self.backbone.grid(images)
        )
        return patches

    @torch.no_grad()
    def rebuild(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images with their hidden patches blanked, and the same with these patches rebuilt.

        Predictions of normalised patches get the mean and variance of the true patch back.
        """
        visible, hidden = self.draw_masks(images)
        patch, grid = self.backbone.config.patch, self.backbone.grid(images)
        true = patchify(images, patch)
        predicted = self.predict_patches(images, visible, hidden).float()
        if self.normalise:
            _, mean, deviation = normalise_patches(take(true, hidden))
            predicted = predicted * deviation + mean
        index = hidden[:, :, None].expand(-1, -1, true.shape[-1])
        rebuilt = true.scatter(1, index, predicted)
        blanked = true.scatter(1, index, torch.zeros_like(true))
        return unpatchify(blanked, grid, patch), unpatchify(rebuilt, grid, patch)


class Decoder(nn.Module):
    """A few narrow blocks over all patches; a learned token stands for each hidden one."""

    def __init__(self, inputs: int, outputs: int, width: int, depth: int):
        super().__init__()
        heads = 1 if width % HEAD_WIDTH else width // HEAD_WIDTH
        vit = ViTConfig(width=width, heads=heads, image=16, patch=16)
        self.embed = nn.Linear(inputs, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.ModuleList(Block(vit, 0.0) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=vit.eps)
        self.head = nn.Linear(width, outputs)
        nn.init.normal_(self.mask_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(
        self, tokens: Tensor, visible: Tensor, hidden: Tensor, grid: tuple[int, int]
    ) -> Tensor:
        """The pixels of the hidden patches, from the tokens of the visible ones."""
        x = self.embed(tokens)
        index = visible[:, :, None].expand(-1, -1, x.shape[-1])
        everywhere = self.mask_token.to(x.dtype).expand(len(x), math.prod(grid), -1)
        x = everywhere.scatter(1, index, x) + sincos_positions(grid, x.shape[-1], x)
        for block in self.blocks:
            x = block(x, None)
        pixels: Tensor = self.head(self.norm(take(x, hidden)))
        return pixels


def patchify(images: Tensor, patch: int) -> Tensor:
    """The pixels of each patch: (B, C, H, W) to (B, P, C * patch * patch)."""
    x = images.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # (B, C, rows, p, columns, p)
    patches: Tensor = x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return patches


def unpatchify(patches: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """The inverse of `patchify`."""
    x = patches.unflatten(1, grid).unflatten(3, (-1, patch, patch))  # (B, rows, columns, C, p, p)
    images: Tensor = x.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    return images


def normalise_patches(patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Patches with mean 0 and variance 1, and the means and standard deviations they had."""
    mean = patches.mean(dim=-1, keepdim=True)
    deviation = (patches.var(dim=-1, keepdim=True) + EPSILON).sqrt()
    return (patches - mean) / deviation, mean, deviation


def take(patches: Tensor, index: Tensor) -> Tensor:
    """The patches in `index`, (B, P')."""
    rows = torch.arange(len(index), device=index.device)[:, None] * patches.shape[1] + index
    taken: Tensor = patches.flatten(0, 1)[rows.flatten()].unflatten(0, index.shape)
    return taken
