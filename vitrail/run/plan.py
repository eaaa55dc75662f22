"""Plans the number of steps: times a few of them, so that the run ends on time."""

import copy
import math
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from vitrail.data.loader import Loader
from vitrail.data.source import SPLITS, split_indices
from vitrail.display.text import format_duration
from vitrail.errors import UserError
from vitrail.evaluation.loop import compute_logits
from vitrail.inference.calibrate import count_reference_images
from vitrail.pretraining.objective import PatchFeatures, backbone_of
from vitrail.run import auto
from vitrail.run.fractions import MEASURED, TRAININGS, step_cost_ratio
from vitrail.run.quality import PROBE_IMAGES, PROBE_PASSES, can_probe
from vitrail.run.recipe import Recipe
from vitrail.run.terminal import Terminal
from vitrail.training import loop
from vitrail.training.config import TrainConfig
from vitrail.training.distributed import SINGLE, World, is_sharded
from vitrail.training.learner import Learner
from vitrail.training.sharding import ShardedForward

EVALUATION_SHARE = 0.02  # of the training time, at most, for evaluations on the validation split
TRIAL = 3.0  # seconds for which each kind of step is timed, if no minutes are given
TRIAL_SHARE, MAX_TRIAL = 0.05, 60.0  # of the given minutes, and seconds at most, for all timing
RESULTS_SECONDS = 1.0  # to write the results
SLOWDOWN = 1.02  # of later steps against timed ones: logging, checkpoints, other programs
OUTLIERS = 0.1  # fraction of the timed steps, the slowest ones, that is ignored
WARMUP_STEPS = 2  # not timed: they allocate memory
MIN_TIMED_STEPS = 3
FORWARDS_PER_STEP = 3  # a training step costs about three forward passes


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    step: float  # seconds per training step, on average over the run
    image: float  # seconds to evaluate one image
    features: float = 0.0  # seconds for the features of an image, without labels to learn from


def plan_steps(
    recipe: Recipe,
    loader: Loader,
    learner: Learner,
    minutes: float | None,
    started: float,
    terminal: Terminal,
    world: World = SINGLE,
) -> Recipe:
    """The recipe with its number of steps, and how often to evaluate.

    All ranks time their steps together, then the leader decides.
    """
    timing = StepTiming(step=0.0, image=0.0)
    if (
        minutes is not None or not terminal.quiet or world.size > 1
    ):  # else nobody reads the estimate
        seconds = trial_seconds(recipe.train, minutes)
        timing = measure_timing(recipe, loader, learner, seconds, world)
    compared = count_reference_images(recipe.vit) if recipe.pretrain is None else 0
    decided = world.on_leader(
        lambda: decide_length(recipe, loader, timing, minutes, started, terminal, compared)
    )
    return replace(recipe, train=replace(recipe.train, **decided))


def decide_length(
    recipe: Recipe,
    loader: Loader,
    timing: StepTiming,
    minutes: float | None,
    started: float,
    terminal: Terminal,
    compared: int = 0,
) -> dict[str, Any]:
    """The settings `steps`, `epochs` and `evaluate_every`; prints how long the run will take.

    `compared` is the number of training images whose features are computed at the end.
    """
    config = recipe.train
    counts = {split: len(split_indices(loader.source, split)) for split in SPLITS}
    if recipe.pretrain is not None:
        counts["test"] = 0  # is never read
    # computed from counts, not from timing, so that the same command gives the same run
    cost = counts["val"] / (FORWARDS_PER_STEP * counts["train"])
    every = config.evaluate_every or max(1, math.ceil(cost / EVALUATION_SHARE))
    image = timing.image + timing.features
    step = timing.step + image * counts["val"] / (every * loader.steps)
    final = image * (counts["val"] + counts["test"]) + RESULTS_SECONDS
    final += timing.image * min(compared, counts["train"])
    if recipe.pretrain is not None and can_probe(loader):
        measured = min(PROBE_IMAGES, counts["train"]) + min(PROBE_IMAGES, counts["val"])
        measured = PROBE_PASSES * measured + TRAININGS * min(MEASURED, counts["val"])
        final += timing.features * measured
        labelled = FORWARDS_PER_STEP * timing.features * config.batch  # seconds of a step
        step += recipe.pretrain.comparison * step_cost_ratio(recipe) * labelled
    if minutes is not None:
        left = 60 * minutes - (time.monotonic() - started) - final
        steps = math.floor(left / step / SLOWDOWN)
        if recipe.tune == "head":  # an epoch on cached features takes milliseconds
            steps = min(max(steps, loader.steps), config.epochs * loader.steps)
        if steps < 1:
            least = math.ceil(10 * (60 * minutes - left + 10 * step) / 60) / 10
            raise UserError(
                f"{minutes:g} minutes are too short for one step; try `minutes={least:g}`"
            )
    else:
        steps = config.steps or config.epochs * loader.steps
    epochs = math.ceil(steps / loader.steps) if minutes or config.steps else config.epochs
    seconds = steps * step + final
    terminal.print(f"{steps:,} steps of {config.batch} images, about {format_duration(seconds)}")
    if minutes is None and seconds > auto.LONG_RUN:
        terminal.print("for a shorter run, stop this one and set `minutes`, for example to 60")
    return {"steps": steps, "epochs": epochs, "evaluate_every": every}


