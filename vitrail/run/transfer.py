"""What frozen features give a fine-tuning: the head's start, cached blocks, and what to expect."""

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.data.loader import Batch, Loader
from vitrail.display.progress import progress_bar
from vitrail.display.text import format_accuracy
from vitrail.errors import UserError
from vitrail.evaluation.metrics import wilson_interval
from vitrail.heads.logistic import LogisticFit, fit_logistic
from vitrail.model.vit import ViT
from vitrail.pretraining.objective import backbone_of
from vitrail.run.recipe import Recipe
from vitrail.run.terminal import Terminal
from vitrail.training.learner import Learner

BATCH = 16  # images of one forward pass: activations of more leave the processor's cache
USUAL_GAIN = "fine-tuning usually adds 1 to 5 points"
SMALL_GAIN = "fine-tuning can add little"
NEARLY_ALL = 0.97  # accuracy of frozen features that leaves little to add


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """The accuracy to expect, known before the first step."""

    method: str
    accuracy: float
    interval: tuple[float, float]
    images: int

    def __str__(self) -> str:
        reached = format_accuracy(self.accuracy, self.interval)
        return f"{self.method} {reached}, by cross-validation on {self.images:,} training images"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "interval": list(self.interval)}


class UpperPart(nn.Module):
    """The blocks from `start` on and the head: logits from the tokens before them.

    If no block is left, its input is what the head reads.
    """

    def __init__(self, model: ViT, start: int):
        super().__init__()
        self.model, self.start = model, start

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()  # of the half precision of the cache
        if self.start < len(self.model.blocks):
            for block in self.model.blocks[self.start :]:
                x = block(x, None)
            logits: Tensor = self.model.classify(x)
        elif self.model.head_dist is None:
            logits = self.model.head(self.model.pre_logits(x))
        else:
            logits = (self.model.head(x[:, 0]) + self.model.head_dist(x[:, 1])) / 2
        return logits


def start_from_features(
    recipe: Recipe, learner: Learner, loader: Loader, *, fresh: bool = True
) -> Expectation | None:
    """Caches what frozen blocks compute; fits the head of a fresh learner to frozen features.

    Both are functions of the weights and the images, so that a resumed run computes them again.
    """
    config, model = recipe.train, backbone_of(learner.model)
    images = at_training_size(loader)
    if config.frozen:
        if recipe.vit.positions == "rotary" and config.frozen < recipe.vit.depth:
            raise UserError("blocks with rotary positions cannot be cached; set `train.frozen=0`")
        mirrored = recipe.data.augment.flip > 0
        loader.inputs = cache_tokens(model, images, config.frozen, mirrored)
        learner.module = UpperPart(model, config.frozen)
    if not (config.probe and fresh):
        return None
    if config.frozen == len(model.blocks) and loader.inputs is not None:
        x = loader.inputs[0].float().cpu()
        features = list(x.unbind(1)) if x.ndim == 3 else [x]
        labels = torch.from_numpy(loader.source.labels[images.rank_items("train")])
    else:
        features, labels = head_inputs(model, images, config.probe)
    counts = torch.bincount(labels, minlength=recipe.vit.classes)
    weights = len(labels) / (len(counts) * counts.clamp(min=1)) if config.class_weights else None
    fits = [fit_logistic(x, labels, recipe.vit.classes, weights) for x in features]
    for target in (model, backbone_of(learner.eval_model)):
        set_heads(target, fits)
    return Expectation(
        method="frozen features reached",
        accuracy=fits[0].accuracy,
        interval=wilson_interval(fits[0].accuracy, fits[0].images),
        images=fits[0].images,
    )


def expect_accuracy(
    recipe: Recipe, learner: Learner, loader: Loader, terminal: Terminal
) -> dict[str, Any] | None:
    """Prepares a fresh learner; says and returns what accuracy its frozen features reach."""
    if recipe.pretrain is not None:
        return None
    expected = start_from_features(recipe, learner, loader)
    if expected is None:
        return None
    published = recipe.train.optimizer == "adamw"  # after a pretraining on the same images, muon
    gain = USUAL_GAIN if expected.accuracy < NEARLY_ALL else SMALL_GAIN
    shown = f"; {gain}" if published and recipe.tune != "head" else ""
    terminal.print(f"expect: {expected}{shown}")
    return expected.to_dict()


def at_training_size(loader: Loader) -> Loader:
    """The same images for one process, preprocessed as for evaluation, at the training size."""
    single = copy.copy(loader.as_single_process())
    if single.train_preprocess != single.preprocess:
        single.preprocess = single.train_preprocess
        single._caches = {}
    return single


def cache_tokens(model: ViT, loader: Loader, frozen: int, mirrored: bool) -> Tensor:
    """The tokens before block `frozen`, or what the head reads, of each image.

    (views, images, ...): the second view, if `mirrored` asks for it, is the mirror image.

    Half precision: twice as many images fit, and the rounding error is far below the noise of
    training.
    """
    batches = []
    for batch in read_training_images(loader, "caching frozen blocks", None):
        views = [batch.images, batch.images.flip(-1)] if mirrored else [batch.images]
        batches.append(torch.stack([lower_part(model, x, frozen).half() for x in views]))
    return torch.cat(batches, dim=1)


def head_inputs(model: ViT, loader: Loader, limit: int) -> tuple[list[Tensor], Tensor]:
    """What each head of the model reads of up to `limit` training images, and their labels."""
    rows, labels = [], []
    for batch in read_training_images(loader, "computing features", limit):
        rows.append(lower_part(model, batch.images, len(model.blocks)).float().cpu())
        labels.append(batch.labels.cpu())
    x = torch.cat(rows)
    return list(x.unbind(1)) if x.ndim == 3 else [x], torch.cat(labels)


def read_training_images(loader: Loader, label: str, limit: int | None) -> Iterator[Batch]:
    count = len(loader.rank_items("train", limit))
    with progress_bar(label, count, show=loader.progress) as advance:
        for batch in loader.evaluation("train", BATCH, limit):
            yield batch
            advance(len(batch.labels))


@torch.no_grad()
def lower_part(model: ViT, images: Tensor, end: int) -> Tensor:
    """The tokens before block `end`; after the last one, what the head reads."""
    model.eval()
    x, rope = model.embed(images)
    for block in model.blocks[:end]:
        x = block(x, rope)
    if end < len(model.blocks):
        return x
    return model.pool(x) if model.head_dist is None else model.norm(x[:, :2])


@torch.no_grad()
def set_heads(model: ViT, fits: list[LogisticFit]) -> None:
    for head, fit in zip((model.head, model.head_dist), fits, strict=False):
        assert isinstance(head, nn.Linear)
        head.weight.copy_(fit.weight)
        head.bias.copy_(fit.bias)
