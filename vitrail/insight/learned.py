"""What a model learned: its positions, filters, how far its heads look, what its tokens hold."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import UserError
from vitrail.insight.explain import check_patches
from vitrail.insight.maps import Look, resting, sound, walk
from vitrail.model.block import Block
from vitrail.model.embed import rotary, sincos
from vitrail.model.vit import ViT

COLOURS = 3


def position_similarity(model: ViT) -> Tensor:
    """How alike the positions of any two patches are, from -1 to 1: (rows, columns) twice.

    The cosine of two learned or sine-cosine positions, as in figure 7 of Dosovitskiy et al. (2021);
    of rotary ones the mean cosine of the angles between them.
    """
    config = model.config
    if config.positions == "none":
        raise UserError("this model has no positions, so there is nothing to compare; use another")
    if config.grid == (1, 1):
        raise UserError("this model has one patch, so its position is like no other; use another")
    like = model.norm.weight.detach().float()
    if model.pos_embed is not None:
        places = model.pos_embed.detach().float()[0, config.readers :]  # (P, D)
        known_finite(places, "pos_embed")
    elif config.positions == "sincos":
        places = sincos(config.grid, config.width, like)  # (P, D)
    else:  # cos a cos b + sin a sin b = cos(a - b)
        places = rotary(config.grid, config.width // config.heads, 0, like)[:, 0, 0]  # (2, P, d)
        places = places.transpose(0, 1).flatten(1)  # (P, 2 d)
    places = F.normalize(places, dim=1)
    return (places @ places.T).view(*config.grid, *config.grid)


def filters(model: ViT, count: int = 28) -> Tensor:
    """What patches are first measured by: main components of the patch matrix, (count, C, p, p).

    They are orthonormal, the strongest first, and fewer if there are not so many (figure 7 of
    Dosovitskiy et al., 2021, shows 28).
    """
    if model.config.stem != "patch":
        raise UserError(
            "this model has a ResNet before its patches, so its filters are no pictures"
        )
    if count < 1:
        raise UserError(f"count is {count}; give a whole number of at least 1")
    weight = model.patch_embed.proj.weight.detach().float()  # (D, C, p, p)
    known_finite(weight, "patch_embed.proj.weight")
    flat = weight.flatten(1)
    _, _, components = torch.linalg.svd(flat - flat.mean(dim=0), full_matrices=False)
    return upright(components[:count]).view(-1, *weight.shape[1:])


def attention_distance(model: ViT, x: Tensor) -> Tensor:
    """How far each head looks, in pixels: (L, h).

    The distance between the middles of two patches, weighted by the attention between them: the
    mean over all asking patches and images (figure 7 of Dosovitskiy et al., 2021). What goes to
    tokens in front of the patches is left out.
    """
    rows, columns = (torch.arange(side, device=x.device) for side in check_patches(model, x))
    middles = model.config.patch * torch.cartesian_prod(rows, columns).float()  # (P, 2)
    with resting(model), torch.no_grad():
        found = torch.stack([reach(look, middles) for look in walk(model, x)])
    return sound(found, model, x)


def reach(look: Look, middles: Tensor) -> Tensor:
    """How far the heads of one layer look."""
    images, tokens, _ = look.tokens.shape
    prefix, start = tokens - len(middles), 0
    total = torch.zeros(look.attention.heads, device=middles.device)
    for part in look.maps(range(prefix, tokens)):
        part = part[..., prefix:].float()  # (B, h, rows, P)
        part = part / part.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(part.dtype).tiny)
        stop = start + part.shape[2]
        apart = (middles[start:stop, None] - middles).norm(dim=-1)  # (rows, P)
        total += (part * apart).sum(dim=(0, 2, 3))
        start = stop
    return total / (images * len(middles))


def attention_entropy(model: ViT, x: Tensor) -> Tensor:
    """How widely each head looks, in nats: (L, h), the mean over all tokens and images.

    0 is one token only; ln N is all tokens alike.
    """
    with resting(model), torch.no_grad():
        found = torch.stack([breadth(look) for look in walk(model, x)])
    return sound(found, model, x)


def breadth(look: Look) -> Tensor:
    """The entropy of the heads of one layer."""
    images, tokens, _ = look.tokens.shape
    total = sum(torch.special.entr(part.float()).sum(dim=(0, 2, 3)) for part in look.maps())
    assert isinstance(total, Tensor)
    return total / (images * tokens)


def head_strength(model: ViT, x: Tensor) -> Tensor:
    """How much each head changes the tokens: (L, h).

    The length of what it adds to a token over the length of that token, mean of tokens and images.
    """
    with resting(model), torch.no_grad():
        found = []
        tokens, rope = model.embed(x)
        for block in model.blocks:
            assert isinstance(block, Block)
            found.append(added(block, tokens, rope) / tokens.norm(dim=-1).clamp(min=1e-12)[:, None])
            tokens = block(tokens, rope)
        strength = torch.stack([layer.mean(dim=(0, 2)) for layer in found])
    return sound(strength, model, x)


def added(block: Block, tokens: Tensor, rope: Tensor | None) -> Tensor:
    """The length of what each head adds to each token: (B, h, N)."""
    q, k, v = block.attn.split(block.norm1(tokens), rope)
    mixed = F.scaled_dot_product_attention(q, k, v)  # (B, h, N, d)
    out = block.attn.proj.weight.unflatten(1, (block.attn.heads, -1)).transpose(0, 1)  # (h, D, d)
    scale = getattr(block.ls1, "gamma", None)
    out = out if scale is None else out * scale[:, None]
    square: Tensor = ((mixed @ (out.mT @ out)) * mixed).sum(dim=-1)  # |out mixed|^2
    return square.clamp(min=0).sqrt()


def dead_heads(model: ViT, x: Tensor, below: float = 0.01) -> Tensor:
    """Heads that add next to nothing to the tokens, wherever they look: true or false, (L, h)."""
    return head_strength(model, x) < below


def token_norms(model: ViT, x: Tensor) -> list[Tensor]:
    """The length of each patch's token after each block: (B, rows, columns).

    A few tokens far longer than the rest are the artifacts that registers cure (Darcet et al.,
    2024): patches of sky or wall in which the model keeps notes on the whole image.
    """
    grid = model.grid(x)
    found = []
    with resting(model), torch.no_grad():
        tokens, rope = model.embed(x)
        for block in model.blocks:
            tokens = block(tokens, rope)
            lengths = tokens[:, model.config.prefix :].norm(dim=-1)
            found.append(sound(lengths, model, x).unflatten(1, grid))
    return found


def feature_colours(model: ViT, x: Tensor, block: int = -1) -> Tensor:
    """Patches in colours, alike where the model finds them alike: (B, rows, columns, 3), 0 to 1.

    The three main components of the patch features of all these images together (as in Oquab et
    al., 2023), each spread from its 1st to its 99th percentile.
    """
    grid = check_patches(model, x)
    with resting(model), torch.no_grad():
        features = model.features(x, [block])[0].float()  # (B, P, D)
    flat = sound(features, model, x).flatten(0, 1)
    flat = flat - flat.mean(dim=0)
    _, vectors = torch.linalg.eigh(flat.T @ flat)  # the weakest first
    main = upright(vectors.T.flip(0)[:COLOURS])
    shades = F.pad(flat @ main.T, (0, COLOURS - len(main)))  # (B P, 3)
    low, high = shades.quantile(torch.tensor([0.01, 0.99], device=x.device), dim=0)
    shades = ((shades - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    colours: Tensor = shades.view(len(x), *grid, COLOURS)
    return colours


def upright(components: Tensor) -> Tensor:
    """Components have no sign of their own: their largest number is made positive."""
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
    return components * torch.where(largest < 0, -1.0, 1.0)


def known_finite(weight: Tensor, name: str) -> None:
    if not weight.isfinite().all():
        raise UserError(f"the weights hold NaN or infinity in {name}; load other weights")
