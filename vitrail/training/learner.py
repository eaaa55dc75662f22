"""Everything that training changes, in one object: weights, optimizer, EMA weights, loss scale."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from vitrail.errors import UserError
from vitrail.training.config import TrainConfig
from vitrail.training.device import has_bfloat16_units
from vitrail.training.distributed import SINGLE, World, is_sharded
from vitrail.training.optim import EmaModel, Muon, build_optimizer
from vitrail.training.sharding import MatrixExchange, local_rows

# outputs, targets, label smoothing and class weights in; the loss summed over the images out
Criterion = Callable[[Tensor, Tensor, float, Tensor | None], Tensor]
CountCorrect = Callable[[Tensor, Tensor], Tensor]


class Learner:
    """A model in training; the keyword arguments are those of `build_optimizer`."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        *,
        layer_index: Callable[[str], int] | None = None,
        no_weight_decay: Collection[str] = (),
        matrices: Mapping[str, int] | None = None,
        twin: nn.Module | None = None,
        world: World = SINGLE,
    ):
        """A sharded `model` needs its `world`; and for EMA a `twin`, sharded in the same way."""
        self.model = model
        self.module: nn.Module = model  # what training calls; may be only the upper part of `model`
        self.criterion: Criterion | None = None  # instead of cross-entropy, with `count_correct`
        self.count_correct: CountCorrect | None = None
        self.sharded = is_sharded(model)
        # what the optimizer updates: the parameters, or this rank's rows of them in the same memory
        self.leaves = {name: local_rows(p) for name, p in model.named_parameters()}
        self.gradient_masks: dict[str, Tensor] = {}  # of a sharded model, which has no hooks
        self.device = next(model.parameters()).device
        self.dtype = compute_dtype(config.precision, self.device)
        self.training_dtype = training_dtype(config.precision, self.device)
        self.optimizer = build_optimizer(
            model, config, layer_index, no_weight_decay, matrices, self.leaves
        )
        if isinstance(self.optimizer, Muon) and self.training_dtype == torch.bfloat16:
            self.optimizer.dtype = torch.bfloat16
        if self.sharded and isinstance(self.optimizer, Muon):
            rows = {self.leaves[name]: len(p) for name, p in model.named_parameters()}
            self.optimizer.exchange = MatrixExchange(world, rows)
        self.ema = EmaModel(model, config.ema, twin) if config.ema else None
        self.scaler = GradScaler(self.device.type, enabled=self.dtype == torch.float16)

    @property
    def eval_model(self) -> nn.Module:
        """The model to evaluate and to save: the one with EMA weights, if there is one."""
        return self.model if self.ema is None else self.ema.model

    def autocast(self) -> torch.autocast:
        dtype = self.training_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        if self.sharded:
            self.model.zero_grad()

    def collect_gradients(self) -> None:
        """Hands the gradients of a sharded model to the tensors that the optimizer updates."""
        if not self.sharded:
            return
        for name, parameter in self.model.named_parameters():
            leaf = self.leaves[name]
            leaf.grad = None if parameter.grad is None else local_rows(parameter.grad)
            if leaf.grad is not None and name in self.gradient_masks:
                leaf.grad.mul_(self.gradient_masks[name])

    def is_finite(self) -> bool:
        """Whether all weights are; of a sharded model, those of this rank."""
        return all(bool(leaf.isfinite().all()) for leaf in self.leaves.values())

    def holds_rows(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a rank holds only its rows of this one of the whole `tensors`."""
        return self.sharded and len(shape) > 0 and name.split("/")[-1] in self.leaves

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name; not copies, so they change with the next step.

        Of a sharded model, this rank's rows of each parameter, its moments and its average.
        """
        models = {"model": self.model}
        if self.ema is not None:
            models["average"] = self.ema.model
        tensors = {
            f"{kind}/{name}": local_rows(tensor.detach())
            for kind, model in models.items()
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        }
        for name, scale in self.scaler.state_dict().items():  # empty unless in use
            tensors[f"scaler/{name}"] = torch.tensor(scale)
        for name, leaf in self.leaves.items():
            for moment, tensor in self.optimizer.state.get(leaf, {}).items():
                tensors[f"optimizer/{moment}/{name}"] = tensor
        return tensors

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads the `tensors` of a learner that was built in the same way."""
        mine, theirs = (
            {name: tensor for name, tensor in some.items() if not name.startswith("optimizer/")}
            for some in (self.tensors(), tensors)
        )
        if unmatched := mine.keys() ^ theirs.keys():
            raise mismatch_error(f"{min(unmatched)} is in only one of them")
        for name, tensor in mine.items():
            check_same_shape(name, tensor, theirs[name])
            tensor.copy_(theirs[name])
        self.scaler.load_state_dict(
            {name: tensor.item() for name, tensor in with_prefix("scaler/", theirs).items()}
        )
        self._restore_moments(with_prefix("optimizer/", tensors))

    def _restore_moments(self, tensors: Mapping[str, Tensor]) -> None:
        parameters = dict(self.model.named_parameters())
        trained = {name: p for name, p in self.leaves.items() if parameters[name].requires_grad}
        self.optimizer.state.clear()
        for path, tensor in tensors.items():
            moment, _, name = path.partition("/")
            if name not in trained:
                raise mismatch_error(f"{name} is not a trained parameter")
            if tensor.ndim:  # all but AdamW's step count
                check_same_shape(path, trained[name], tensor)
            # a copy on the device, where a fused optimizer expects its step count too
            self.optimizer.state[trained[name]][moment] = tensor.to(self.device, copy=True)


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of the forward pass in evaluation.

    "auto" is float32 on a CPU: without bfloat16 units, bfloat16 is 50 times slower there.
    """
    if precision != "auto":
        dtype: torch.dtype = getattr(torch, precision)
        return dtype
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if fast else torch.float32


def training_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of the forward pass in training; the weights keep theirs.

    "auto" also uses the bfloat16 units of a CPU: steps of small ViTs are 1.5 times as fast, of
    those with a stem 1.7 times. Evaluation stays in float32 there.
    """
    if precision == "auto" and device.type == "cpu" and has_bfloat16_units():
        return torch.bfloat16
    return compute_dtype(precision, device)


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def check_same_shape(name: str, mine: Tensor, theirs: Tensor) -> None:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        raise mismatch_error(
            f"{name} is {theirs.dtype} {tuple(theirs.shape)} "
            f"instead of {mine.dtype} {tuple(mine.shape)}"
        )


def mismatch_error(difference: str) -> UserError:
    return UserError(
        f"the checkpoint does not match the model: {difference}; "
        f"resume with the recipe it was saved with"
    )
