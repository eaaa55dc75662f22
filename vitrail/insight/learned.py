"""What a model has learned: positions, patch filters, attention distance, token norms, features."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError
from vitrail.evaluation.loop import eval_mode
from vitrail.insight.explain import check_patches
from vitrail.insight.maps import (
    LayerAttention,
    check_finite,
    check_finite_weight,
    iterate_layers,
)
from vitrail.model.block import Block
from vitrail.model.embed import rotary_positions, sincos_positions
from vitrail.model.vit import ViT

RGB = 3  # principal components that become colour channels


def position_similarity(model: ViT) -> Tensor:
    """The similarity of the positions of any two patches, from -1 to 1.

    The cosine similarity of learned or sine-cosine embeddings, as in figure 7 of Dosovitskiy et al.
    (2021); for rotary positions, the mean cosine of the angles between them.
    """
    config = model.config
    if config.positions == "none":
        raise UserError('this model has positions "none": it has nothing to compare')
    if config.grid == (1, 1):
        raise UserError(
            "this model has a single patch and so a single position: it has nothing to compare"
        )
    like = model.norm.weight.detach().float()
    if model.pos_embed is not None:
        positions = model.pos_embed.detach().float()[0, config.class_tokens :]  # (P, D)
        check_finite_weight(positions, "pos_embed")
    elif config.positions == "sincos":
        positions = sincos_positions(config.grid, config.width, like)  # (P, D)
    else:  # cos a cos b + sin a sin b = cos(a - b)
        rope = rotary_positions(config.grid, config.width // config.heads, 0, like)
        positions = rope[:, 0, 0].transpose(0, 1).flatten(1)  # (P, 2 * d)
    positions = F.normalize(positions, dim=1)
    similarity: Tensor = positions @ positions.T  # (P, P)
    return similarity.view(*config.grid, *config.grid)  # (rows, columns, rows, columns)


def patch_filters(model: ViT, count: int = 28) -> Tensor:
    """The first principal components of the patch embedding, the strongest first.

    They are orthonormal. 28 of them are figure 7 (left) of Dosovitskiy et al. (2021); a small model
    has fewer.
    """
    if model.config.stem != "patch":
        raise UserError(
            f"stem {model.config.stem} passes features to the patch embedding, so its filters are "
            f"not images"
        )
    if count < 1:
        raise UserError(f"count is {count}; give a whole number of at least 1")
    weight = model.patch_embed.proj.weight.detach().float()  # (D, C, p, p)
    check_finite_weight(weight, "patch_embed.proj.weight")
    flat = weight.flatten(1)
    _, _, components = torch.linalg.svd(flat - flat.mean(dim=0), full_matrices=False)
    return fix_signs(components[:count]).view(-1, *weight.shape[1:])  # (count, C, p, p)


def attention_distance(model: ViT, x: Tensor) -> Tensor:
    """The mean attention distance of each head, in pixels.

    The distance between the centres of two patches, weighted by the attention between them, as a
    mean over all query patches and images (figure 7 of Dosovitskiy et al., 2021). Attention to
    prefix tokens is excluded.
    """
    rows, columns = (torch.arange(side, device=x.device) for side in check_patches(model, x))
    centres = model.config.patch * torch.cartesian_prod(rows, columns).float()  # (P, 2)
    with eval_mode(model), torch.no_grad():
        layers = [layer_distance(layer, centres) for layer in iterate_layers(model, x)]
    distance = torch.stack(layers)  # (L, h)
    return check_finite(distance, model, x)


def layer_distance(layer: LayerAttention, centres: Tensor) -> Tensor:
    """The mean attention distance of each head of one layer."""
    images, tokens, _ = layer.tokens.shape
    prefix, start = tokens - len(centres), 0
    total = torch.zeros(layer.attention.heads, device=centres.device)
    for chunk in layer.weights(range(prefix, tokens)):
        chunk = chunk[..., prefix:].float()  # (B, h, rows, P)
        chunk = chunk / chunk.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(chunk.dtype).tiny)
        stop = start + chunk.shape[2]
        distance = (centres[start:stop, None] - centres).norm(dim=-1)  # (rows, P)
        total += (chunk * distance).sum(dim=(0, 2, 3))
        start = stop
    return total / (images * len(centres))  # (h)


def attention_entropy(model: ViT, x: Tensor) -> Tensor:
    """The attention entropy of each head in nats, a mean over all tokens and images.

    0 is attention to a single token, ln N uniform attention.
    """
    with eval_mode(model), torch.no_grad():
        layers = [layer_entropy(layer) for layer in iterate_layers(model, x)]
    entropy = torch.stack(layers)  # (L, h)
    return check_finite(entropy, model, x)


def layer_entropy(layer: LayerAttention) -> Tensor:
    """The mean attention entropy of each head of one layer."""
    images, tokens, _ = layer.tokens.shape
    total = sum(torch.special.entr(chunk.float()).sum(dim=(0, 2, 3)) for chunk in layer.weights())
    assert isinstance(total, Tensor)
    return total / (images * tokens)  # (h)


def head_contribution(model: ViT, x: Tensor) -> Tensor:
    """How much each head changes the tokens.

    The norm of what it adds to a token over the norm of that token, a mean over tokens and images.
    """
    with eval_mode(model), torch.no_grad():
        layers = []
        tokens, rope = model.embed(x)
        for block in model.blocks:
            assert isinstance(block, Block)
            norms = tokens.norm(dim=-1).clamp(min=1e-12)  # (B, N)
            ratio = head_output_norms(block, tokens, rope) / norms[:, None]  # (B, h, N)
            layers.append(ratio.mean(dim=(0, 2)))
            tokens = block(tokens, rope)  # (B, N, D)
    contribution = torch.stack(layers)  # (L, h)
    return check_finite(contribution, model, x)


def head_output_norms(block: Block, tokens: Tensor, rope: Tensor | None) -> Tensor:  # (B, N, D)
    """The norm of what each head adds to each token."""
    q, k, v = block.attn.split(block.norm1(tokens), rope)  # each (B, h, N, d)
    mixed = F.scaled_dot_product_attention(q, k, v)  # (B, h, N, d)
    out = block.attn.proj.weight.unflatten(1, (block.attn.heads, -1)).transpose(0, 1)  # (h, D, d)
    scale = getattr(block.ls1, "gamma", None)
    out = out if scale is None else out * scale[:, None]
    square: Tensor = ((mixed @ (out.mT @ out)) * mixed).sum(dim=-1)  # |out mixed|^2
    return square.clamp(min=0).sqrt()  # (B, h, N)


def dead_heads(model: ViT, x: Tensor, below: float = 0.01) -> Tensor:
    """Whether each head adds less than this fraction to the norm of a token, on average: (L, h)."""
    return head_contribution(model, x) < below


def token_norms(model: ViT, x: Tensor) -> list[Tensor]:
    """The norm of each patch token after each block.

    A few tokens with a norm far above the rest are the artifacts that registers avoid (Darcet et
    al., 2024): patches with little information, which the model reuses for global information.
    """
    grid = model.grid(x)
    layers = []
    with eval_mode(model), torch.no_grad():
        tokens, rope = model.embed(x)
        for block in model.blocks:
            tokens = block(tokens, rope)  # (B, N, D)
            norms = tokens[:, model.config.prefix :].norm(dim=-1)  # (B, P)
            layers.append(check_finite(norms, model, x).unflatten(1, grid))
    return layers


def feature_pca(model: ViT, x: Tensor, block: int = -1, positions: bool = True) -> Tensor:
    """The first three principal components of the patch features as RGB, from 0 to 1.

    The components are computed over the patches of all these images (as in Oquab et al., 2023);
    each is scaled from its 1st to its 99th percentile. Without `positions`, the mean of all images
    at each position is subtracted first, so that only their differences count.
    """
    grid = check_patches(model, x)
    with eval_mode(model), torch.no_grad():
        features = model.features(x, [block])[0].float()  # (B, P, D)
    if not positions and len(x) > 1:
        features = features - features.mean(dim=0)
    # float64: of fewer patches than channels many eigenvalues are 0, and float32 may not converge
    flat = check_finite(features, model, x).flatten(0, 1).cpu().double()  # (B * P, D)
    flat = flat - flat.mean(dim=0)
    _, vectors = torch.linalg.eigh(flat.T @ flat)  # eigenvalues ascend
    components = fix_signs(vectors.T.flip(0)[:RGB])  # (components, D)
    values = F.pad(flat @ components.T, (0, RGB - len(components)))  # (B * P, 3)
    low, high = values.quantile(values.new_tensor([0.01, 0.99]), dim=0)
    values = ((values - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    colours: Tensor = values.float().to(x.device).view(len(x), *grid, RGB)
    return colours  # (B, rows, columns, 3)


def fix_signs(components: Tensor) -> Tensor:
    """Principal components have no sign of their own: the largest entry becomes positive."""
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
    return components * torch.where(largest < 0, -1.0, 1.0)
