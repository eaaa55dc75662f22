"""All that a training changes, in one object: weights, optimizer, averaged weights, loss scale."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from vitrail.errors import UserError
from vitrail.training import optim
from vitrail.training.config import TrainConfig


class Learner:
    """A model in training; `layer`, `undecayed`, `matrices` describe it to `optim.build`."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        *,
        layer: Callable[[str], int] | None = None,
        undecayed: Collection[str] = (),
        matrices: Mapping[str, int] | None = None,
    ):
        self.model = model
        self.device = next(model.parameters()).device
        self.dtype = computed_in(config.precision, self.device)
        self.optimizer = optim.build(model, config, layer, undecayed, matrices)
        self.average = optim.Average(model, config.ema) if config.ema else None
        self.scaler = GradScaler(self.device.type, enabled=self.dtype == torch.float16)

    @property
    def result(self) -> nn.Module:
        """The model to evaluate and to keep: that with averaged weights, where there is one."""
        return self.model if self.average is None else self.average.model

    def autocast(self) -> torch.autocast:
        enabled = self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=enabled)

    def tensors(self) -> dict[str, Tensor]:
        """All of it by name, as it is now: these are the living tensors, not copies."""
        models = {"model": self.model}
        if self.average is not None:
            models["average"] = self.average.model
        found = {
            f"{kind}/{name}": tensor.detach()
            for kind, model in models.items()
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        }
        for name, scale in self.scaler.state_dict().items():  # empty unless in use
            found[f"scaler/{name}"] = torch.tensor(scale)
        for name, parameter in self.model.named_parameters():
            for moment, tensor in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer/{moment}/{name}"] = tensor
        return found

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts `tensors` back into a learner that was built like theirs."""
        mine, theirs = (
            {name: tensor for name, tensor in every.items() if not name.startswith("optimizer/")}
            for every in (self.tensors(), tensors)
        )
        if odd := mine.keys() ^ theirs.keys():
            raise UserError(f"the state does not fit the model: {min(odd)} is in one of them only")
        for name, tensor in mine.items():
            check_alike(name, tensor, theirs[name])
            tensor.copy_(theirs[name])
        self.scaler.load_state_dict(
            {name: tensor.item() for name, tensor in below("scaler/", theirs).items()}
        )
        self._restore_moments(below("optimizer/", tensors))

    def _restore_moments(self, tensors: Mapping[str, Tensor]) -> None:
        learning = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer.state.clear()
        for path, tensor in tensors.items():
            moment, _, name = path.partition("/")
            if name not in learning:
                raise UserError(f"the state does not fit the model: nothing learns as {name}")
            if tensor.ndim:  # all but AdamW's count of steps
                check_alike(path, learning[name], tensor)
            moved = tensor.to(self.device, copy=True)  # a fused optimizer counts on the device too
            self.optimizer.state[learning[name]][moment] = moved


def computed_in(precision: str, device: torch.device) -> torch.dtype:
    """The type a forward pass computes in; weights stay as they are.

    A CPU without units for bfloat16 computes 50 times slower in it, so there auto is float32.
    """
    if precision != "auto":
        dtype: torch.dtype = getattr(torch, precision)
        return dtype
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if fast else torch.float32


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def check_alike(name: str, mine: Tensor, theirs: Tensor) -> None:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        raise UserError(
            f"the state does not fit the model: {name} is {theirs.dtype} {tuple(theirs.shape)} "
            f"instead of {mine.dtype} {tuple(mine.shape)}"
        )
