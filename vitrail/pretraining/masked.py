"""Masked autoencoding: most patches are hidden, and a light decoder rebuilds their pixels."""

import math

import torch
from torch import Tensor, nn

from vitrail.model.block import Block
from vitrail.model.config import ViTConfig
from vitrail.model.embed import sincos_positions
from vitrail.model.vit import ViT
from vitrail.pretraining.config import PretrainConfig
from vitrail.pretraining.hog import DIRECTIONS, cell_size, oriented_gradients
from vitrail.pretraining.objective import Pretrainer

CPU = torch.device("cpu")
HEAD_WIDTH = 32  # channels of an attention head of the decoder
MLP_RATIO = 2  # width of the decoder's MLPs over that of its tokens
EPSILON = 1e-6  # added to the variance of a patch


class MaskedAutoencoder(Pretrainer):
    """MAE (He et al., 2022): the backbone sees only the visible patches, so a step is cheap.

    Convolutions need neighbours: in front of a convolutional stem, the visible patches of an image
    form a rectangle, and the stem computes nothing else. With `config.hog`, histograms of oriented
    gradients of the hidden patches are targets, too (Wei et al., 2022).
    """

    def __init__(self, backbone: ViT, config: PretrainConfig):
        super().__init__(backbone)
        self.mask, self.normalise, self.hog = config.mask, config.normalise, config.hog
        vit = backbone.config
        self.pixels = vit.patch**2 * vit.channels
        self.cell = cell_size(vit.patch)
        gradients = DIRECTIONS * (vit.patch // self.cell) ** 2 if self.hog else 0
        outputs = self.pixels + gradients
        self.decoder = Decoder(vit.width, outputs, config.decoder_width, config.decoder_depth)

    def forward(self, images: Tensor) -> Tensor:
        """The mean squared error of the hidden patches, for each image: (B, 1)."""
        visible, hidden = self.draw_masks(images)
        predicted = self.predict_patches(images, visible, hidden).float()
        errors = (predicted - take(self.targets(images), hidden)).square()
        loss = errors[..., : self.pixels].mean(dim=(1, 2))
        if self.hog:
            loss = loss.lerp(errors[..., self.pixels :].mean(dim=(1, 2)), self.hog)
        return loss[:, None]

    def targets(self, images: Tensor) -> Tensor:
        """The pixels of each patch, followed by its oriented gradients if these are targets."""
        patch = self.backbone.config.patch
        pixels = patchify(images, patch)
        if self.normalise:
            pixels = normalise_patches(pixels)[0]
        if not self.hog:
            return pixels
        gradients = oriented_gradients(images, self.cell)
        return torch.cat([pixels, patchify(gradients, patch // self.cell)], dim=2)

    def draw_masks(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Indices of the visible and of the hidden patches, random for each image.

        The visible ones are (B, P'), or (B, rows, columns) in front of a convolutional stem.
        """
        grid = self.backbone.grid(images)
        if self.backbone.config.stem != "patch":
            visible = draw_rectangles(len(images), grid, 1 - self.mask, self.generator(CPU))
            visible = visible.to(images.device)
            order = torch.ones(len(images), math.prod(grid), device=images.device)
            order = order.scatter(1, visible.flatten(1), 0.0).argsort(dim=1, stable=True)
            return visible, order[:, math.prod(visible.shape[1:]) :]
        patches = math.prod(grid)
        generator = self.generator(images.device)
        noise = torch.rand(len(images), patches, device=images.device, generator=generator)
        order = noise.argsort(dim=1)
        count = min(patches - 1, max(1, round(patches * (1 - self.mask))))
        return order[:, :count], order[:, count:]

    def predict_patches(self, images: Tensor, visible: Tensor, hidden: Tensor) -> Tensor:
        """The pixels of the hidden patches, (B, P', pixels), from the visible ones.

        With `hog`, the oriented gradients follow the pixels.
        """
        grid = self.backbone.grid(images)
        tokens = self.backbone.norm(self.encode(images, visible))
        patches: Tensor = self.decoder(
            tokens[:, self.backbone.config.prefix :], visible.flatten(1), hidden, grid
        )
        return patches

    def encode(self, images: Tensor, visible: Tensor) -> Tensor:
        """The tokens after the last block, as in `ViT.encode`, of the visible patches alone."""
        backbone = self.backbone
        if visible.ndim == 2:
            return backbone.encode(images, visible)
        x: Tensor = backbone.patch_embed(crop_rectangles(images, visible, backbone.config.patch))
        x, rope = backbone.add_positions(x, backbone.grid(images), visible.flatten(1))
        for block in backbone.blocks:
            x = block(x, rope)
        return x

    @torch.no_grad()
    def rebuild(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images with their hidden patches blanked, and the same with these patches rebuilt.

        Predictions of normalised patches get the mean and variance of the true patch back.
        """
        visible, hidden = self.draw_masks(images)
        patch, grid = self.backbone.config.patch, self.backbone.grid(images)
        true = patchify(images, patch)
        predicted = self.predict_patches(images, visible, hidden)[..., : self.pixels].float()
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
        vit = ViTConfig(width=width, heads=heads, mlp_ratio=MLP_RATIO, image=16, patch=16)
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


def draw_rectangles(
    images: int, grid: tuple[int, int], fraction: float, generator: torch.Generator | None
) -> Tensor:
    """Indices (B, rows, columns) of a random rectangle of patches for each image.

    All have the same shape: nearly a square, with about this fraction of the patches.
    """
    height, width = grid
    rows = fraction**0.5 * height + torch.rand((), generator=generator).item() - 0.5
    rows = min(height, max(1, round(rows)))
    columns = min(width, max(1, round(fraction * height * width / rows)))
    if rows * columns == height * width:  # something must be hidden
        rows, columns = (rows - 1, columns) if rows > 1 else (rows, columns - 1)
    top = torch.randint(height - rows + 1, (images, 1, 1), generator=generator)
    left = torch.randint(width - columns + 1, (images, 1, 1), generator=generator)
    return (top + torch.arange(rows)[:, None]) * width + left + torch.arange(columns)


def crop_rectangles(images: Tensor, visible: Tensor, patch: int) -> Tensor:
    """The pixels of rectangles of patches, whose indices are (B, rows, columns)."""
    image = torch.arange(len(images), device=images.device)[:, None, None]
    first, columns = visible[:, 0, 0], images.shape[3] // patch
    corner = torch.stack([first // columns, first % columns]) * patch  # (2, B)
    rows, columns = (side * patch for side in visible.shape[1:])
    y = corner[0][:, None] + torch.arange(rows, device=images.device)
    x = corner[1][:, None] + torch.arange(columns, device=images.device)
    return images[image, :, y[:, :, None], x[:, None]].movedim(3, 1)


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
