"""Ideas for the default recipe that a tournament judges: settings, or a patch of the code.

A patch changes the modules of the process that trains with it, so that an idea costs the package
nothing until it has won.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.data import augment
from vitrail.data.config import Augment
from vitrail.model import vit
from vitrail.model.attention import Attention
from vitrail.model.mlp import Mlp
from vitrail.run import train
from vitrail.training import loop, optim
from vitrail.training.learner import Learner

SMALL_SIDE, SMALL_UNTIL = 0.75, 0.5  # of the side, and of the steps
FIRST_MOMENTUM, MOMENTUM_STEPS = 0.85, 300  # Jordan et al., 2024
MIMETIC_QK, MIMETIC_VP = (0.7, 0.7), (0.4, 0.4)  # weight of the noise, and of the identity
NEURON_DECAY = 0.95  # of the moving average over the rows of an update
SMALL_BATCHES_UNTIL = 0.3  # of the steps, which have half of the images
HARD_FRACTION, HARD_FROM = 0.5, 0.6  # of the images of a batch, and of the steps
PATCH_STAGES = ((0.35, 0.25), (0.7, 0.5))  # of the steps, and of the patches that are kept


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


def iterate_less() -> None:
    """Three Newton-Schulz iterations instead of five (Jordan, 2024)."""
    optim.ITERATIONS = 3


def orthogonalize_in_float32() -> None:
    """Newton-Schulz iterations in float32 where the model trains in bfloat16."""
    optim.LARGE = sys.maxsize


def skip_whitening() -> None:
    """The first convolution starts at random."""
    train.whiten_stem = lambda recipe, learner, loader: None


def show_small_images_first() -> None:
    """Half of the steps see images at three quarters of their side (Tan and Le, 2021)."""
    patch_batches(shrink_first_batches)


def patch_initial_weights(change: Callable[[nn.Module], None]) -> None:
    """Changes every module of a model once it has its usual initial weights."""
    init = vit.init_weights

    @torch.no_grad()
    def init_changed(model: vit.ViT) -> None:
        init(model)
        for module in model.modules():
            change(module)

    vit.init_weights = init_changed


def zero_branch(module: nn.Module) -> None:
    """Attention and MLP add nothing at first (Zhang et al., 2019)."""
    if isinstance(module, Attention):
        nn.init.zeros_(module.proj.weight)
    elif isinstance(module, Mlp):
        nn.init.zeros_(module.fc2.weight)


def mimic_trained_attention(module: nn.Module) -> None:
    """Queries and keys start alike, values and projection as opposites (Trockman and Kolter, 2023).

    The product of two such matrices is decomposed, for each head: noise plus the identity.
    """
    if not isinstance(module, Attention):
        return
    q, k, v = module.qkv.weight.chunk(3)
    width, size = q.shape[1], q.shape[0] // module.heads
    for rows in torch.arange(width).split(size):
        noise, identity = MIMETIC_QK
        product = noise * torch.randn(width, width) / width**0.5 + identity * torch.eye(width)
        left, values, right = torch.linalg.svd(product)
        root = values[:size].sqrt()[:, None]
        q[rows], k[rows] = root * left.T[:size], root * right[:size]
    noise, identity = MIMETIC_VP
    product = noise * torch.randn(width, width) / width**0.5 - identity * torch.eye(width)
    left, values, right = torch.linalg.svd(product)
    v.copy_(values.sqrt()[:, None] * right)
    module.proj.weight.copy_(left * values.sqrt())


def start_as_identity(module: nn.Module) -> None:
    """Convolutions pass their first channels through (Jordan, 2024); the others stay random."""
    if isinstance(module, nn.Conv2d) and module.in_channels > 4:
        nn.init.dirac_(module.weight[: module.in_channels])


def normalise_neurons() -> None:
    """Rows of a Muon update are divided by their moving root mean square (Li et al., 2025)."""
    orthogonalize_all = optim.orthogonalize_all
    averages: dict[tuple[int, ...], Tensor] = {}

    def orthogonalize_normalised(updates: Any, count: int, *more: Any) -> list[list[Tensor]]:
        found = orthogonalize_all(updates, count, *more)
        for number, parts in enumerate(found):
            for part, x in enumerate(parts):
                key = count, len(updates), number, part
                square = x.square().mean(dim=1, keepdim=True)
                average = averages.setdefault(key, square).lerp(square, 1 - NEURON_DECAY)
                averages[key] = average
                scaled = x / (average.sqrt() + optim.EPSILON)
                parts[part] = scaled * (x.norm() / (scaled.norm() + optim.EPSILON))
        return found

    optim.orthogonalize_all = orthogonalize_normalised


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


def halve_first_batches(
    learner: Learner, batches: Iterable[loop.Batch], total: int
) -> Iterator[loop.Batch]:
    """Smaller batches, and so more steps, while the gradient is large (Smith et al., 2018)."""
    for number, (images, targets) in enumerate(batches):
        half = len(images) // 2 if number < SMALL_BATCHES_UNTIL * total else len(images)
        yield images[:half], targets[:half]


def skip_easy_images(
    learner: Learner, batches: Iterable[loop.Batch], total: int
) -> Iterator[loop.Batch]:
    """Late steps train on the images of each batch that have the largest loss (Jordan, 2024)."""
    for number, (images, targets) in enumerate(batches):
        if number >= HARD_FROM * total:
            learner.model.eval()
            with torch.no_grad(), learner.autocast():
                losses = F.cross_entropy(learner.model(images), targets, reduction="none")
            hard = losses.topk(round(HARD_FRACTION * len(losses))).indices
            images, targets = images[hard], targets[hard]
        yield images, targets


def drop_patches_in_stages() -> None:
    """A quarter of the patches, then half of them, then all."""

    def keep_more(step: int, total: int, patches: int, config: Any) -> int:
        kept = [part for until, part in PATCH_STAGES if step < until * total]
        return round(patches * kept[0]) if kept else patches

    loop.patches_to_keep = keep_more


IDEAS: dict[str, Idea] = {
    "default": Idea(),
    "smoothing": Idea(settings={"train": {"smoothing": 0.2}}),
    "shifts": Idea(settings={"data": {"augment": {"shift": 1 / 16}}}),
    "no-augmentation": Idea(settings={"data": {"augment": asdict(Augment())}}),
    "alternating-flips": Idea(patch=alternate_flips),
    "momentum-warm-up": Idea(patch=warm_up_momentum),
    "three-iterations": Idea(patch=iterate_less, cost=True),
    "float32-muon": Idea(patch=orthogonalize_in_float32, cost=True),
    "vectors-x2": Idea(patch=partial(scale_vector_rates, 2.0)),
    "vectors-x4": Idea(patch=partial(scale_vector_rates, 4.0)),
    "random-filters": Idea(patch=skip_whitening),
    "small-first": Idea(patch=show_small_images_first, cost=True),
    "small-batches-first": Idea(patch=partial(patch_batches, halve_first_batches), cost=True),
    "skip-easy": Idea(patch=partial(patch_batches, skip_easy_images), cost=True),
    "patch-stages": Idea(patch=drop_patches_in_stages, cost=True),
    "float32": Idea(settings={"train": {"precision": "float32"}}, cost=True),
    "batch-64": Idea(settings={"train": {"batch": 64}}, cost=True),
    "batch-256": Idea(settings={"train": {"batch": 256}}, cost=True),
    "warm-up": Idea(settings={"train": {"warmup": 0.2}}),
    "less-weight-decay": Idea(settings={"train": {"weight_decay": 0.05}}),
    "more-weight-decay": Idea(settings={"train": {"weight_decay": 1.0}}),
    "zero-branches": Idea(patch=partial(patch_initial_weights, zero_branch)),
    "mimetic": Idea(patch=partial(patch_initial_weights, mimic_trained_attention)),
    "identity-convolutions": Idea(patch=partial(patch_initial_weights, start_as_identity)),
    "normuon": Idea(patch=normalise_neurons),
    "one-block": Idea(settings={"vit": {"depth": 1}}, cost=True),
    "three-blocks": Idea(settings={"vit": {"depth": 3}}, cost=True),
    "wide-mlp": Idea(settings={"vit": {"mlp_ratio": 4.0}}, cost=True),
    "two-heads": Idea(settings={"vit": {"heads": 2}}, cost=True),
    "width-96": Idea(settings={"vit": {"width": 96, "heads": 3}}, cost=True),
    "patch-4": Idea(settings={"vit": {"patch": 4}}, cost=True),
    "qk-norm": Idea(settings={"vit": {"qk_norm": True}}, cost=True),
    "lr-half": Idea(settings={"train": {"lr": 5e-3}}),
    "lr-double": Idea(settings={"train": {"lr": 2e-2}}),
}
