"""Trains one peer's model with its recipe for a given time, in its own process.

Vitrail's loader delivers the same images from memory, with the same split and normalisation. The
schedule follows a clock that stops during evaluation; the best weights on the validation split are
restored for the test. The ConvNet trains in bfloat16 where our models do, and is evaluated in
float32.
"""

import copy
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bench.peers import PEERS
from bench.process import report_errors
from bench.recipes import CONVNET, RECIPES, Recipe, learning_rate
from bench.report import describe_environment
from bench.resnet9 import ResNet9
from bench.tutorial import TutorialViT
from vitrail.data.config import DataConfig, Preprocess
from vitrail.data.loader import Batch, Loader
from vitrail.data.open import open_data
from vitrail.data.source import Source, Split
from vitrail.errors import UserError
from vitrail.evaluation.loop import eval_mode
from vitrail.files import write_file
from vitrail.model.config import ViTConfig
from vitrail.model.cost import count_parameters
from vitrail.run import auto
from vitrail.run.recipe import settings_from_dict
from vitrail.training.learner import training_dtype

MODELS: dict[str, Callable[[ViTConfig], nn.Module]] = {
    **PEERS,
    "tutorial": TutorialViT,
    CONVNET: ResNet9,
}
VIT = "Nano/4"  # the plain ViT that the ViT peers build
EVALUATIONS = 10  # on the validation split, at equal intervals of time
SIZE_TOLERANCE = 0.2  # largest relative difference between their and our number of parameters


@dataclass(frozen=True, kw_only=True)
class PeerJob:
    """The job of one process."""

    data: str
    peer: str
    minutes: float
    lr: float
    seed: int = 0


def train_peer_model(job: PeerJob) -> dict[str, Any]:
    """Returns the curve of validation accuracy over seconds of training, and the test accuracy."""
    return train_peer(job)[2]


def train_peer(job: PeerJob) -> tuple[nn.Module, Preprocess, dict[str, Any]]:
    """The trained model, the preprocessing of its images, and what `train_peer_model` returns."""
    torch.manual_seed(job.seed)
    source, recipe = open_data(job.data, progress=False), RECIPES[job.peer]
    ours, preprocess = choose_model(source)
    model = MODELS[job.peer](replace(ours, pool="cls", positions="learned"))
    count, our_count = sum(p.numel() for p in model.parameters()), count_parameters(ours)
    if job.peer != CONVNET and abs(count / our_count - 1) > SIZE_TOLERANCE:
        raise UserError(f"{job.peer} has {count:,} parameters, vitrail has {our_count:,}")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = recipe.dropout
    config = DataConfig(augment=recipe.augment)
    loader = Loader(source, preprocess, config, batch=recipe.batch, seed=job.seed, progress=False)
    loader.prepare("train", "val")
    trained = train_for_minutes(model, loader, recipe, job)
    result = {
        "contender": job.peer,
        "published": job.lr == recipe.lr,
        "lr": job.lr,
        "seed": job.seed,
        "minutes": job.minutes,
        "parameters": count,
        "batch": recipe.batch,
        "precision": str(choose_dtype(job.peer)).removeprefix("torch."),
        "origin": recipe.origin,
        **trained,
    }
    return model, loader.preprocess, result


def choose_model(source: Source) -> tuple[ViTConfig, Preprocess]:
    """A small plain ViT, and the preprocessing that `vitrail train` chooses for it."""
    summary = auto.summarise(source)
    model = "Pico/2" if summary.side <= 16 else VIT
    chosen = auto.choose_from_scratch(summary, model=model).settings
    vit = settings_from_dict(ViTConfig, chosen["vit"])
    return vit, Preprocess(size=vit.image, **chosen["preprocess"])


def choose_dtype(peer: str) -> torch.dtype:
    """Of the ConvNet as of our models: bfloat16 on a CPU with such units, 1.8 times as fast.

    The ViT peers train in float32: gradients of torch's attention are slow in bfloat16 on CPUs.
    """
    return training_dtype("auto", torch.device("cpu")) if peer == CONVNET else torch.float32


def train_for_minutes(
    model: nn.Module, loader: Loader, recipe: Recipe, job: PeerJob
) -> dict[str, Any]:
    """Trains until the minutes are over or the loss is not finite."""
    limit = 60 * job.minutes
    optimizer, batches = make_optimizer(model, recipe, job.lr), loader.training()
    dtype = choose_dtype(job.peer)
    best, curve = -1.0, []
    best_weights: dict[str, Any] = {}
    clock, step, next_evaluation, finite = 0.0, 0, 1, True
    while finite:
        done = min(1.0, clock / limit)
        if done >= next_evaluation / EVALUATIONS:
            next_evaluation = math.floor(done * EVALUATIONS) + 1
            accuracy = measure_accuracy(model, loader, "val")
            curve.append([clock, accuracy])
            if accuracy > best:
                best, best_weights = accuracy, copy.deepcopy(model.state_dict())
        if done >= 1:
            break
        start = time.perf_counter()
        lr = learning_rate(done, recipe, job.lr)
        finite = train_step(model, optimizer, batches, recipe, lr, dtype)
        clock += time.perf_counter() - start
        step += 1
    if best_weights:
        model.load_state_dict(best_weights)
    return {
        "steps": step,
        "seconds": clock,
        "diverged": not finite,
        "curve": curve,
        "val": best if best_weights else None,
        "test": measure_accuracy(model, loader, "test") if best_weights else None,
    }


def make_optimizer(model: nn.Module, recipe: Recipe, lr: float) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"lr": lr, "weight_decay": recipe.weight_decay, "fused": True}
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, **settings)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[recipe.optimizer]
    return kind(model.parameters(), **settings)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    recipe: Recipe,
    lr: float,
    dtype: torch.dtype,
) -> bool:
    """Returns whether the loss is finite; if it is not, the weights stay as they are."""
    batch = next(batches)
    for group in optimizer.param_groups:
        group["lr"] = lr
    model.train()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        output = model(batch.images)
    loss = F.cross_entropy(output.float(), batch.targets, label_smoothing=recipe.smoothing)
    if not loss.isfinite():
        return False
    loss.backward()
    if recipe.clip:
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    optimizer.step()
    return True


def measure_accuracy(model: nn.Module, loader: Loader, split: Split) -> float:
    """Accuracy by argmax; a model that diverged is at the level of guessing."""
    correct, count = 0, 0
    with eval_mode(model), torch.inference_mode():
        for batch in loader.evaluation(split, batch=128):
            correct += int((model(batch.images).argmax(dim=1) == batch.labels).sum())
            count += len(batch.labels)
    return correct / count


def main(job: str, out: str) -> None:
    """The process itself: takes a job as JSON, and writes the result to a file."""
    environment = describe_environment(torch.get_num_threads())
    result = train_peer_model(PeerJob(**json.loads(job)))
    write_file(Path(out), json.dumps({**result, **environment}, indent=1) + "\n")


if __name__ == "__main__":
    with report_errors():
        main(*sys.argv[1:])
