"""From attention to explanation: which patches made the model say what it says."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.insight.maps import Look, attention, pool_weights, resting, sound, walk
from vitrail.model.attention import Attention
from vitrail.model.pool import AttentionPool
from vitrail.model.vit import ViT

Heads = Literal["mean", "max", "min"]
Target = int | Tensor | None
Progress = Callable[[int, int], None]  # images done, images in all

METHODS = ("relevance", "gradient-rollout", "rollout", "attention", "occlusion")
CLASSLESS = ("rollout", "attention")  # they show where the model looks, not for which class
FORWARDS = 256  # that occlusion makes of an image unless a window is given
BATCH = 32  # images in memory at once


def explain(
    model: ViT, x: Tensor, method: str = "relevance", target: Target = None, **settings: Any
) -> Tensor:
    """How much each patch speaks for a class: (B, rows, columns), from 0 up, on no fixed scale.

    `target` is a class for all images or one for each; None is the predicted one. Rollout and
    attention know no class. `settings` are those of the method's own function.
    """
    if method not in METHODS:
        raise UserError(f"method {method!r} is unknown; choose one of {', '.join(METHODS)}")
    if method not in CLASSLESS:
        settings |= {"target": target}
    function = FUNCTIONS[method]
    known = list(inspect.signature(function).parameters)[2:]
    for name in settings:
        if name not in known:
            own = ", ".join(name for name in known if name != "target") or "none"
            raise UserError(f"{method} has no setting {name!r}; its settings: {own}")
    heat: Tensor = function(model, x, **settings)
    return heat.clamp(min=0)


# --- attention alone -----------------------------------------------------------------------------


def last_attention(model: ViT, x: Tensor) -> Tensor:
    """Where the last layer looks from what the head reads, the mean of its heads."""
    check_patches(model, x)
    if model.attn_pool is not None:
        row = pool_weights(model, x).mean(dim=1)  # (B, 1, P)
    else:
        row = attention(model, x, layers=-1)[0].mean(dim=1)  # (B, 1, N)
        if model.config.distilled:
            row = (row + attention(model, x, layers=-1, rows="dist")[0].mean(dim=1)) / 2
    return picture(model, x, row[:, 0])


def attention_rollout(model: ViT, x: Tensor, head: Heads = "mean", discard: float = 0.0) -> Tensor:
    """What reaches the head of each patch, by rollout through all layers."""
    check_patches(model, x)
    with resting(model), torch.no_grad():
        fused = (
            torch.cat([fuse(part, head) for part in look.maps()], dim=1) for look in walk(model, x)
        )
        flow = roll(cut(layer, discard) for layer in fused)
    pooled = None if model.attn_pool is None else fuse(pool_weights(model, x), "mean")
    return sound(picture(model, x, readout(model, flow, pooled)), model, x)


def rollout(maps: Iterable[Tensor], head: Heads = "mean", discard: float = 0.0) -> Tensor:
    """How much of each input token is in each output token (Abnar and Zuidema, 2020): (B, N, N).

    `maps` are those of all layers with all rows. Heads are fused by their mean, maximum or minimum;
    of each row the smallest links may be discarded, a share from 0 to 1. Rows sum to 1.
    """
    return roll(cut(fuse(layer, head), discard) for layer in maps)


def roll(layers: Iterable[Tensor]) -> Tensor:
    """The product of all layers; each step is half attention, half the residual path."""
    flow: Tensor | None = None
    for layer in layers:
        flow = halved(layer) if flow is None else halved(layer) @ flow
    if flow is None:
        raise UserError("no maps to roll out; give those of at least one layer")
    return flow


def halved(layer: Tensor) -> Tensor:  # (B, N, N)
    """(A + I) / 2, where the rows of A are first made to sum to 1; a row of zeros stays at home."""
    layer = layer / layer.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(layer.dtype).tiny)
    step = layer + torch.eye(layer.shape[-1], dtype=layer.dtype, device=layer.device)
    return step / step.sum(dim=-1, keepdim=True)


def fuse(maps: Tensor, head: Heads) -> Tensor:  # (B, h, N, N)
    """One map of all heads."""
    if head not in ("mean", "max", "min"):
        raise UserError(f"heads are fused by mean, max or min, not by {head!r}")
    return maps.mean(dim=1) if head == "mean" else getattr(maps, f"a{head}")(dim=1)


def cut(layer: Tensor, discard: float) -> Tensor:
    """A layer without the smallest links of each row."""
    if not 0 <= discard < 1:
        raise UserError(f"discard is {discard}; give a share of links from 0 to below 1")
    lowest = layer.argsort(dim=-1)[..., : int(discard * layer.shape[-1])]
    return layer.scatter(-1, lowest, 0)


# --- attention and its gradient ------------------------------------------------------------------


def relevance(model: ViT, x: Tensor, target: Target = None) -> Tensor:
    """Relevance by gradient and attention (Chefer et al., 2021b, "Generic Attention-model ...").

    R starts as the identity; each layer adds what flows through its links that help the class:
    R + mean of heads of (dy/dA * A)+ R.
    """
    layers, pooled = helping(model, x, target)
    flow: Tensor | None = None
    for layer in layers:
        step = layer + torch.eye(layer.shape[-1], dtype=layer.dtype, device=layer.device)
        flow = step if flow is None else step @ flow
    assert flow is not None
    return sound(picture(model, x, readout(model, flow, pooled)), model, x)


def gradient_rollout(model: ViT, x: Tensor, target: Target = None) -> Tensor:
    """Rollout through the links that help the class (after Chefer et al., 2021a).

    Attention is weighted by its positive gradient first. Unlike relevance, each token then hands on
    half of itself in each layer, however small its gradients are.
    """
    layers, pooled = helping(model, x, target)
    return sound(picture(model, x, readout(model, roll(layers), pooled)), model, x)


def helping(model: ViT, x: Tensor, target: Target) -> tuple[list[Tensor], Tensor | None]:
    """Each layer's links that help the class, mean of heads of (dy/dA * A)+, and the pooling's."""
    check_patches(model, x)
    check_head(model)
    with resting(model), torch.inference_mode(False), torch.enable_grad():
        # cloned, for a tensor made in inference mode cannot have a gradient
        logits, seen = watch(model, x.detach().clone().requires_grad_())
        classes = pick(sound(logits.detach(), model, x), target)
        score = logits.gather(1, classes[:, None]).sum()  # images do not see each other
        gradients = torch.autograd.grad(score, [one.mixed for one in seen])
    with torch.no_grad():
        found = [
            torch.cat([part.clamp(min=0).mean(dim=1) for part in products(one, gradient)], dim=1)
            for one, gradient in zip(seen, gradients, strict=True)
        ]
    pooled = None if model.attn_pool is None else found.pop()
    return found, pooled


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One attention in a forward pass."""

    module: Attention | AttentionPool
    given: tuple[Any, ...]  # tokens, and their rotation
    mixed: Tensor  # (B, N, D), what it took of the values: A v of all heads


