"""Heatmaps: how much each patch contributes to a class, by any of six methods."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.errors import UserError
from vitrail.evaluation.loop import eval_mode
from vitrail.insight.maps import (
    LayerAttention,
    Rows,
    attention,
    check_finite,
    iterate_layers,
    pool_attention,
)
from vitrail.insight.methods import CLASS_AGNOSTIC, METHODS
from vitrail.model.attention import Attention
from vitrail.model.pool import AttentionPool
from vitrail.model.vit import ViT

HeadFusion = Literal["mean", "max", "min"]
Target = int | Tensor | None
Progress = Callable[[int, int], None]  # masked images done, masked images in total

MAX_WINDOWS = 256  # masked copies of an image, at most, unless the caller gives a window
BATCH = 32  # masked images in one forward pass


def explain(
    model: ViT, x: Tensor, method: str = "relevance", target: Target = None, **settings: Any
) -> Tensor:
    """A heatmap for each image, (B, rows, columns): non-negative, comparable within one image only.

    `target` is a class index for all images or one for each; None is the predicted class. Rollout
    and attention do not depend on a class. `settings` are the keywords of the method's function.
    """
    if method not in METHODS:
        raise UserError(f"method {method!r} is unknown; choose one of {', '.join(METHODS)}")
    if METHODS[method].class_specific:
        settings |= {"target": target}
    function = FUNCTIONS[method]
    known = list(inspect.signature(function).parameters)[2:]
    for name in settings:
        if name not in known:
            own = ", ".join(name for name in known if name != "target") or "none"
            raise UserError(f"{method} has no setting {name!r}; its settings: {own}")
    heatmap: Tensor = function(model, x, **settings)  # (B, rows, columns)
    return heatmap.clamp(min=0)


# --- attention -----------------------------------------------------------------------------------


def last_layer_attention(model: ViT, x: Tensor) -> Tensor:
    """Attention of the last layer, or of the pooling, from the tokens that the head reads."""
    check_patches(model, x)
    if model.attn_pool is not None:
        row = pool_attention(model, x).mean(dim=1)  # (B, 1, P)
    else:
        row = attention(model, x, layers=-1)[0].mean(dim=1)  # (B, 1, N)
        if model.config.distilled or model.config.pool == "cls_avg":
            rows: Rows = "dist" if model.config.distilled else "mean"
            row = (row + attention(model, x, layers=-1, rows=rows)[0].mean(dim=1)) / 2
    return reshape_to_grid(model, x, row[:, 0])


def attention_rollout(
    model: ViT, x: Tensor, head: HeadFusion = "mean", discard: float = 0.0
) -> Tensor:
    """Rollout from the patches to what the head reads."""
    check_patches(model, x)
    with eval_mode(model), torch.no_grad():
        fused = (
            torch.cat([fuse_heads(chunk, head) for chunk in layer.weights()], dim=1)
            for layer in iterate_layers(model, x)
        )
        flow = multiply_layers(discard_smallest(layer, discard) for layer in fused)  # (B, N, N)
    pooling = None if model.attn_pool is None else fuse_heads(pool_attention(model, x), "mean")
    heatmap = reshape_to_grid(model, x, head_row(model, flow, pooling))
    return check_finite(heatmap, model, x)


def rollout(maps: Iterable[Tensor], head: HeadFusion = "mean", discard: float = 0.0) -> Tensor:
    """Attention rollout (Abnar and Zuidema, 2020): how much of each input token is in each output.

    `maps` are the attention weights of all layers with all rows. Heads are fused by their mean,
    maximum or minimum; `discard` is the fraction of each row's smallest weights to set to zero.
    The result has shape (B, N, N), and its rows sum to 1.
    """
    return multiply_layers(discard_smallest(fuse_heads(layer, head), discard) for layer in maps)


def multiply_layers(layers: Iterable[Tensor]) -> Tensor:
    """The product of all layers; each layer is half attention, half residual connection."""
    flow: Tensor | None = None
    for layer in layers:
        flow = add_residual(layer) if flow is None else add_residual(layer) @ flow
    if flow is None:
        raise UserError("rollout needs the attention maps of at least one layer; none came")
    return flow  # (B, N, N)


def add_residual(layer: Tensor) -> Tensor:  # (B, N, N)
    """(A + I) / 2, with the rows of A normalised to sum to 1; a row of zeros becomes I's."""
    layer = layer / layer.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(layer.dtype).tiny)
    layer = layer + torch.eye(layer.shape[-1], dtype=layer.dtype, device=layer.device)
    return layer / layer.sum(dim=-1, keepdim=True)  # (B, N, N)


