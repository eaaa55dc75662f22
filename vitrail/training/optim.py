"""Parameter groups, layer decay, optimizers, and averaged weights."""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from vitrail.errors import UserError
from vitrail.training.config import TrainConfig
from vitrail.training.schedule import ema_decay

MOMENTUM = 0.95  # of Muon, as published


def build(
    model: nn.Module,
    config: TrainConfig,
    layer: Callable[[str], int] | None = None,
    undecayed: Collection[str] = (),
    matrices: Mapping[str, int] | None = None,
) -> torch.optim.AdamW:
    """The optimizer of `config` for every parameter that learns.

    `layer` tells the number of a parameter's layer, counted from the input; the topmost learns at
    the full rate. `undecayed` names parameters beside vectors that no weight decay pulls, such as
    tokens and positions. `matrices` names those that Muon turns, each with the number of matrices
    that lie stacked in it: 3 for queries, keys and values in one.
    """
    matrices = dict(matrices or {}) if config.optimizer == "muon" else {}
    groups = group(model, config, layer, undecayed, matrices)
    optimizer = Muon if config.optimizer == "muon" else torch.optim.AdamW
    return optimizer(groups, lr=config.lr, fused=True)


def group(
    model: nn.Module,
    config: TrainConfig,
    layer: Callable[[str], int] | None,
    undecayed: Collection[str],
    matrices: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Parameters that are treated alike, together; `scale` is their part of the learning rate."""
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if lost := (set(undecayed) | matrices.keys()) - dict(model.named_parameters()).keys():
        raise UserError(f"the model has no parameters {sorted(lost)}; give names of parameters")
    if flat := [name for name in matrices if model.get_parameter(name).ndim != 2]:
        raise UserError(f"{flat} are no matrices; name parameters of two dimensions")
    if not learning:
        raise UserError("no parameter of the model learns; leave some with requires_grad")
    layers = {name: layer(name) if layer else 0 for name in learning}
    top = max(layers.values())
    groups = defaultdict(list)
    for name, parameter in learning.items():
        scale = config.layer_decay ** (top - layers[name])
        plain = parameter.ndim <= 1 or name in undecayed
        decay = 0.0 if plain else config.weight_decay
        groups[scale, decay, matrices.get(name, 0)].append(parameter)
    return [
        {"params": parameters, "scale": scale, "weight_decay": decay, "stacked": stacked}
        for (scale, decay, stacked), parameters in groups.items()
    ]


class Muon(torch.optim.AdamW):
    """AdamW, but for groups with `stacked` matrices, which it turns as wholes.

    Their averaged gradient is replaced by the nearest orthogonal matrix: every direction learns at
    the same pace (Jordan et al., 2024).
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["stacked"]:
                self.turn(group)
        super().step()

    def turn(self, group: dict[str, Any]) -> None:
        """One step of a group's matrices; those of one shape go through Newton-Schulz together."""
        shapes = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            change = self.smooth(parameter, parameter.grad)
            parameter.grad = None  # AdamW, which comes next, passes over parameters without one
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            both = (tensor.chunk(group["stacked"]) for tensor in (parameter, change))
            for matrix, change in zip(*both, strict=True):
                shapes[matrix.shape].append((matrix, change))
        for shape, pairs in shapes.items():
            matrices, changes = zip(*pairs, strict=True)
            for matrix, change in zip(matrices, orthogonal(torch.stack(changes)), strict=True):
                matrix.add_(change, alpha=-group["lr"] * pace(shape))

    def smooth(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """The gradient averaged over the last steps, looking a step ahead (Nesterov)."""
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)


def orthogonal(x: Tensor) -> Tensor:
    """U V^T of each matrix U S V^T in a stack, roughly: all singular values come to lie near 1.

    Five steps x = a x + (b A + c A A) x with A = x x^T, after Newton and Schulz; a, b and c are
    those of Jordan et al. (2024). A product and a sum in one call are three times faster here.
    """
    if x.shape[-2] > x.shape[-1]:
        return orthogonal(x.mT).mT
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        mixed = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, mixed, x, beta=a)
    return x


def pace(shape: torch.Size) -> float:
    """How far to move along an orthogonal matrix, at learning rate 1 (Liu et al., 2025).

    The mean square of the change is then that of AdamW, and one rate serves all parameters.
    """
    return 0.2 * math.sqrt(max(shape))


class Average:
    """A copy of a model whose weights are averaged over its last steps.

    Far steps count exponentially less (Polyak and Juditsky, 1992; Tarvainen and Valpola, 2017).
    """

    def __init__(self, model: nn.Module, decay: float):
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.decay = decay
        self.weights = list(self.model.parameters()), list(model.parameters())
        self.buffers = list(self.model.buffers()), list(model.buffers())

    @torch.no_grad()
    def update(self, step: int) -> None:
        get_ema_multi_avg_fn(ema_decay(step, self.decay))(*self.weights, 0)
        for mine, newest in zip(*self.buffers, strict=True):
            mine.copy_(newest)
