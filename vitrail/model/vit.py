"""The whole model top to bottom, and its initial weights."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.model.attention import Attention
from vitrail.model.block import Block, Mlp
from vitrail.model.config import ViTConfig, check_divides
from vitrail.model.embed import PatchEmbed, rotary, sincos, stretch
from vitrail.model.pool import AttentionPool
from vitrail.model.resnet import Bottleneck


class ViT(nn.Module):
    """The Vision Transformer (Dosovitskiy et al., 2021); the equations are that paper's."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        width = config.width
        norm = partial(nn.LayerNorm, width, eps=config.eps)

        self.patch_embed = PatchEmbed(config)
        self.cls_token = token(1, width) if config.pool == "cls" else None
        self.dist_token = token(1, width) if config.distilled else None
        self.reg_token = token(config.registers, width) if config.registers else None
        learned = config.positions == "learned"
        self.pos_embed = token(config.readers + config.patches, width) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.norm_pre = norm() if config.pre_norm else nn.Identity()

        rates = torch.linspace(0, config.drop_path, config.depth, device="cpu").tolist()
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)

        self.norm = norm()
        self.attn_pool = AttentionPool(config) if config.pool == "map" else None
        hidden = OrderedDict(fc=nn.Linear(width, width), act=nn.Tanh())  # for pretraining only
        self.pre_logits = nn.Sequential(hidden) if config.head == "mlp" else nn.Identity()
        self.head = nn.Identity() if config.head == "none" else nn.Linear(width, config.classes)
        self.head_dist = nn.Linear(width, config.classes) if config.distilled else None
        if not self.norm.weight.is_meta:  # weights are on their way
            initialise(self)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:  # (B, C, H, W)
        """Logits of the images; with `keep`, an index (B, P'), only those patches are looked at."""
        x = self.encode(x, keep)  # (B, N, D)
        if self.head_dist is not None:  # DeiT: the mean of what both tokens say
            x = self.norm(x[:, :2])  # (B, 2, D)
            x = (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2  # (B, K)
        else:
            x = self.head(self.pre_logits(self.pool(x)))  # (B, K)
        return x

    def encode(self, x: Tensor, keep: Tensor | None = None) -> Tensor:  # (B, C, H, W)
        """All tokens after the last block."""
        x, rope = self.embed(x, keep)
        for block in self.blocks:
            x = block(x, rope)  # equations 2 and 3
        return x

    def embed(self, x: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Equation 1: z = [x_class; x_1 E; ...; x_P E] + E_pos. Rotary positions come beside it."""
        config, grid = self.config, self.grid(x)
        x = self.patch_embed(x)  # (B, P, D)
        rope = None
        if self.pos_embed is not None:
            x = x + stretch(self.pos_embed[:, config.readers :], config.grid, grid)
        elif config.positions == "sincos":
            x = x + sincos(grid, config.width, x)
        elif config.positions == "rotary":
            rope = rotary(grid, config.width // config.heads, config.prefix, x)
        if keep is not None:
            x, rope = self.choose(x, rope, keep)
        # x.shape[0], for len(x) would fix the batch size of an exported model
        x = torch.cat([*self.prefix(x.shape[0]), x], dim=1)  # (B, N, D)
        return self.norm_pre(self.dropout(x)), rope

    def prefix(self, images: int) -> list[Tensor]:
        """The tokens in front of the patches: [CLS], distillation, registers."""
        readers: list[Tensor] = [
            token for token in (self.cls_token, self.dist_token) if token is not None
        ]
        if self.pos_embed is not None:
            readers = [token + self.pos_embed[:, i : i + 1] for i, token in enumerate(readers)]
        registers = [] if self.reg_token is None else [self.reg_token]
        return [token.expand(images, -1, -1) for token in readers + registers]

    def choose(self, x: Tensor, rope: Tensor | None, keep: Tensor) -> tuple[Tensor, Tensor | None]:
        """Only the patches in `keep`, and their rotation."""
        if keep.ndim != 2 or keep.shape[0] != x.shape[0] or keep.dtype != torch.int64:
            came = f"{keep.dtype} of shape {tuple(keep.shape)}"
            raise UserError(f"keep is {came}; give int64 indices of patches, a row for each image")
        chosen = x.gather(1, keep[:, :, None].expand(-1, -1, x.shape[-1]))
        if rope is not None:
            front = torch.arange(self.config.prefix, device=keep.device).expand(keep.shape[0], -1)
            index = torch.cat([front, keep + self.config.prefix], dim=1)
            rope = rope[:, 0, 0, index][:, :, None]  # (2, B, 1, N, d)
        return chosen, rope

    def pool(self, x: Tensor) -> Tensor:  # (B, N, D)
        """Equation 4, y = LN(z_class): one vector for the image; or made of all patches."""
        patches = x[:, self.config.prefix :]  # (B, P, D)
        if self.config.pool == "cls":
            x = self.norm(x[:, 0])  # (B, D)
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
        """The patches after each chosen block; -1 is the last one, and the default.

        `norm` applies the final norm, `prefix` leaves the tokens in front where they are, `maps`
        gives pictures of features (B, D, rows, columns), as detectors and segmenters want them.
        """
        if prefix and maps:
            raise UserError(
                "maps have no place for the tokens in front; ask for prefix or for maps"
            )
        grid, wanted = self.grid(x), self.chosen(blocks)
        x, rope = self.embed(x)
        found = {}
        for number, block in enumerate(self.blocks[: max(wanted) + 1]):
            x = block(x, rope)
            if number in wanted:
                y = self.norm(x) if norm else x
                y = y if prefix else y[:, self.config.prefix :]
                found[number] = y.mT.unflatten(-1, grid) if maps else y
        return [found[number] for number in wanted]

    def chosen(self, blocks: Sequence[int] | None) -> list[int]:
        """Numbers of blocks, counted from the start."""
        depth = len(self.blocks)
        blocks = [depth - 1] if blocks is None else list(blocks)
        if not blocks or not all(-depth <= number < depth for number in blocks):
            raise UserError(
                f"no such blocks: {blocks}; give numbers from 0 to {depth - 1}, or from -1 down"
            )
        return [number % depth for number in blocks]

    def grid(self, x: Tensor) -> tuple[int, int]:
        """Rows and columns of patches in these images, which must suit the model."""
        channels, patch = self.config.channels, self.config.patch
        if x.ndim != 4 or x.shape[1] != channels or not x.is_floating_point():
            raise UserError(
                f"images are {x.dtype} of shape {tuple(x.shape)}; give floats of shape "
                f"(batch, {channels}, height, width), or build the model with other channels"
            )
        check_divides(x.shape[2], x.shape[3], patch)
        return x.shape[2] // patch, x.shape[3] // patch


def token(count: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, count, width))


@torch.no_grad()
def initialise(model: ViT) -> None:
    """Random weights, as in Google's vision_transformer where no other source is named.

    Norms start as the identity, [CLS] and the head at zero: the first loss is ln(classes).
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            lecun_normal(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in model.modules():
        if isinstance(module, Attention):
            xavier_by_part(module.qkv.weight, 3)
        elif isinstance(module, AttentionPool):
            nn.init.xavier_uniform_(module.latent)
            xavier_by_part(module.kv.weight, 2)
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
        lecun_normal(model.pre_logits.get_parameter("fc.weight"))
    for head in (model.head, model.head_dist):
        if isinstance(head, nn.Linear):
            nn.init.zeros_(head.weight)


def lecun_normal(weight: Tensor) -> None:
    """Variance 1 / inputs, cut at two standard deviations: Flax's default for a convolution."""
    std = (
        math.sqrt(1 / weight[0].numel()) / 0.87962566
    )  # cutting alone would leave 0.88 of the deviation
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def xavier_by_part(weight: Tensor, parts: int) -> None:
    """Queries, keys and values lie in one matrix here, and are matrices of their own there."""
    for part in weight.chunk(parts):
        nn.init.xavier_uniform_(part)
