"""The training loop, a generator of steps: its caller logs, saves and stops between them."""

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from vitrail.errors import UserError
from vitrail.training.config import TrainConfig
from vitrail.training.distributed import SINGLE, World, skip_gradient_sync
from vitrail.training.learner import Learner
from vitrail.training.schedule import learning_rate, patches_to_keep

Batch = tuple[Tensor, Tensor]  # images; class indices (B,) or class probabilities (B, K)

HIGH_FIRST_LOSS = 0.5  # above ln(classes): initial weights differ in their loss by far less
MAX_POSITIVE_WEIGHT = 20.0  # of the loss of positives in a multi-label training
LOW_FIRST_LOSS = 0.75  # times ln(classes): untrained weights do not get this low by chance


@dataclass(frozen=True, kw_only=True)
class Step:
    number: int  # steps done, this one included
    loss: float  # mean over the batch
    lr: float
    gradient_norm: float  # before clipping
    images: int  # over all ranks
    correct: int  # images whose top class is the label; with mixup, the stronger of the two labels


@dataclass(frozen=True, kw_only=True, eq=False)
class Totals:
    """Of one step, over all ranks."""

    loss: float
    norm: float  # of the gradient, before clipping
    correct: int
    norm_tensor: Tensor  # the same norm, unrounded and on the device

    @property
    def overflow(self) -> bool:
        """Whether the gradient is not finite; in float16 a smaller loss scale may prevent it."""
        return not math.isfinite(self.norm)


class Diverged(UserError):
    """The loss or gradient is not finite; the weights are those before the step."""


def train_steps(
    learner: Learner,
    batches: Iterable[Batch],
    config: TrainConfig,
    total: int,
    *,
    start: int = 0,
    patches: int = 0,
    class_weights: Tensor | None = None,
    multi_label: bool = False,
    world: World = SINGLE,
    stop: Sized = (),
) -> Iterator[Step]:
    """Trains from step `start` until `total` steps are done or the batches end.

    The RNG is seeded by seed, step and rank, so it is enough that `batches` starts with the batch
    of step `start`. Patch dropout needs `patches`, their number in an image; the model is then
    called with `keep`. With `multi_label`, the loss is the binary cross-entropy of each class and
    `class_weights` weight the positives; a criterion of the learner replaces either loss. Each
    rank of `world` gets its own part of every batch, of any size. All ranks end before the next
    step once `stop` is not empty on one of them.
    """
    if config.drop_patches and not patches:
        raise UserError("patch dropout needs `patches`, the number of patches; give it")
    model, optimizer = learner.model, learner.optimizer
    criterion = learner.criterion or (binary_cross_entropy if multi_label else cross_entropy)

    def objective(outputs: Tensor, targets: Tensor) -> Tensor:
        return criterion(outputs, targets, config.smoothing, class_weights)

    count_right = learner.count_correct or (count_exact if multi_label else count_correct)
    for step, (images, targets) in zip(range(start, total), batches, strict=False):
        count, stopped = world.all_reduce(len(images), len(stop))
        if stopped:
            return
        if step == start:
            wrapped = world.wrap_model(learner.module, images.to(learner.device))
            forward = torch.compile(wrapped) if config.compile else wrapped
        seed_step(step_seed(config.seed, step, world.rank), learner.device)
        lr = learning_rate(step, total, config)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        kept = patches_to_keep(step, total, patches, config)
        predict = forward if kept == patches else partial(drop_patches, forward, patches, kept)

        model.train()
        learner.zero_grad()
        divisor = count / world.size  # DDP and FSDP average the gradients of all ranks
        with report_out_of_memory(len(images), config.accumulate), world.report_lost_peers():
            parts = split_batch(learner, images, targets, config.accumulate)
            sums = accumulate_gradients(
                learner, wrapped, predict, objective, parts, divisor, count_right
            )
        totals = reduce_gradients(learner, *sums, world)
        if not math.isfinite(totals.loss) or (totals.overflow and learner.scaler.get_scale() <= 1):
            bad_images = world.all_reduce(int((~images.isfinite()).sum()))[0] > 0
            raise Diverged(
                f"step {step + 1} has loss {totals.loss:g} and gradient norm {totals.norm:g} "
                f"and was not applied: {likely_cause(learner, bad_images, lr)}"
            )
        world.average_buffers(model)
        apply_gradients(learner, config, step, totals)
        yield Step(
            number=step + 1,
            loss=totals.loss,
            lr=lr,
            gradient_norm=totals.norm,
            images=int(count),
            correct=totals.correct,
        )


def step_seed(seed: int, step: int, rank: int) -> int:
    """The random seed of dropout, drop path and patch dropout in one step."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0])


def seed_step(seed: int, device: torch.device) -> None:
    """Like torch.manual_seed, without the millisecond it spends on devices that do not exist."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def drop_patches(forward: Callable[..., Tensor], patches: int, kept: int, images: Tensor) -> Tensor:
    """Logits computed from `kept` random patches of each image."""
    index = torch.rand(len(images), patches, device=images.device).argsort(dim=1)[:, :kept]
    return forward(images, keep=index)


def split_batch(learner: Learner, images: Tensor, targets: Tensor, accumulate: int) -> list[Batch]:
    """The micro-batches of a batch, on the learner's device."""
    non_blocking = learner.device.type == "cuda"
    pieces = [
        tensor.to(learner.device, non_blocking=non_blocking).tensor_split(
            min(accumulate, len(images))
        )
        for tensor in (images, targets)
    ]
    return list(zip(*pieces, strict=True))


