"""Logits of a whole data set, from any module and any batches."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitrail.errors import UserError


def compute_logits(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    precision: torch.dtype = torch.float32,
    progress: Callable[[int], None] = lambda images: None,
) -> tuple[Tensor, Tensor]:
    """Logits (N, K) and labels (N) of all batches, in their order, on the CPU.

    Calls `progress` with the size of each batch. Logits have at least float32 precision.
    """
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    autocast = torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32)
    outputs: list[Tensor] = []
    labels: list[Tensor] = []
    with eval_mode(model), torch.inference_mode(), autocast:
        for images, targets in batches:
            output: Tensor = model(images.to(device, non_blocking=device.type == "cuda"))
            outputs.append(output.to(torch.promote_types(output.dtype, torch.float32)).cpu())
            labels.append(targets.cpu())
            progress(len(images))
    if not outputs:
        raise UserError("got no images to evaluate; give at least one")
    logits = torch.cat(outputs)
    if bad := int((~logits.isfinite()).any(dim=1).sum()):
        raise UserError(
            f"the logits of {bad} of {len(logits)} images are NaN or infinite; the weights are "
            f"damaged, or training diverged: use other weights"
        )
    return logits, torch.cat(labels)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts a module into evaluation mode, and restores the mode of every submodule afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