def watch(model: ViT, x: Tensor) -> tuple[Tensor, list[Seen]]:
    """Logits, and all attentions on the way to them, that of the pooling last."""
    modules = [m for m in model.modules() if isinstance(m, Attention | AttentionPool)]
    with heard(modules) as given, heard([module.proj for module in modules]) as mixed:
        logits: Tensor = model(x)
    seen = zip(modules, given, mixed, strict=True)
    return logits, [Seen(module=module, given=inputs, mixed=out) for module, inputs, (out,) in seen]


@contextmanager
def heard(modules: Sequence[nn.Module]) -> Iterator[list[tuple[Any, ...]]]:
    """What these modules are given while the block runs, in that order."""
    notes: list[tuple[Any, ...]] = []

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        notes.append(inputs)

    handles = [module.register_forward_pre_hook(note) for module in modules]
    try:
        yield notes
    finally:
        for handle in handles:
            handle.remove()


def products(seen: Seen, gradient: Tensor) -> Iterator[Tensor]:
    """dy/dA * A for a few rows at a time. With out = A v, dy/dA = (dy/d out) v^T."""
    heads = seen.module.heads
    gradient = gradient.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, h, N, d)
    if isinstance(seen.module, AttentionPool):
        values = seen.module.split(*seen.given)[2]
        maps: Iterable[Tensor] = [seen.module.weights(*seen.given)]
    else:
        tokens, rope = seen.given
        values = seen.module.part(2, tokens)
        maps = Look(attention=seen.module, tokens=tokens, rope=rope).maps()
    start = 0
    for part in maps:
        stop = start + part.shape[2]
        yield part * (gradient[:, :, start:stop] @ values.mT)
        start = stop


# --- the slow truth ------------------------------------------------------------------------------


def occlusion(
    model: ViT,
    x: Tensor,
    target: Target = None,
    window: int | None = None,
    without: Literal["mean", "drop"] = "mean",
    batch: int = BATCH,
    progress: Progress | None = None,
) -> Tensor:
    """What the class loses without each patch (Zeiler and Fergus, 2014), in nats; may be negative.

    A `window` of that many patches a side slides over the image by half its side; a patch gets the
    mean of all windows that hide it. None is one patch, or more where that were above 256 forwards.
    Hidden patches take the mean colour of the image, or are dropped: the model never sees them.
    """
    rows, columns = check_patches(model, x)
    check_head(model)
    window = fitting(rows, columns) if window is None else window
    if not 1 <= window < max(rows, columns):
        raise UserError(
            f"a window of {window} patches does not fit {rows} x {columns}; "
            f"give 1 to {max(rows, columns) - 1}"
        )
    if without not in ("mean", "drop"):
        raise UserError(f"patches are hidden by mean or drop, not by {without!r}")
    hidden = windows(rows, columns, window).to(x.device)  # (windows, P)
    with resting(model), torch.no_grad():
        logits = sound(model(x), model, x)
        classes = pick(logits, target)
        before = logits.log_softmax(dim=1).gather(1, classes[:, None])  # (B, 1)
        after = torch.empty(len(x), len(hidden), dtype=logits.dtype, device=x.device)
        places = torch.cartesian_prod(torch.arange(len(x)), torch.arange(len(hidden))).to(x.device)
        for done in range(0, len(places), batch):
            image, place = places[done : done + batch].unbind(1)
            logits = hide(model, x[image], hidden[place], without)
            after[image, place] = logits.log_softmax(dim=1)[range(len(image)), classes[image]]
            if progress is not None:
                progress(done + len(image), len(places))
    share = hidden.to(after.dtype)
    heat: Tensor = (before - after) @ share / share.sum(dim=0)  # (B, P)
    return heat.view(len(x), rows, columns)


