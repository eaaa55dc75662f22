"""One peer's model taught with its recipe against the clock, in a process of its own.

It is fed by our loader from the same images in memory, with the same split and normalisation. The
schedule follows the clock, which stands still while validation images are looked at; the weights
of the best look are kept.
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
from bench.recipes import RECIPES, Recipe, rate
from bench.report import origin
from bench.seed import SeedViT
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

MODELS: dict[str, Callable[[ViTConfig], nn.Module]] = {**PEERS, "seeds": SeedViT}
LOOKS = 5  # at the validation images, at equal distances of time
ALIKE = 0.2  # how far the number of parameters may lie from ours


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What one process is to do."""

    data: str
    peer: str
    minutes: float
    lr: float
    seed: int = 0


def teach(lesson: Lesson) -> dict[str, Any]:
    """The curve of validation accuracy over seconds of training, and one test at the end."""
    torch.manual_seed(lesson.seed)
    source, recipe = open_data(lesson.data, progress=False), RECIPES[lesson.peer]
    ours, view = our_choice(source, lesson.minutes)
    model = MODELS[lesson.peer](replace(ours, pool="cls", positions="learned"))
    count = sum(parameter.numel() for parameter in model.parameters())
    if abs(count / count_parameters(ours) - 1) > ALIKE:
        raise UserError(f"{lesson.peer} has {count:,} parameters, we have {count_parameters(ours):,}")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = recipe.dropout
    config = DataConfig(augment=recipe.augment)
    loader = Loader(source, view, config, batch=recipe.batch, seed=lesson.seed, progress=False)
    loader.prepare("train", "val")
    found = learn(model, loader, recipe, lesson)
    return {
        "who": lesson.peer,
        "published": lesson.lr == recipe.lr,
        "lr": lesson.lr,
        "seed": lesson.seed,
        "minutes": lesson.minutes,
        "parameters": count,
        "batch": recipe.batch,
        "origin": recipe.origin,
        **found,
    }


def our_choice(source: Source, minutes: float) -> tuple[ViTConfig, Preprocess]:
    """The model that `vitrail train --minutes` takes, and how it sees images."""
    chosen = auto.choose_from_scratch(auto.summarise(source), minutes=minutes).settings
    vit = settings_from_dict(ViTConfig, chosen["vit"])
    return vit, Preprocess(size=vit.image, **chosen["preprocess"])


def learn(model: nn.Module, loader: Loader, recipe: Recipe, lesson: Lesson) -> dict[str, Any]:
    limit = 60 * lesson.minutes
    optimizer, batches = make_optimizer(model, recipe, lesson.lr), loader.training()
    best, curve = -1.0, []
    kept: dict[str, Any] = {}
    clock, step, due, finite = 0.0, 0, 1, True
    while finite:
        done = min(1.0, clock / limit)
        if done >= due / LOOKS:
            due = math.floor(done * LOOKS) + 1
            found = look(model, loader, "val")
            curve.append([clock, found])
            if found > best:
                best, kept = found, copy.deepcopy(model.state_dict())
        if done >= 1:
            break
        start = time.perf_counter()
        finite = take_step(model, optimizer, batches, recipe, rate(done, recipe, lesson.lr))
        clock += time.perf_counter() - start
        step += 1
    if kept:
        model.load_state_dict(kept)
    return {
        "steps": step,
        "seconds": clock,
        "diverged": not finite,
        "curve": curve,
        "val": best if kept else None,
        "test": look(model, loader, "test") if kept else None,
    }


def make_optimizer(model: nn.Module, recipe: Recipe, lr: float) -> torch.optim.Optimizer:
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[recipe.optimizer]
    return kind(model.parameters(), lr=lr, weight_decay=recipe.weight_decay, fused=True)


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    recipe: Recipe,
    lr: float,
) -> bool:
    """Whether the loss was finite; if it was not, no step is taken."""
    batch = next(batches)
    for group in optimizer.param_groups:
        group["lr"] = lr
    model.train()
    optimizer.zero_grad()
    output = model(batch.images)
    loss = F.cross_entropy(output, batch.targets, label_smoothing=recipe.smoothing)
    if not loss.isfinite():
        return False
    loss.backward()
    if recipe.clip:
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    optimizer.step()
    return True


def look(model: nn.Module, loader: Loader, split: Split) -> float:
    """The share of right answers; those of a model that diverged are right by chance."""
    right, count = 0, 0
    with eval_mode(model), torch.inference_mode():
        for batch in loader.evaluation(split, batch=128):
            right += int((model(batch.images).argmax(dim=1) == batch.labels).sum())
            count += len(batch.labels)
    return right / count


def main(lesson: str, out: str) -> None:
    """The process itself: a lesson as JSON, and the file for what came of it."""
    about = origin()
    found = teach(Lesson(**json.loads(lesson)))
    write_file(Path(out), json.dumps({**found, **about}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