def fuse_heads(maps: Tensor, head: HeadFusion) -> Tensor:
    """One map from those of all heads: (B, h, rows, N) to (B, rows, N)."""
    if head not in ("mean", "max", "min"):
        raise UserError(f"head is {head!r}; fuse heads by mean, max or min")
    return maps.mean(dim=1) if head == "mean" else getattr(maps, f"a{head}")(dim=1)


def discard_smallest(layer: Tensor, fraction: float) -> Tensor:  # (B, N, N)
    """Sets this fraction of the smallest weights in each row to zero."""
    if not 0 <= fraction < 1:
        raise UserError(f"discard is {fraction}; give a fraction from 0 to below 1")
    smallest = layer.argsort(dim=-1)[..., : int(fraction * layer.shape[-1])]
    return layer.scatter(-1, smallest, 0)  # (B, N, N)


# --- attention and its gradient ------------------------------------------------------------------


def relevance(model: ViT, x: Tensor, target: Target = None) -> Tensor:
    """Generic attention-model explainability (Chefer et al., 2021b).

    R starts as the identity. Each layer adds the attention that increases the logit y of the class:
    R <- R + mean over heads of (dy/dA * A)+ R.
    """
    layers, pooling = gradient_weighted_attention(model, x, target)
    flow: Tensor | None = None
    for layer in layers:
        step = layer + torch.eye(layer.shape[-1], dtype=layer.dtype, device=layer.device)
        flow = step if flow is None else step @ flow
    assert flow is not None
    heatmap = reshape_to_grid(model, x, head_row(model, flow, pooling))  # (B, rows, columns)
    return check_finite(heatmap, model, x)


def gradient_rollout(model: ViT, x: Tensor, target: Target = None) -> Tensor:
    """Rollout of attention weighted by its positive gradient (after Chefer et al., 2021a).

    Rollout normalises the rows of each layer, so layers with small gradients count as much as
    layers with large ones. In `relevance` they do not.
    """
    layers, pooling = gradient_weighted_attention(model, x, target)
    heatmap = reshape_to_grid(model, x, head_row(model, multiply_layers(layers), pooling))
    return check_finite(heatmap, model, x)


