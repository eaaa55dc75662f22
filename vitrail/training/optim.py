"""Parameter groups, layer-wise learning-rate decay, optimizers, and EMA weights."""

import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from vitrail.errors import UserError
from vitrail.training.config import TrainConfig
from vitrail.training.schedule import ema_decay
from vitrail.training.sharding import MatrixExchange, local_rows

MOMENTUM = 0.95  # of Muon (Jordan et al., 2024)
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of one iteration (Jordan et al., 2024)
ITERATIONS = 5  # of Newton-Schulz (Jordan et al., 2024)
MUON_SCALE = 0.2  # the root mean square of AdamW's updates, measured by Liu et al. (2025)
LARGE = 128  # rows and columns of a matrix from which bfloat16 makes Newton-Schulz faster
EPSILON = 1e-7  # keeps a zero gradient finite


def build_optimizer(
    model: nn.Module,
    config: TrainConfig,
    layer_index: Callable[[str], int] | None = None,
    no_weight_decay: Collection[str] = (),
    matrices: Mapping[str, int] | None = None,
    leaves: Mapping[str, Tensor] | None = None,
) -> torch.optim.AdamW:
    """The optimizer of `config` over all parameters that require gradients.

    `layer_index` maps a parameter's name to its layer, counted from the input; the top layer has
    the full learning rate. `no_weight_decay` names parameters that are not decayed, such as tokens
    and position embeddings; vectors never are. `matrices` names the parameters that Muon updates,
    each with the number of matrices stacked in it: 3 for a fused qkv. Convolution kernels count as
    matrices with one row per output channel. `leaves` are the tensors to update, by default the
    parameters themselves.
    """
    matrices = dict(matrices or {}) if config.optimizer == "muon" else {}
    leaves = leaves or dict(model.named_parameters())
    groups = group_parameters(model, config, layer_index, no_weight_decay, matrices, leaves)
    optimizer = Muon if config.optimizer == "muon" else AdamW
    return optimizer(groups, lr=config.lr, fused=True)


def group_parameters(
    model: nn.Module,
    config: TrainConfig,
    layer_index: Callable[[str], int] | None,
    no_weight_decay: Collection[str],
    matrices: Mapping[str, int],
    leaves: Mapping[str, Tensor],
) -> list[dict[str, Any]]:
    """Parameter groups; `scale` is a group's factor on the learning rate."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    named = set(no_weight_decay) | matrices.keys()
    if unknown := named - dict(model.named_parameters()).keys():
        raise UserError(f"the model has no parameters {sorted(unknown)}; give names of parameters")
    if vectors := [name for name in matrices if model.get_parameter(name).ndim not in (2, 4)]:
        raise UserError(f"{vectors} are not matrices; name matrices or convolution kernels")
    if not trained:
        raise UserError("no parameter of the model requires a gradient; set requires_grad on some")
    layers = {name: layer_index(name) if layer_index else 0 for name in trained}
    top = max(layers.values())
    groups = defaultdict(list)
    for name, parameter in trained.items():
        scale = config.layer_decay ** (top - layers[name])
        decayed = parameter.ndim > 1 and name not in no_weight_decay
        decay = config.weight_decay if decayed else 0.0
        groups[scale, decay, matrices.get(name, 0)].append(leaves[name])
    return [
        {"params": parameters, "scale": scale, "weight_decay": decay, "matrices": count}
        for (scale, decay, count), parameters in groups.items()
    ]


class EagerOptimizer(torch.optim.Optimizer):
    """torch's optimizer without its decorators for torch.compile, whose import takes a second."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class LBFGS(EagerOptimizer, torch.optim.LBFGS):
    """torch's L-BFGS, eager."""


class AdamW(EagerOptimizer, torch.optim.AdamW):
    """torch's AdamW, eager."""

    update_adam = inspect.unwrap(torch.optim.AdamW.step)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.update_adam()


