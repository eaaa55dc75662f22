"""The module that is exported: a ViT with optional normalisation, attention maps and features."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vitrail.data.config import Preprocess
from vitrail.data.preprocess import scaled_mean_std
from vitrail.errors import UserError
from vitrail.exporting.engine import ODD_FEATURES, PixelKind
from vitrail.model.block import Block
from vitrail.model.embed import interpolate_positions
from vitrail.model.vit import ViT


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """What the exported graph reads and returns."""

    pixels: PixelKind = "float32"  # normalised floats, or bytes that the graph normalises itself
    attention: bool = False  # also return the attention weights of every block
    features: bool = False  # also return the pooled features, the input of the head
    odd: bool = False  # also return the features that tell odd images
    any_size: bool = False  # accept images of any size that patches tile


class ExportGraph(nn.Module):
    """Images of shape (B, C, H, W) to the tensors named in `outputs`.

    `logits` (B, K), `features` (B, D), `odd_features` (B, 2 D) and `attention` (B, L, h, N, N). A
    model without a head returns `features` instead of `logits`.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: ViT, preprocess: Preprocess, options: GraphOptions):
        super().__init__()
        self.model = model
        self.preprocess = preprocess
        self.options = options
        self.outputs = output_names(model, options)
        self.classes = model.config.classes if "logits" in self.outputs else None
        if preprocess.pixels != "uint8":
            raise UserError(
                f"this model reads {preprocess.pixels} images; only models of 8-bit images can be "
                f"exported: use it with PyTorch"
            )
        mean, std = scaled_mean_std(preprocess.mean, preprocess.std, torch.device("cpu"))
        self.register_buffer("mean", mean.clone(), persistent=False)
        self.register_buffer("std", std.clone(), persistent=False)

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:  # (B, C, H, W)
        x = pixels
        if self.options.pixels == "uint8":
            x = (x.to(torch.float32) - self.mean) / self.std  # as vitrail.data.preprocess does it
        if self.outputs == ("logits",):
            return (self.model(x),)
        embedded, tokens, maps = self.encode(x)
        compute: dict[str, Callable[[], Tensor]] = {
            "logits": lambda: self.model.classify(tokens),
            "features": lambda: self.model.pool(tokens),
            ODD_FEATURES: lambda: compute_odd_features(self.model, embedded, tokens),
            "attention": lambda: maps,
        }
        return tuple(compute[name]() for name in self.outputs)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens before the first and after the last block, and every block's attention."""
        embedded, rope = self.model.embed(x)
        x, maps = embedded, []
        for block in self.model.blocks:
            assert isinstance(block, Block)
            if self.options.attention:
                maps.append(block.attn.weights(block.norm1(x), rope=rope))
            x = block(x, rope)
        return embedded, x, torch.stack(maps, dim=1) if maps else x


def output_names(model: ViT, options: GraphOptions) -> tuple[str, ...]:
    """The outputs in their order."""
    headless = model.config.head == "none"
    wanted = {
        "logits": not headless,
        "features": headless or options.features,
        ODD_FEATURES: options.odd,
        "attention": options.attention,
    }
    return tuple(name for name, included in wanted.items() if included)


def compute_odd_features(model: ViT, embedded: Tensor, tokens: Tensor) -> Tensor:  # 2 (B, N, D)
    """What tells odd images: the mean patch after the last norm, and before the first block.

    The first describes what is in the image, the second its colours and edges.
    """
    start = model.config.prefix
    late = model.norm(tokens[:, start:]).mean(dim=1)  # (B, D)
    return torch.cat([late, embedded[:, start:].mean(dim=1)], dim=1)  # (B, 2 D)


def prepare_model(model: ViT, preprocess: Preprocess, any_size: bool) -> ViT:
    """A float32 copy on the CPU in evaluation mode, whose image size is that of `preprocess`.

    Learned positions are interpolated once here, as `ViT.forward` would do for every batch.
    """
    config = model.config
    if any_size and config.positions == "learned":
        raise UserError(
            "learned positions belong to one image size, so the model cannot accept any size; "
            "leave `any_size` out, or load the model with another `vit.image`"
        )
    if preprocess.channels != config.channels:
        raise UserError(
            f"preprocessing gives {preprocess.channels} channels, the model reads "
            f"{config.channels}; give the preprocessing that belongs to the model"
        )
    prepared = copy.deepcopy(model).to(device="cpu", dtype=torch.float32).eval()
    prepared.requires_grad_(False)
    new = replace(config, image=(preprocess.height, preprocess.width))
    if prepared.pos_embed is not None:
        prefix, patches = prepared.pos_embed.split([config.class_tokens, config.patches], dim=1)
        resized = interpolate_positions(patches, config.grid, new.grid)
        prepared.pos_embed = nn.Parameter(torch.cat([prefix, resized], dim=1), requires_grad=False)
    prepared.config = new
    return prepared
