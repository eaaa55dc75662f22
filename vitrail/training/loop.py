"""The training loop, as a generator of steps: logging, saving and stopping are its driver's."""

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
from vitrail.training.distributed import ALONE, Together, unsynced
from vitrail.training.learner import Learner
from vitrail.training.schedule import kept_patches, learning_rate

Batch = tuple[Tensor, Tensor]  # images; labels (B), or how much of each class (B, K)


@dataclass(frozen=True, kw_only=True)
class Step:
    number: int  # steps done, this one included
    loss: float  # mean over the batch
    lr: float
    gradient: float  # its length, before clipping
    images: int  # of all processes
    right: int  # images whose class came out highest; of mixed ones, the stronger of the two


class Diverged(UserError):
    """A loss or gradient was not finite; the weights are still those before the step."""


def train(
    learner: Learner,
    batches: Iterable[Batch],
    config: TrainConfig,
    total: int,
    *,
    start: int = 0,
    patches: int = 0,
    class_weights: Tensor | None = None,
    together: Together = ALONE,
    heard: Sized = (),
) -> Iterator[Step]:
    """Trains from step `start` on, until `total` steps are done or the batches end.

    Chance is a function of seed, step and rank (which tells apart the processes that share a
    training), so `batches` need only begin with that of step `start`. Given `patches`, their
    number in an image, the model is called with `keep` while `config` leaves some out.
    Processes that train `together` each have their share of every batch, of whatever size; all
    of them end before the next step once one has `heard` something.
    """
    if config.drop_patches and not patches:
        raise UserError("drop_patches needs to know how many there are; give patches, or set it 0")
    model, optimizer, scaler = learner.model, learner.optimizer, learner.scaler
    parameters = list(model.parameters())
    objective = partial(cross_entropy, smoothing=config.smoothing, class_weights=class_weights)
    for step, (images, targets) in zip(range(start, total), batches, strict=False):
        count, stop = together.sum(len(images), len(heard))
        if stop:
            return
        if step == start:
            shared = together.spread(model, images.to(learner.device))
            forward = torch.compile(shared) if config.compile else shared
        reseed(step_seed(config.seed, step, together.rank), learner.device)
        lr = learning_rate(step, total, config)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        kept = kept_patches(step, total, patches, config)
        look = forward if kept == patches else partial(look_at_some, forward, patches, kept)

        model.train()
        optimizer.zero_grad()
        share = count / together.world  # DDP takes the mean of all gradients
        with memory_told(len(images), config.accumulate), together.answered():
            parts = cut(learner, images, targets, config.accumulate)
            loss, hits = backward(learner, shared, look, objective, parts, share)
        scaler.unscale_(optimizer)
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        number, gradient, right = torch.stack([loss.float(), norm.float(), hits.float()]).tolist()
        number, right = together.sum(number / together.world, right)
        overflow = not math.isfinite(gradient)  # in float16, a smaller scale may still mend it
        if not math.isfinite(number) or (overflow and scaler.get_scale() <= 1):
            raise Diverged(
                f"step {step + 1} has loss {number:g} and gradient {gradient:g} and was not taken: "
                + likely_cause(learner, together.sum(int((~images.isfinite()).sum()))[0] > 0, lr)
            )
        if not overflow:
            if config.clip and gradient > config.clip:
                clip_grads_with_norm_(parameters, config.clip, norm)
            optimizer.step()
            if learner.average is not None:
                learner.average.update(step)
        scaler.update()
        yield Step(
            number=step + 1,
            loss=number,
            lr=lr,
            gradient=gradient,
            images=int(count),
            right=int(right),
        )


def step_seed(seed: int, step: int, rank: int) -> int:
    """What dropout, drop path and patch dropping are drawn from in one step."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0])


def reseed(seed: int, device: torch.device) -> None:
    """Does what torch.manual_seed does, without its millisecond for devices that are not there."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def look_at_some(forward: Callable[..., Tensor], patches: int, kept: int, images: Tensor) -> Tensor:
    """Logits from `kept` random patches of each image."""
    index = torch.rand(len(images), patches, device=images.device).argsort(dim=1)[:, :kept]
    return forward(images, keep=index)


def cut(learner: Learner, images: Tensor, targets: Tensor, accumulate: int) -> list[Batch]:
    """The parts a batch is computed in."""
    pieces = [
        tensor.to(learner.device, non_blocking=True).tensor_split(min(accumulate, len(images)))
        for tensor in (images, targets)
    ]
    return list(zip(*pieces, strict=True))


def backward(
    learner: Learner,
    model: nn.Module,
    look: Callable[[Tensor], Tensor],
    objective: Callable[[Tensor, Tensor], Tensor],
    parts: list[Batch],
    count: float,
) -> tuple[Tensor, Tensor]:
    """Adds up the gradients of all parts of a batch; the mean loss, and how many were right."""
    total, right = torch.zeros((2,), device=learner.device)
    for number, (some, wanted) in enumerate(parts, 1):
        with nullcontext() if number == len(parts) else unsynced(model):
            with learner.autocast():
                logits = look(some)
            loss = objective(logits, wanted) / count
            learner.scaler.scale(loss).backward()
        total = total + loss.detach()
        right = right + right_answers(logits.detach(), wanted)
    return total, right


def right_answers(logits: Tensor, targets: Tensor) -> Tensor:
    """How many images have their class on top; of a mixed one the stronger class counts."""
    truth = targets if targets.ndim == 1 else targets.argmax(dim=1)
    return (logits.argmax(dim=1) == truth).sum()


def cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float, class_weights: Tensor | None
) -> Tensor:
    """Its sum over the images, so that parts of a batch add up to the whole."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    weight = None if class_weights is None else class_weights.to(logits)
    return F.cross_entropy(
        logits, targets, weight=weight, reduction="sum", label_smoothing=smoothing
    )


def balance(counts: Tensor) -> Tensor:
    """Class weights under which all classes count alike, and an image counts 1 on average."""
    return counts.sum() / (len(counts) * counts.clamp(min=1))


@contextmanager
def memory_told(images: int, accumulate: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise UserError(
            f"no memory for {math.ceil(images / accumulate)} images at once; "
            f"raise accumulate to {2 * accumulate}, or lower batch"
        ) from error


def likely_cause(learner: Learner, broken: bool, lr: float) -> str:
    """Why a loss or gradient is not finite, and what to do."""
    if broken:
        return "images of its batch hold NaN or infinity; mend the data"
    if not all(p.isfinite().all() for p in learner.model.parameters()):
        return "the weights held NaN or infinity before it; start from other weights"
    if learner.dtype == torch.float16:
        return "float16 overflowed; set precision to bfloat16 or float32"
    return f"the learning rate, {lr:.2g}, is likely too high; lower lr, or lengthen warmup"


def first_loss_hint(loss: float, classes: int) -> str | None:
    """What a first loss far from ln(classes), that of a model that knows nothing, may mean."""
    blind = math.log(classes)
    told = f"the first loss is {loss:.2f}, that of guessing among {classes} classes {blind:.2f}: "
    if loss > blind + 0.5:
        return told + "the first weights are confident and wrong; were they made for other data?"
    if loss < 0.75 * blind:
        return told + "the model knows the labels already, or few of the classes occur"
    return None