def trial_seconds(config: TrainConfig, minutes: float | None) -> float:
    """How long to time each kind of step: longer for longer runs, which need a better estimate."""
    if minutes is None:
        return TRIAL
    return min(MAX_TRIAL, TRIAL_SHARE * 60 * minutes) / (2 if config.drop_patches else 1)


def measure_timing(
    recipe: Recipe, loader: Loader, learner: Learner, seconds: float, world: World
) -> StepTiming:
    """Times steps on a copy of the learner, so that the training itself has not started.

    A sharded one is not copied, but restored, as two of them may not fit.
    """
    config, patches = recipe.train, recipe.patches
    trial, saved = learner, None
    if learner.sharded:
        saved = {name: x.to("cpu", copy=True) for name, x in learner.tensors().items()}
    else:
        trial = copy.deepcopy(learner)
    complete = replace(config, drop_patches=0.0)
    batches = ((batch.images, batch.targets) for batch in loader.training())
    full = seconds_per_step(trial, batches, complete, patches, seconds, world)
    step = full
    if config.drop_patches:
        dropped = replace(config, drop_until=1.0)
        batches = ((batch.images, batch.targets) for batch in loader.training())
        short = seconds_per_step(trial, batches, dropped, patches, seconds, world)
        step = config.drop_until * short + (1 - config.drop_until) * full
    model = trial.eval_model
    image = seconds_per_image(model, trial.dtype, loader) / world.size
    features = 0.0
    if recipe.pretrain is not None:
        whole = PatchFeatures(backbone_of(model))
        features = seconds_per_image(whole, trial.dtype, loader)
    if saved is not None:
        learner.restore(saved)
    return StepTiming(step=step, image=image, features=features)


def seconds_per_step(
    learner: Learner,
    batches: Iterable[loop.Batch],
    config: TrainConfig,
    patches: int,
    seconds: float,
    world: World = SINGLE,
) -> float:
    stop: list[int] = []
    endless = 10**9
    steps = loop.train_steps(
        learner, batches, config, endless, patches=patches, world=world, stop=stop
    )
    for _ in islice(steps, WARMUP_STEPS):
        pass
    return mean_step_time(steps, seconds, stop)


def seconds_per_image(model: nn.Module, dtype: torch.dtype, loader: Loader) -> float:
    """From two batches of the training split, the only one that is never empty."""
    sharded = is_sharded(model)  # all ranks must compute as many batches; each has one
    batches = list(islice(loader.evaluation("train"), 1 if sharded else 2))
    model = ShardedForward(model) if sharded else model
    times = []
    for _ in range(2):
        start = time.perf_counter()
        compute_logits(model, [(b.images, b.labels) for b in batches], dtype)
        times.append(time.perf_counter() - start)
    return min(times) / sum(len(batch.labels) for batch in batches)


def mean_step_time(steps: Iterator[object], seconds: float, stop: list[int]) -> float:
    """The mean time of a step, without the slowest; the mean, as a machine's speed drifts."""
    times: list[float] = []
    start = time.perf_counter()
    for _ in steps:
        now = time.perf_counter()
        times.append(now - start)
        start = now
        if sum(times) >= seconds and len(times) >= MIN_TIMED_STEPS:
            stop.append(len(times))  # ends the steps of all ranks
    return statistics.fmean(sorted(times)[: math.ceil((1 - OUTLIERS) * len(times))])