def fitting(rows: int, columns: int) -> int:
    """The smallest window that does not ask for too many forwards."""
    window = 1
    while len(starts(rows, window)) * len(starts(columns, window)) > FORWARDS:
        window += 1
    return window


def starts(side: int, window: int) -> list[int]:
    """Where a window may begin, so that all patches are covered and none lies outside."""
    last = max(0, side - window)
    return sorted({*range(0, last, max(1, window // 2)), last})


def windows(rows: int, columns: int, window: int) -> Tensor:
    """Which patches each window hides."""
    found = []
    for top in starts(rows, window):
        for left in starts(columns, window):
            mask = torch.zeros(rows, columns, dtype=torch.bool)
            mask[top : top + window, left : left + window] = True
            found.append(mask.flatten())
    return torch.stack(found)  # (windows, P)


def hide(model: ViT, x: Tensor, hidden: Tensor, without: str) -> Tensor:
    """Logits of images without some of their patches, as many in each."""
    if without == "mean":
        logits: Tensor = model(cover(model, x, hidden))
    else:
        logits = model(x, keep=(~hidden).nonzero()[:, 1].unflatten(0, (len(x), -1)))
    return logits


def cover(model: ViT, x: Tensor, hidden: Tensor) -> Tensor:
    """Images whose hidden patches (B, P) have the image's own mean colour.

    That is not 0: after normalising, 0 is the mean colour of the set, which can be a strong signal
    in an image that is dark all over.
    """
    mask = hidden.unflatten(1, model.grid(x)).repeat_interleave(model.config.patch, dim=1)
    mask = mask.repeat_interleave(model.config.patch, dim=2)  # (B, H, W)
    return torch.where(mask[:, None], x.mean(dim=(2, 3), keepdim=True), x)


# --- what they share -----------------------------------------------------------------------------


def readout(model: ViT, flow: Tensor, pooled: Tensor | None) -> Tensor:  # (B, N, N)
    """The row of what the head reads: [CLS] and distillation, all patches alike, or as pooled."""
    patches = flow[:, model.config.prefix :]
    if pooled is not None:
        return (pooled @ patches)[:, 0]  # (B, N)
    if model.config.pool == "cls":
        return flow[:, : model.config.readers].mean(dim=1)
    return patches.mean(dim=1)


def picture(model: ViT, x: Tensor, row: Tensor) -> Tensor:
    """The patches of a row of tokens, in their places."""
    rows, columns = model.grid(x)
    return row[:, row.shape[1] - rows * columns :].reshape(len(x), rows, columns)


def pick(logits: Tensor, target: Target) -> Tensor:
    """The class to explain in each image: (B,)."""
    images, classes = logits.shape
    if target is None:
        return logits.argmax(dim=1)
    picked = torch.as_tensor(target, device=logits.device)
    whole = not picked.is_floating_point() and picked.dtype != torch.bool
    if not whole or picked.ndim > 1 or picked.numel() not in (1, images):
        raise UserError(
            f"target is {picked.dtype} of shape {tuple(picked.shape)}; give the number of a class, "
            f"or one for each of {images} images"
        )
    if not ((picked >= 0) & (picked < classes)).all():
        raise UserError(f"no such class: {target}; give a number from 0 to {classes - 1}")
    return picked.long().flatten().expand(images)


def check_head(model: ViT) -> None:
    if model.config.head == "none":
        raise UserError(
            "this model has no head, so there is no class to explain; "
            f"fine-tune it first, or ask for {' or '.join(CLASSLESS)}"
        )


def check_patches(model: ViT, x: Tensor) -> tuple[int, int]:
    """Rows and columns, if there is more than one patch to tell apart."""
    grid = model.grid(x)
    if grid == (1, 1):
        raise UserError(
            f"the whole image is one patch of {model.config.patch} pixels, so nothing in it can be "
            f"told apart; give a larger image, or a model with smaller patches"
        )
    return grid


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "relevance": relevance,
    "gradient-rollout": gradient_rollout,
    "rollout": attention_rollout,
    "attention": last_attention,
    "occlusion": occlusion,
}