def gradient_weighted_attention(
    model: ViT, x: Tensor, target: Target
) -> tuple[list[Tensor], Tensor | None]:
    """The mean over heads of (dy/dA * A)+ for each layer, and for attention pooling if there is."""
    check_patches(model, x)
    check_head(model)
    with eval_mode(model), torch.inference_mode(False), torch.enable_grad():
        # cloned, because a tensor made in inference mode cannot require a gradient
        logits, calls = record_attention(model, x.detach().clone().requires_grad_())
        classes = target_classes(check_finite(logits.detach(), model, x), target)  # (B)
        score = logits.gather(1, classes[:, None]).sum()  # images are independent of each other
        gradients = torch.autograd.grad(score, [call.mixed for call in calls])
    weighted = []
    with torch.no_grad():
        for call, gradient in zip(calls, gradients, strict=True):
            chunks = gradient_times_attention(call, gradient)
            fused = torch.cat([chunk.clamp(min=0).mean(dim=1) for chunk in chunks], dim=1)
            weighted.append(fused)
    pooling = None if model.attn_pool is None else weighted.pop()
    return weighted, pooling


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One attention module in a forward pass."""

    module: Attention | AttentionPool
    inputs: tuple[Any, ...]  # tokens, and rotary positions
    mixed: Tensor  # (B, N, D), the input of `proj`: A v of all heads


def record_attention(model: ViT, x: Tensor) -> tuple[Tensor, list[AttentionCall]]:
    """Logits, and the attention of every layer on the way to them; that of the pooling is last."""
    modules = [m for m in model.modules() if isinstance(m, Attention | AttentionPool)]
    with record_inputs(modules) as inputs, record_inputs([m.proj for m in modules]) as mixed:
        logits: Tensor = model(x)  # (B, K)
    calls = [
        AttentionCall(module=module, inputs=given, mixed=out)
        for module, given, (out,) in zip(modules, inputs, mixed, strict=True)
    ]
    return logits, calls


@contextmanager
def record_inputs(modules: Sequence[nn.Module]) -> Iterator[list[tuple[Any, ...]]]:
    """The inputs of these modules inside the block, in the order of their calls."""
    recorded: list[tuple[Any, ...]] = []

    def record(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        recorded.append(inputs)

    handles = [module.register_forward_pre_hook(record) for module in modules]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def gradient_times_attention(call: AttentionCall, gradient: Tensor) -> Iterator[Tensor]:
    """dy/dA * A, a chunk of rows at a time. With out = A v, dy/dA = (dy/d out) v^T."""
    gradient = gradient.unflatten(-1, (call.module.heads, -1)).transpose(1, 2)  # (B, h, rows, d)
    if isinstance(call.module, AttentionPool):
        values = call.module.split(*call.inputs)[2]  # (B, h, P, d)
        chunks: Iterable[Tensor] = [call.module.weights(*call.inputs)]
    else:
        tokens, rope = call.inputs
        values = call.module.project(tokens, 2)  # (B, h, N, d)
        chunks = LayerAttention(attention=call.module, tokens=tokens, rope=rope).weights()
    start = 0
    for chunk in chunks:
        stop = start + chunk.shape[2]
        yield chunk * (gradient[:, :, start:stop] @ values.mT)
        start = stop


# --- Grad-CAM ------------------------------------------------------------------------------------


def grad_cam(model: ViT, x: Tensor, target: Target = None) -> Tensor:
    """Grad-CAM on tokens (Selvaraju et al., 2017): activations times their mean gradient.

    The activations are the input of the last attention: after it, the gradient of a head that
    reads [CLS] is zero at every patch. All patches have much in common, which often makes
    every sum negative, so the heatmap shows how far a patch is above the mean of all.
    """
    check_patches(model, x)
    check_head(model)
    with eval_mode(model), torch.inference_mode(False), torch.enable_grad():
        last = model.blocks[-1].get_submodule("attn")
        with record_inputs([last]) as inputs:
            logits: Tensor = model(x.detach().clone().requires_grad_())  # (B, K)
        tokens = inputs[0][0]  # (B, N, D)
        classes = target_classes(check_finite(logits.detach(), model, x), target)  # (B)
        score = logits.gather(1, classes[:, None]).sum()  # images are independent of each other
        (gradient,) = torch.autograd.grad(score, tokens)
    with torch.no_grad():
        weights = gradient[:, model.config.prefix :].mean(dim=1, keepdim=True)  # (B, 1, D)
        heatmap = reshape_to_grid(model, x, (weights * tokens).sum(dim=-1))  # (B, rows, columns)
        above = heatmap - heatmap.mean(dim=(1, 2), keepdim=True)  # (B, rows, columns)
        return check_finite(above.clamp(min=0), model, x)


# --- occlusion -----------------------------------------------------------------------------------


def occlusion(
    model: ViT,
    x: Tensor,
    target: Target = None,
    window: int | None = None,
    without: Literal["mean", "drop"] = "mean",
    batch: int = BATCH,
    progress: Progress | None = None,
    multi_label: bool = False,
) -> Tensor:
    """The drop in log probability when each patch is hidden (Zeiler and Fergus, 2014); any sign.

    A window of `window` x `window` patches slides over the image with half its side as stride; a
    patch gets the mean over all windows that hide it. None is the smallest window that needs at
    most 256 forward passes. Hidden patches take the image's mean colour ("mean"), or are removed
    from the sequence ("drop"). With `multi_label` each class has a probability of its own.
    """
    rows, columns = check_patches(model, x)
    check_head(model)
    window = smallest_window(rows, columns) if window is None else window
    if not 1 <= window < max(rows, columns):
        raise UserError(
            f"a window of {window} patches does not fit {rows} x {columns}; "
            f"give 1 to {max(rows, columns) - 1}"
        )
    if without not in ("mean", "drop"):
        raise UserError(f"without is {without!r}; hide patches by mean or drop")
    masks = window_masks(rows, columns, window).to(x.device)  # (windows, P)
    with eval_mode(model), torch.no_grad():
        logits = check_finite(model(x), model, x)  # (B, K)
        classes = target_classes(logits, target)  # (B)
        before = log_probabilities(logits, multi_label).gather(1, classes[:, None])  # (B, 1)
        after = torch.empty(len(x), len(masks), dtype=logits.dtype, device=x.device)  # (B, windows)
        pairs = torch.cartesian_prod(torch.arange(len(x)), torch.arange(len(masks))).to(x.device)
        for done in range(0, len(pairs), batch):
            image, mask = pairs[done : done + batch].unbind(1)
            logits = masked_logits(model, x[image], masks[mask], without)
            values = log_probabilities(logits, multi_label)
            after[image, mask] = values[range(len(image)), classes[image]]
            if progress is not None:
                progress(done + len(image), len(pairs))
    weight = masks.to(after.dtype)
    heatmap: Tensor = (before - after) @ weight / weight.sum(dim=0)  # (B, P)
    return heatmap.view(len(x), rows, columns)  # (B, rows, columns)


def log_probabilities(logits: Tensor, multi_label: bool) -> Tensor:
    """Of classes that exclude each other, or of labels that are independent."""
    return F.logsigmoid(logits) if multi_label else logits.log_softmax(dim=1)


def smallest_window(rows: int, columns: int) -> int:
    """The smallest window that needs at most `MAX_WINDOWS` forward passes."""
    window = 1
    while len(window_starts(rows, window)) * len(window_starts(columns, window)) > MAX_WINDOWS:
        window += 1
    return window


def window_starts(side: int, window: int) -> list[int]:
    """First patches of the windows along one side: all patches are covered, none is outside."""
    last = max(0, side - window)
    return sorted({*range(0, last, max(1, window // 2)), last})


def window_masks(rows: int, columns: int, window: int) -> Tensor:
    """Which patches each window hides."""
    masks = []
    for top in window_starts(rows, window):
        for left in window_starts(columns, window):
            mask = torch.zeros(rows, columns, dtype=torch.bool)
            mask[top : top + window, left : left + window] = True
            masks.append(mask.flatten())
    return torch.stack(masks)  # (windows, P)


def masked_logits(model: ViT, x: Tensor, mask: Tensor, without: str) -> Tensor:
    """Logits without the patches in the mask (B, P), which has as many in each row."""
    if without == "mean":
        logits: Tensor = model(mask_patches(model, x, mask))
    else:
        logits = model(x, keep=(~mask).nonzero()[:, 1].unflatten(0, (len(x), -1)))
    return logits  # (images, K)


def mask_patches(model: ViT, x: Tensor, mask: Tensor) -> Tensor:
    """Fills the patches in the mask (B, P) with the mean colour of their image.

    Not with 0: after normalisation that is the mean colour of the data set, which can be a strong
    signal in an image that is dark all over.
    """
    pixels = mask.unflatten(1, model.grid(x)).repeat_interleave(model.config.patch, dim=1)
    pixels = pixels.repeat_interleave(model.config.patch, dim=2)  # (images, H, W)
    return torch.where(pixels[:, None], x.mean(dim=(2, 3), keepdim=True), x)  # (images, C, H, W)


# --- shared by all methods -----------------------------------------------------------------------


def head_row(model: ViT, flow: Tensor, pooling: Tensor | None) -> Tensor:  # (B, N, N)
    """The row of what the head reads: class tokens, the mean of the patches, or their pooling."""
    patches = flow[:, model.config.prefix :]  # (B, P, N)
    if pooling is not None:
        return (pooling @ patches)[:, 0]  # (B, N)
    class_tokens = flow[:, : model.config.class_tokens]  # (B, class_tokens, N)
    if model.config.pool == "cls":
        return class_tokens.mean(dim=1)  # (B, N)
    if model.config.pool == "cls_avg":
        return (class_tokens[:, 0] + patches.mean(dim=1)) / 2  # (B, N)
    return patches.mean(dim=1)  # (B, N)


def reshape_to_grid(model: ViT, x: Tensor, row: Tensor) -> Tensor:
    """The patches of a row of tokens, (B, N) or (B, P), as a grid."""
    rows, columns = model.grid(x)
    return row[:, row.shape[1] - rows * columns :].reshape(len(x), rows, columns)


def target_classes(logits: Tensor, target: Target) -> Tensor:  # (B, K)
    """The class to explain in each image."""
    images, classes = logits.shape
    if target is None:
        return logits.argmax(dim=1)  # (B)
    given = torch.as_tensor(target, device=logits.device)
    is_integer = not given.is_floating_point() and given.dtype != torch.bool
    if not is_integer or given.ndim > 1 or given.numel() not in (1, images):
        raise UserError(
            f"target is {given.dtype} of shape {tuple(given.shape)}; give the index of a class, "
            f"or one for each of {images} images"
        )
    if not ((given >= 0) & (given < classes)).all():
        raise UserError(f"no such class: {target}; give an index from 0 to {classes - 1}")
    return given.long().flatten().expand(images)  # (B)


def check_head(model: ViT) -> None:
    if model.config.head == "none":
        raise UserError(
            "this model has no head and predicts no classes; "
            f"fine-tune it first, or choose {' or '.join(CLASS_AGNOSTIC)}"
        )


def check_patches(model: ViT, x: Tensor) -> tuple[int, int]:
    """Rows and columns of patches; rejects images of a single patch."""
    grid = model.grid(x)
    if grid == (1, 1):
        raise UserError(
            f"the whole image is one patch of {model.config.patch} pixels, so there is nothing to "
            f"compare; give a larger image, or a model with smaller patches"
        )
    return grid


FUNCTIONS: dict[str, Callable[..., Tensor]] = {  # the names are those of `methods.METHODS`
    "relevance": relevance,
    "gradient-rollout": gradient_rollout,
    "grad-cam": grad_cam,
    "rollout": attention_rollout,
    "attention": last_layer_attention,
    "occlusion": occlusion,
}