class Muon(AdamW):
    """Muon for the groups with `matrices` (Jordan et al., 2024), AdamW for the others.

    Muon replaces the momentum of a matrix by the nearest orthogonal matrix, so that all directions
    are updated at the same rate.
    """

    dtype = torch.float32  # of the orthogonalization of large matrices
    exchange: MatrixExchange | None = None  # of a sharded model, whose ranks hold rows of matrices

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["matrices"]:
                self.update_matrices(group)
        super().step()

    def update_matrices(self, group: dict[str, Any]) -> None:
        """One Muon step of a group."""
        parameters = [p for p in group["params"] if p.grad is not None]
        updates = [self.nesterov_momentum(p, p.grad) for p in parameters]
        for parameter in parameters:
            parameter.grad = None  # AdamW's step, which follows, skips parameters without one
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        count, lr = group["matrices"], group["lr"]
        if self.exchange is None:
            found = orthogonalize_all(updates, count, self.dtype)
            for parameter, parts in zip(parameters, found, strict=True):
                for matrix, part in zip(split_matrices(parameter, count), parts, strict=True):
                    matrix.add_(part, alpha=-lr * update_scale(part.shape))
            return
        whole = self.exchange(
            parameters,
            updates,
            lambda owned: [
                torch.cat(parts) for parts in orthogonalize_all(owned, count, self.dtype)
            ],
        )
        for parameter, rows in zip(parameters, whole, strict=True):
            shape = torch.Size((self.exchange.total_rows[parameter] // count, rows.shape[1]))
            parameter.flatten(1).add_(rows, alpha=-lr * update_scale(shape))

    def nesterov_momentum(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """The moving average of the gradient, with Nesterov's look-ahead."""
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)


def orthogonalize_all(
    updates: Sequence[Tensor], count: int, dtype: torch.dtype = torch.float32
) -> list[list[Tensor]]:
    """The `count` matrices of each update; those of one shape share a batched Newton-Schulz."""
    shapes = defaultdict(list)
    for number, update in enumerate(updates):
        for matrix in split_matrices(update, count):
            shapes[matrix.shape].append((number, matrix))
    found: list[list[Tensor]] = [[] for _ in updates]
    for pairs in shapes.values():
        numbers, matrices = zip(*pairs, strict=True)
        orthogonal = orthogonalize(torch.stack(matrices), dtype)
        for number, matrix in zip(numbers, orthogonal, strict=True):
            found[number].append(matrix)
    return found


def split_matrices(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """The matrices stacked in a parameter; a kernel of a convolution is flattened to one."""
    return x.view(len(x), -1).chunk(count)  # a view: updates of the matrices change the parameter


def orthogonalize(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Approximates U V^T for each matrix U S V^T of a batch: all singular values become about 1.

    Newton-Schulz iterations x = a x + (b A + c A A) x with A = x x^T. `baddbmm` fuses each product
    with its sum, three times faster than separate calls on a CPU. The iterations correct their own
    rounding errors, so that bfloat16 is precise enough (Jordan et al., 2024).
    """
    if x.shape[-2] > x.shape[-1]:
        return orthogonalize(x.mT, dtype).mT
    a, b, c = NEWTON_SCHULZ
    original = x.dtype
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + EPSILON)
    x = x.to(dtype) if x.shape[-2] >= LARGE else x
    for _ in range(ITERATIONS):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.to(original)


def update_scale(shape: torch.Size) -> float:
    """The factor on an orthogonal update (Liu et al., 2025).

    It gives the update the root mean square of AdamW's, so that one learning rate suits both.
    """
    return MUON_SCALE * math.sqrt(max(shape))


class EmaModel:
    """A copy of a model with an exponential moving average (EMA) of its weights.

    Polyak and Juditsky, 1992; Tarvainen and Valpola, 2017.
    """

    def __init__(self, model: nn.Module, decay: float, twin: nn.Module | None = None):
        """`twin` is a sharded model with the same weights, as those cannot be copied."""
        self.model = (twin or copy.deepcopy(model)).requires_grad_(False).eval()
        self.decay = decay
        pairs = list(zip(list_tensors(self.model), list_tensors(model), strict=True))
        self.averaged = [pair for pair in pairs if pair[0].is_floating_point()]
        self.copied = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        mine, newest = zip(*self.averaged, strict=True)
        get_ema_multi_avg_fn(ema_decay(step, self.decay))(mine, newest, 0)
        for counter, new in self.copied:
            counter.copy_(new)


def list_tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers: averaged weights need the averaged statistics of batch norms."""
    return [local_rows(tensor) for tensor in (*model.parameters(), *model.buffers())]
