"""Ideas for the default recipe that a tournament judges: settings, or a patch of the code.

A patch changes the modules of the process that trains with it, so that an idea costs the package
nothing until it has won.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.data import augment
from vitrail.model.stem import Stem
from vitrail.training import loop, optim
from vitrail.training.learner import Learner

SMALL_SIDE, SMALL_UNTIL = 0.75, 0.5  # of the side, and of the steps
FIRST_MOMENTUM, MOMENTUM_STEPS = 0.85, 300  # Jordan et al., 2024
WHITENING_EPSILON = 5e-4  # Jordan, 2024


@dataclass(frozen=True, kw_only=True)
class Idea:
    settings: dict[str, Any] = field(default_factory=dict)  # nested, as in a recipe
    patch: Callable[[], None] | None = None
    cost: bool = (
        False  # changes the cost of a step, so that another number of steps is as much work
    )


def alternate_flips() -> None:
    """Every image is flipped in every second epoch instead of at random (Jordan, 2024)."""
    sample = augment.sample_uniforms

    def sample_alternating(seed: int, epoch: int, items: NDArray[np.int64]) -> augment.Uniforms:
        first = sample(seed, 0, items)["flip"]
        return {**sample(seed, epoch, items), "flip": 1 - first if epoch % 2 else first}

    augment.sample_uniforms = sample_alternating


def warm_up_momentum() -> None:
    """Muon's momentum rises in the first steps."""
    step, usual = optim.Muon.step, optim.MOMENTUM
    done = 0

    def warm_step(self: optim.Muon, closure: None = None) -> None:
        nonlocal done
        fraction = min(1.0, done / MOMENTUM_STEPS)
        optim.MOMENTUM = FIRST_MOMENTUM + fraction * (usual - FIRST_MOMENTUM)
        step(self)
        done += 1

    optim.Muon.step = warm_step  # type: ignore[method-assign]


def scale_vector_rates(factor: float) -> None:
    """Another learning rate for everything but the matrices: norms, biases and the rest."""
    group = optim.group_parameters

    def group_scaled(*arguments: Any) -> list[dict[str, Any]]:
        groups = group(*arguments)
        return [g if g["matrices"] else {**g, "scale": factor * g["scale"]} for g in groups]

    optim.group_parameters = group_scaled


def whiten_first_layer() -> None:
    """The first convolution starts with the whitening filters of its input (Page, 2018)."""
    patch_batches(whiten_by_first_batch)


def show_small_images_first() -> None:
    """Half of the steps see images at three quarters of their side (Tan and Le, 2021)."""
    patch_batches(shrink_first_batches)


def train_stem_in_bfloat16() -> None:
    """Rounds the convolutions of a stem in training, as under autocast; the blocks stay float32."""
    forward = Stem.forward

    def forward_rounded(self: Stem, x: Tensor) -> Tensor:
        if not self.training:
            return forward(self, x)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            rounded = forward(self, x)
        return rounded.to(x.dtype)

    Stem.forward = forward_rounded  # type: ignore[method-assign]


def patch_batches(
    change: Callable[[Learner, Iterable[loop.Batch], int], Iterator[loop.Batch]],
) -> None:
    """Trains on the changed batches; `change` takes the learner, its batches and all steps."""
    train = loop.train_steps

    def train_changed(
        learner: Learner, batches: Iterable[loop.Batch], config: Any, total: int, **more: Any
    ) -> Iterator[loop.Step]:
        return train(learner, change(learner, batches, total), config, total, **more)

    loop.train_steps = train_changed


def shrink_first_batches(
    learner: Learner, batches: Iterable[loop.Batch], total: int
) -> Iterator[loop.Batch]:
    for number, (images, targets) in enumerate(batches):
        if number < SMALL_UNTIL * total:
            side = round(SMALL_SIDE * images.shape[-1])
            images = F.interpolate(images, (side, side), mode="bilinear", antialias=True)
        yield images, targets


def whiten_by_first_batch(
    learner: Learner, batches: Iterable[loop.Batch], total: int
) -> Iterator[loop.Batch]:
    remaining = iter(batches)
    first = next(remaining)
    kernel = next(m.weight for m in learner.model.modules() if isinstance(m, nn.Conv2d))
    whiten(kernel, first[0])
    return chain([first], remaining)


@torch.no_grad()
def whiten(kernel: Tensor, images: Tensor) -> None:
    """Principal components of image patches, each over its deviation, and their negatives.

    The norm of the kernel does not change: a batch norm follows.
    """
    count, _, height, width = kernel.shape
    patches = F.unfold(images, (height, width)).transpose(0, 1).flatten(1)  # one per column
    values, vectors = torch.linalg.eigh(patches.cov())
    filters = (vectors / (values + WHITENING_EPSILON).sqrt()).T.flip(0)[: count // 2]
    filters = F.normalize(filters, dim=1)
    both = torch.cat([filters, -filters]).view(-1, *kernel.shape[1:])
    kernel[: len(both)] = both * (kernel[: len(both)].norm() / both.norm())


IDEAS: dict[str, Idea] = {
    "default": Idea(),
    "smoothing": Idea(settings={"train": {"smoothing": 0.2}}),
    "shifts": Idea(settings={"data": {"augment": {"shift": 1 / 16}}}),
    "alternating-flips": Idea(patch=alternate_flips),
    "momentum-warm-up": Idea(patch=warm_up_momentum),
    "vectors-x2": Idea(patch=partial(scale_vector_rates, 2.0)),
    "vectors-x4": Idea(patch=partial(scale_vector_rates, 4.0)),
    "whitening": Idea(patch=whiten_first_layer),
    "small-first": Idea(patch=show_small_images_first, cost=True),
    "bfloat16": Idea(settings={"train": {"precision": "bfloat16"}}, cost=True),
    "bfloat16-stem": Idea(patch=train_stem_in_bfloat16, cost=True),
    "batch-64": Idea(settings={"train": {"batch": 64}}, cost=True),
    "batch-256": Idea(settings={"train": {"batch": 256}}, cost=True),
    "qk-norm": Idea(settings={"vit": {"qk_norm": True}}, cost=True),
    "lr-half": Idea(settings={"train": {"lr": 5e-3}}),
    "lr-double": Idea(settings={"train": {"lr": 2e-2}}),
}
