"""Calibration for int8: the range of each layer's input, and what quantising it costs."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.vit import ViT

LEVELS = 255  # steps of a uint8 activation
# int8 weights of 7 bits ("reduce_range"): AVX2 adds two products of a uint8 and an int8 in 16 bits,
# which saturate above 2 * 255 * 64. With 8 bits a file that is exact on a CPU with VNNI would be
# wrong on one without, and nothing would say so.
WEIGHT_LIMIT = 63
SAMPLES = 10_000  # values of a layer's input per batch from which its range is estimated
CLIPPING = tuple(n / 20 for n in range(2, 21))  # fractions of the full range that are compared
BATCH = 16  # images in a forward pass
SENSITIVITY_IMAGES = 16
PROJECTIONS = 2  # random directions of the logits that are differentiated


@dataclass(frozen=True)
class Range:
    """The values that the 256 levels of a uint8 activation represent."""

    scale: float
    zero: int  # the level of the value 0

    def quantise(self, x: Tensor) -> Tensor:
        """Rounds values to the levels, as QuantizeLinear and DequantizeLinear do."""
        levels = (x / self.scale).round() + self.zero
        return (levels.clamp(0, LEVELS) - self.zero) * self.scale


def linear_layers(model: ViT) -> dict[str, nn.Linear]:
    """The linear layers of all blocks by name: nearly all multiply-adds of a model."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if name.startswith("blocks.") and isinstance(layer, nn.Linear)
    }


def calibrate_ranges(model: ViT, images: Tensor) -> dict[str, Range]:
    """The range of the input of every linear layer that represents these images best."""
    samples: dict[str, list[Tensor]] = {name: [] for name in linear_layers(model)}

    def record(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].flatten()
            few = x[:: max(1, len(x) // SAMPLES)]
            samples[name].append(torch.cat([few, x.min()[None], x.max()[None]]))

        return hook

    with ExitStack() as hooks, torch.inference_mode():
        for name, layer in linear_layers(model).items():
            hooks.callback(layer.register_forward_pre_hook(record(name)).remove)
        for batch in images.split(BATCH):
            model(batch)
    return {name: fit_range(torch.cat(values)) for name, values in samples.items()}


def fit_range(values: Tensor) -> Range:
    """The range with the least squared error: clipping outliers makes all other steps finer."""
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    if high - low < 1e-12:  # a constant zero
        return Range(1.0, 0)
    candidates = []
    for fraction in CLIPPING:
        # GELU ends at -0.17, where clipping would hurt, and has its outliers on the other side
        for bottom, top in ((low * fraction, high * fraction), (low, high * fraction)):
            scale = max(top - bottom, 1e-12) / LEVELS
            candidates.append(Range(scale, round(-bottom / scale)))
    return min(candidates, key=lambda one: float((one.quantise(values) - values).square().mean()))


def quantise_weight(weight: Tensor) -> Tensor:
    """A linear layer's weight (out, in) rounded to 7 bits, one scale per output channel."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / WEIGHT_LIMIT
    return (weight / scale).round() * scale


def measure_sensitivity(
    model: ViT, images: Tensor, ranges: dict[str, Range]
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """How much quantising each layer changes the logits: squared error over their variance.

    Also the mean error of each output of a layer, which its bias can correct.

    With a layer's quantisation error e, the logits change by J e to first order. For random
    directions v of the logits, the mean of (v^T J e)^2 is the squared norm of that change, and
    one backward pass gives v^T J for all layers at once.
    """
    generator = torch.Generator().manual_seed(0)
    layers, images = linear_layers(model), images[:SENSITIVITY_IMAGES]
    scores = dict.fromkeys(layers, 0.0)
    means: dict[str, Tensor] = {}
    for _ in range(PROJECTIONS):
        errors: dict[str, tuple[Tensor, Tensor]] = {}
        with ExitStack() as hooks, torch.enable_grad():
            for name, layer in layers.items():
                hook = record_error(name, ranges[name], errors)
                hooks.callback(layer.register_forward_hook(hook).remove)
            logits = model(images.clone().requires_grad_())
            direction = torch.randn(logits.shape[1], generator=generator)
            (logits @ direction / math.sqrt(len(direction))).sum().backward()
        variance = float(logits.detach().var()) + 1e-12
        for name, (output, error) in errors.items():
            assert output.grad is not None
            change = (output.grad * error).flatten(1).sum(dim=1)
            scores[name] += float(change.square().mean()) / variance / PROJECTIONS
            means[name] = error.flatten(0, -2).mean(dim=0)
    return scores, means


def record_error(
    name: str, range_: Range, errors: dict[str, tuple[Tensor, Tensor]]
) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    """A forward hook that keeps a layer's output and its quantisation error."""

    def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, nn.Linear)
        with torch.no_grad():
            weight = quantise_weight(layer.weight)
            error = F.linear(range_.quantise(inputs[0]), weight, layer.bias) - output
        output.retain_grad()
        errors[name] = output, error

    return hook
