"""Logits of a whole data set, from any module and any batches."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitrail.errors import UserError


def logits(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    precision: torch.dtype = torch.float32,
    progress: Callable[[int], None] = lambda images: None,
) -> tuple[Tensor, Tensor]:
    """What the model says of every image, and every label, in the order of the batches.

    Both come to the CPU. `progress` is told the size of each batch.
    """
    device = next(model.parameters()).device
    autocast = torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32)
    outputs: list[Tensor] = []
    labels: list[Tensor] = []
    with evaluating(model), torch.inference_mode(), autocast:
        for images, truth in batches:
            output: Tensor = model(images.to(device, non_blocking=True))
            outputs.append(output.to(torch.promote_types(output.dtype, torch.float32)).cpu())
            labels.append(truth.cpu())
            progress(len(images))
    if not outputs:
        raise UserError("there are no images to evaluate; give at least one")
    together = torch.cat(outputs)
    if bad := int((~together.isfinite()).any(dim=1).sum()):
        raise UserError(
            f"the model answers {bad} of {len(together)} images with NaN or infinity; "
            "its weights are damaged, or it diverged in training"
        )
    return together, torch.cat(labels)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Turns dropout and the like off, and afterwards every module back to what it was."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
