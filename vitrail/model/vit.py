"""The whole model from images to logits, and its initial weights."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from vitrail.arguments import accept, check_arguments, describe
from vitrail.errors import UserError
from vitrail.model.attention import Attention
from vitrail.model.block import Block
from vitrail.model.config import ViTConfig, check_image_size
from vitrail.model.embed import (
    PatchEmbed,
    blank_patches,
    interpolate_positions,
    rotary_positions,
    sincos_positions,
)
from vitrail.model.mlp import Mlp
from vitrail.model.pool import AttentionPool
from vitrail.model.resnet import Bottleneck


class ViT(nn.Module):
    """The Vision Transformer (Dosovitskiy et al., 2021); equation numbers are that paper's.

    >>> import torch, vitrail
    >>> config = vitrail.ViTConfig(image=32, patch=8, width=48, depth=2, heads=3, classes=10)
    >>> model = vitrail.ViT(config)
    >>> images = torch.rand(4, 3, 32, 32)
    >>> model(images).shape
    torch.Size([4, 10])
    >>> (features,) = model.features(images)  # the patch tokens after the last block
    >>> features.shape
    torch.Size([4, 16, 48])
    """

    @check_arguments
    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        width = config.width
        norm = partial(nn.LayerNorm, width, eps=config.eps)

        self.patch_embed = PatchEmbed(config)
        self.cls_token = zero_tokens(1, width) if config.has_cls else None
        self.dist_token = zero_tokens(1, width) if config.distilled else None
        self.reg_token = zero_tokens(config.registers, width) if config.registers else None
        learned = config.positions == "learned"
        positions = config.class_tokens + config.patches
        self.pos_embed = zero_tokens(positions, width) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.norm_pre = norm() if config.pre_norm else nn.Identity()

        rates = torch.linspace(0, config.drop_path, config.depth, device="cpu").tolist()
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)

        self.norm = norm()
        self.attn_pool = AttentionPool(config) if config.pool == "map" else None
        hidden = OrderedDict(fc=nn.Linear(width, width), act=nn.Tanh())  # of the pretraining head
        self.pre_logits = nn.Sequential(hidden) if config.head == "mlp" else nn.Identity()
        linear = partial(nn.Linear, config.feature_width, config.classes)
        self.head = nn.Identity() if config.head == "none" else linear()
        self.head_dist = nn.Linear(width, config.classes) if config.distilled else None
        if not self.norm.weight.is_meta:  # meta tensors have no data: the loader assigns weights
            init_weights(self)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:  # (B, C, H, W)
        """Logits; with `keep`, indices of shape (B, P'), the model sees only those patches."""
        return self.classify(self.encode(x, keep))  # (B, K)

    def classify(self, x: Tensor) -> Tensor:  # (B, N, D)
        """The logits, from all tokens after the last block.

        >>> model = vitrail.ViT(vitrail.preset("Pico/2", image=8, classes=10))
        >>> model.classify(torch.rand(1, 17, 64)).shape
        torch.Size([1, 10])
        """
        check_tensor("x", x, axes=3)
        if self.head_dist is not None:  # DeiT: the mean of both heads' logits
            x = self.norm(x[:, :2])  # (B, 2, D)
            x = (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2  # (B, K)
        else:
            x = self.head(self.pre_logits(self.pool(x)))  # (B, K)
        return x

    def encode(self, x: Tensor, keep: Tensor | None = None) -> Tensor:  # (B, C, H, W)
        """All tokens after the last block, before the final norm.

        >>> model = vitrail.ViT(vitrail.preset("Pico/2", image=8))
        >>> model.encode(torch.rand(1, 3, 8, 8)).shape  # [CLS] and 16 patches
        torch.Size([1, 17, 64])
        """
        x, rope = self.embed(x, keep)
        for block in self.blocks:
            x = block(x, rope)  # equations 2 and 3
        return x

    def embed(self, x: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Equation 1: z = [x_class; x_1 E; ...; x_P E] + E_pos; and rotary positions, if any.

        >>> model = vitrail.ViT(vitrail.preset("Pico/2", image=8))
        >>> tokens, rope = model.embed(torch.rand(1, 3, 8, 8))
        >>> tokens.shape, rope
        (torch.Size([1, 17, 64]), None)
        """
        grid = self.grid(x)
        if keep is not None:
            check_keep(keep, x.shape[0])
            if self.config.stem != "patch":  # convolutions would see the dropped neighbours
                x = blank_patches(x, keep, self.config.patch)
        x = self.patch_embed(x)  # (B, P, D)
        if keep is not None:
            x = x.gather(1, keep[:, :, None].expand(-1, -1, x.shape[-1]))
        return self.add_positions(x, grid, keep)

    def add_positions(
        self, x: Tensor, grid: tuple[int, int], keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The second half of `embed`: `x` holds all patches of the grid, or those in `keep`.

        >>> model = vitrail.ViT(vitrail.preset("Pico/2", image=8))
        >>> model.add_positions(torch.rand(1, 2, 64), (4, 4), torch.tensor([[0, 5]]))[0].shape
        torch.Size([1, 3, 64])
        """
        config, rope = self.config, None
        if self.pos_embed is not None:
            positions = self.pos_embed[:, config.class_tokens :]
            positions = interpolate_positions(positions, config.grid, grid)
            x = x + (positions if keep is None else positions[0, keep])
        elif config.positions == "sincos":
            positions = sincos_positions(grid, config.width, x)
            x = x + (positions if keep is None else positions[keep])
        elif config.positions == "rotary":
            rope = rotary_positions(grid, config.width // config.heads, config.prefix, x)
            if keep is not None:
                rope = self._select_rotations(rope, keep)
        # x.shape[0], because len(x) would fix the batch size of an exported model
        x = torch.cat([*self._prefix_tokens(x.shape[0]), x], dim=1)  # (B, N, D)
        return self.norm_pre(self.dropout(x)), rope

    def _prefix_tokens(self, batch: int) -> list[Tensor]:
        """The tokens in front of the patches: [CLS], the distillation token, the registers."""
        tokens: list[Tensor] = [
            token for token in (self.cls_token, self.dist_token) if token is not None
        ]
        if self.pos_embed is not None:
            tokens = [token + self.pos_embed[:, i : i + 1] for i, token in enumerate(tokens)]
        if self.reg_token is not None:
            tokens.append(self.reg_token)
        return [token.expand(batch, -1, -1) for token in tokens]

    def _select_rotations(self, rope: Tensor, keep: Tensor) -> Tensor:
        """The rotary positions of the prefix tokens and of the patches in `keep`."""
        front = torch.arange(self.config.prefix, device=keep.device).expand(keep.shape[0], -1)
        index = torch.cat([front, keep + self.config.prefix], dim=1)  # (B, N)
        return rope[:, 0, 0, index][:, :, None]  # (2, B, 1, N, d)

    def pool(self, x: Tensor) -> Tensor:  # (B, N, D)
        """One vector per image: y = LN(z_class), equation 4, or a pool over all patches.

        >>> model = vitrail.ViT(vitrail.preset("Pico/2", image=8))
        >>> model.pool(torch.rand(1, 17, 64)).shape
        torch.Size([1, 64])
        """
        check_tensor("x", x, axes=3)
        patches = x[:, self.config.prefix :]  # (B, P, D)
        if self.config.pool == "cls":
            x = self.norm(x[:, 0])  # (B, D)
        elif self.config.pool == "cls_avg":  # Oquab et al., 2024
            x = torch.cat([self.norm(x[:, 0]), self.norm(patches).mean(dim=1)], dim=1)  # (B, 2 * D)
        elif self.attn_pool is not None:
            x = self.attn_pool(self.norm(patches))  # (B, D)
        elif self.config.norm_after_pool:
            x = self.norm(patches.mean(dim=1))  # (B, D)
        else:
            x = self.norm(patches).mean(dim=1)  # (B, D)
        return x

    def features(
        self,
        x: Tensor,
        blocks: Sequence[int] | None = None,
        norm: bool = True,
        prefix: bool = False,
        maps: bool = False,
    ) -> list[Tensor]:
        """The patch tokens after each of these blocks; by default, after the last one (-1).

        `norm` applies the final norm, `prefix` includes the prefix tokens, `maps` returns feature
        maps of shape (B, D, rows, columns), the input of detection and segmentation heads.

        >>> import torch
        >>> model = vitrail.ViT(vitrail.preset("Ti/16"))
        >>> maps = model.features(torch.rand(1, 3, 224, 224), blocks=[5, 11], maps=True)
        >>> [tuple(each.shape) for each in maps]
        [(1, 192, 14, 14), (1, 192, 14, 14)]
        """
        for name, flag in (("norm", norm), ("prefix", prefix), ("maps", maps)):
            accept(f"`{name}`", flag, bool)
        if prefix and maps:
            raise UserError(
                "prefix tokens have no position in a feature map; set prefix or maps, not both"
            )
        grid, wanted = self.grid(x), self.block_indices(blocks)
        x, rope = self.embed(x)
        outputs = {}
        for index, block in enumerate(self.blocks[: max(wanted) + 1]):
            x = block(x, rope)
            if index in wanted:
                y = self.norm(x) if norm else x
                y = y if prefix else y[:, self.config.prefix :]
                outputs[index] = y.mT.unflatten(-1, grid) if maps else y
        return [outputs[index] for index in wanted]

    def block_indices(self, blocks: Sequence[int] | None) -> list[int]:
        """Indices of blocks counted from 0, where negative ones count from the end.

        >>> vitrail.ViT(vitrail.preset("Pico/2")).block_indices([0, -1])
        [0, 3]
        """
        depth = len(self.blocks)
        blocks = [depth - 1] if blocks is None else accept("`blocks`", blocks, Sequence[int])
        if not blocks or not all(-depth <= index < depth for index in blocks):
            raise UserError(
                f"no such blocks: {blocks}; give indices from 0 to {depth - 1}, or from -1 down"
            )
        return [index % depth for index in blocks]

    def grid(self, x: Tensor) -> tuple[int, int]:
        """Rows and columns of patches in these images; rejects images that do not fit the model.

        >>> vitrail.ViT(vitrail.preset("Pico/2")).grid(torch.rand(1, 3, 8, 12))
        (4, 6)
        """
        channels, patch = self.config.channels, self.config.patch
        check_tensor("x", x)
        if x.ndim != 4 or x.shape[1] != channels or not x.is_floating_point():
            raise UserError(
                f"images are {x.dtype} of shape {tuple(x.shape)}; give floats of shape "
                f"(batch, {channels}, height, width), or build the model with other channels"
            )
        check_image_size(x.shape[2], x.shape[3], patch)
        return x.shape[2] // patch, x.shape[3] // patch


def check_tensor(name: str, value: object, axes: int | None = None) -> None:
    if not isinstance(value, Tensor) or axes not in (None, value.ndim):
        raise TypeError(f"`{name}` is {describe(value)}; give a tensor")


def check_keep(keep: Tensor, images: int) -> None:
    check_tensor("keep", keep)
    if keep.ndim != 2 or keep.shape[0] != images or keep.dtype != torch.int64:
        came = f"{keep.dtype} of shape {tuple(keep.shape)}"
        raise UserError(f"keep is {came}; give int64 patch indices, one row per image")


def zero_tokens(count: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, count, width))


@torch.no_grad()
def init_weights(model: ViT) -> None:
    """Random weights as in Google's vision_transformer, unless a comment names another source.

    Norms start as the identity, [CLS] and the head at zero, so the first loss is ln(classes).
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            lecun_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in model.modules():
        if isinstance(module, Attention):
            xavier_uniform_parts_(module.qkv.weight, 3)
        elif isinstance(module, AttentionPool):
            nn.init.xavier_uniform_(module.latent)
            xavier_uniform_parts_(module.kv.weight, 2)
        elif isinstance(module, Mlp):
            nn.init.normal_(module.fc1.bias, std=1e-6)
            nn.init.normal_(module.fc2.bias, std=1e-6)
        elif isinstance(module, Bottleneck):  # each branch of the ResNet starts as the identity
            nn.init.zeros_(module.norm3.weight)
    if model.pos_embed is not None:
        nn.init.normal_(model.pos_embed, std=0.02)
    if model.dist_token is not None:
        nn.init.trunc_normal_(model.dist_token, std=0.02)  # DeiT
    if model.reg_token is not None:
        nn.init.normal_(model.reg_token, std=1e-6)  # DINOv2
    if isinstance(model.pre_logits, nn.Sequential):
        lecun_normal_(model.pre_logits.get_parameter("fc.weight"))
    for head in (model.head, model.head_dist):
        if isinstance(head, nn.Linear):
            nn.init.zeros_(head.weight)


def lecun_normal_(weight: Tensor) -> None:
    """Variance 1 / fan-in, truncated at two standard deviations: Flax's default initializer."""
    truncated = 0.87962566  # standard deviation of a standard normal distribution cut at 2
    std = math.sqrt(1 / weight[0].numel()) / truncated
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def xavier_uniform_parts_(weight: Tensor, parts: int) -> None:
    """Queries, keys and values share one matrix here; Google's code has one for each."""
    for part in weight.chunk(parts):
        nn.init.xavier_uniform_(part)