def accumulate_gradients(
    learner: Learner,
    model: nn.Module,
    predict: Callable[[Tensor], Tensor],
    objective: Callable[[Tensor, Tensor], Tensor],
    parts: list[Batch],
    divisor: float,
    count_right: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Backpropagates all micro-batches; returns the mean loss and the number correct."""
    total, correct = torch.zeros((2,), device=learner.device)
    for number, (images, targets) in enumerate(parts, 1):
        with nullcontext() if number == len(parts) else skip_gradient_sync(model):
            with learner.autocast():
                logits = predict(images)
            loss = objective(logits, targets) / divisor
            learner.scaler.scale(loss).backward()
        total = total + loss.detach()
        correct = correct + count_right(logits.detach(), targets)
    return total, correct


def reduce_gradients(learner: Learner, loss: Tensor, correct: Tensor, world: World) -> Totals:
    """Unscales the gradients, and sums loss and correct images over all ranks."""
    learner.collect_gradients()
    learner.scaler.unscale_(learner.optimizer)
    norm = get_total_norm([p.grad for p in learner.leaves.values() if p.grad is not None])
    numbers = torch.stack([loss.float(), norm.float(), correct.float()]).tolist()  # one transfer
    sums = world.all_reduce(numbers[0] / world.size, numbers[2], numbers[1] ** 2)
    if learner.sharded:  # each rank has the norm of its rows
        norm = norm.new_tensor(math.sqrt(sums[2]))
        numbers[1] = norm.item()
    return Totals(loss=sums[0], norm=numbers[1], correct=int(sums[1]), norm_tensor=norm)


def apply_gradients(learner: Learner, config: TrainConfig, step: int, totals: Totals) -> None:
    """Clips the gradients and updates the weights; skips the update if float16 overflowed."""
    if not totals.overflow:
        if config.clip and totals.norm > config.clip:
            clip_grads_with_norm_(list(learner.leaves.values()), config.clip, totals.norm_tensor)
        learner.optimizer.step()
        if learner.ema is not None:
            learner.ema.update(step)
    learner.scaler.update()


def count_correct(logits: Tensor, targets: Tensor) -> Tensor:
    """Images whose top class is the label; with mixup, the stronger of the two labels."""
    labels = targets if targets.ndim == 1 else targets.argmax(dim=1)
    return (logits.argmax(dim=1) == labels).sum()


def count_exact(logits: Tensor, targets: Tensor) -> Tensor:
    """Images all of whose labels are predicted, at probability 0.5; with mixup, rounded targets."""
    return ((logits > 0) == (targets > 0.5)).all(dim=1).sum()


def binary_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float, class_weights: Tensor | None
) -> Tensor:
    """The mean over the classes, summed over the images; `class_weights` weight the positives."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    weight = None if class_weights is None else class_weights.to(logits)
    targets = targets * (1 - smoothing) + smoothing / 2
    losses = F.binary_cross_entropy_with_logits(
        logits, targets, pos_weight=weight, reduction="none"
    )
    return losses.mean(dim=1).sum()


def cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float, class_weights: Tensor | None
) -> Tensor:
    """Summed over the images, so that micro-batches add up to the whole batch."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    weight = None if class_weights is None else class_weights.to(logits)
    return F.cross_entropy(
        logits, targets, weight=weight, reduction="sum", label_smoothing=smoothing
    )


def balanced_class_weights(counts: Tensor) -> Tensor:
    """Inverse class frequencies, scaled so that the mean weight of an image is 1."""
    return counts.sum() / (len(counts) * counts.clamp(min=1))


def positive_weights(counts: Tensor, images: int) -> Tensor:
    """Negatives over positives of each class, from 1 to 20: rare positives count more."""
    return ((images - counts) / counts.clamp(min=1)).clamp(1, MAX_POSITIVE_WEIGHT)


@contextmanager
def report_out_of_memory(images: int, accumulate: int) -> Iterator[None]:
    """Turns torch's error into one line that says which setting needs less memory."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise UserError(
            f"out of memory with micro-batches of {math.ceil(images / accumulate)} images; "
            f"raise train.accumulate to {2 * accumulate}, or lower train.batch"
        ) from error


def likely_cause(learner: Learner, bad_images: bool, lr: float) -> str:
    """Why a loss or gradient is not finite, and what to do."""
    if bad_images:
        return "its images contain NaN or infinity; repair the data"
    if not learner.is_finite():
        return "the weights already contained NaN or infinity; start from other weights"
    if learner.dtype == torch.float16:
        return "float16 overflowed; set train.precision to bfloat16 or float32"
    return (
        f"the learning rate, {lr:.2g}, is probably too high; lower train.lr, or raise train.warmup"
    )


def first_loss_hint(loss: float, classes: int) -> str | None:
    """What a first loss far from ln(classes), the loss of uniform probabilities, may mean."""
    uniform = math.log(classes)
    found = (
        f"the first loss is {loss:.2f}; uniform probabilities over {classes} classes "
        f"give {uniform:.2f}: "
    )
    if loss > uniform + HIGH_FIRST_LOSS:
        return found + "the initial weights are confident and wrong; do they fit this data?"
    if loss < LOW_FIRST_LOSS * uniform:
        return found + "the model already knows the labels, or few of the classes occur"
    return None
