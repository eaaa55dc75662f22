"""Plans the number of steps: times a few of them, so that the run ends on time."""

import copy
import math
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import torch
from torch import nn

from vitrail.data.loader import Loader, limit_threads
from vitrail.data.source import SPLITS, count_labels, split_indices
from vitrail.display.text import format_count, format_duration
from vitrail.errors import UserError
from vitrail.evaluation.loop import compute_logits
from vitrail.heads.logistic import estimate_fit_seconds
from vitrail.inference.calibrate import count_reference_images
from vitrail.pretraining.objective import PatchFeatures, backbone_of
from vitrail.run import auto
from vitrail.run.fine_tuning import MAX_PROBE
from vitrail.run.fractions import FRACTIONS, MEASURED, MIN_STEPS, TRAININGS, step_cost_ratio
from vitrail.run.quality import PROBE_IMAGES, PROBE_PASSES, SEARCHED, can_probe
from vitrail.run.recipe import Recipe
from vitrail.run.terminal import Terminal
from vitrail.training import loop
from vitrail.training.config import TrainConfig
from vitrail.training.distributed import SINGLE, World, is_sharded
from vitrail.training.learner import Learner
from vitrail.training.sharding import ShardedForward

EVALUATION_SHARE = 0.02  # of the training time, at most, for evaluations on the validation split
TRIAL = 3.0  # seconds for which each kind of step is timed, if no minutes are given
TRIAL_SHARE, MAX_TRIAL = 0.03, 60.0  # of the given minutes, and seconds at most, for all timing
RESULTS_SECONDS = 1.0  # to write the results
EVALUATIONS = 4  # of a pretraining, at least: its report shows the progress
PAGE_SECONDS = 1.0  # to draw what a pretraining has learned
SLOWDOWN = 1.02  # of later steps against timed ones: logging, checkpoints, other programs
OUTLIERS = 0.1  # fraction of the timed steps, the slowest ones, that is ignored
WARMUP_STEPS = 2  # not timed: they allocate memory
MIN_TIMED_STEPS = 3
ENDLESS = 10**9  # steps: more than any timing takes
FORWARDS_PER_STEP = 3  # a training step costs about three forward passes


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    step: float  # seconds per training step, on average over the run
    image: float  # seconds to evaluate one image
    features: float = 0.0  # seconds for the features of an image, in a pretraining
    fits: float = 0.0  # seconds for linear probes on all fractions of the labels, likewise


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
        seconds = trial_seconds(len(list_phases(recipe)), minutes)
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
    once, compare, least = measuring_seconds(recipe, loader, timing)
    final += once + (image * counts["val"] * EVALUATIONS if recipe.pretrain is not None else 0.0)
    if minutes is not None:
        left = 60 * minutes - (time.monotonic() - started) - final
        longest = min(left / (step + compare), (left - least) / step)
        steps = math.floor(longest / SLOWDOWN)
        if recipe.tune == "head":  # an epoch on cached features takes milliseconds
            steps = min(max(steps, loader.steps), config.epochs * loader.steps)
        if steps < 1:
            needed = 60 * minutes - left + least + 10 * step
            raise UserError(
                f"{minutes:g} minutes are too short for one step; "
                f"try `minutes={math.ceil(needed / 6) / 10:g}`"
            )
    else:
        steps = config.steps or config.epochs * loader.steps
    epochs = math.ceil(steps / loader.steps) if minutes or config.steps else config.epochs
    if recipe.pretrain is not None and not config.evaluate_every:
        every = min(every, max(1, epochs // EVALUATIONS))
    seconds = steps * step + max(steps * compare, least) + final
    terminal.print(
        f"{format_count(steps, 'step')} of {config.batch} images, about {format_duration(seconds)}"
    )
    if minutes is None and seconds > auto.LONG_RUN:
        terminal.print("for a shorter run, stop this one and set `minutes`, for example to 60")
    return {"steps": steps, "epochs": epochs, "evaluate_every": every}


def measuring_seconds(
    recipe: Recipe, loader: Loader, timing: StepTiming
) -> tuple[float, float, float]:
    """The cost of measuring a pretraining, besides evaluations.

    Once at the end; and of the short training runs with labels for each of its steps, and in all:
    the larger of these two counts.
    """
    if recipe.pretrain is None:
        return 0.0, 0.0, 0.0
    share, source = recipe.pretrain.comparison / loader.world_size, loader.source
    once = PAGE_SECONDS + timing.features * min(SEARCHED, len(split_indices(source, "val")))
    if not can_probe(loader):
        return once, 0.0, 0.0
    train, val = (int(count_labels(source, split_indices(source, s)).sum()) for s in SPLITS[:2])
    images = PROBE_PASSES * (min(PROBE_IMAGES, train) + min(PROBE_IMAGES, val))
    once += timing.features * images + PROBE_PASSES * timing.fits
    if not share:
        return once, 0.0, 0.0
    heads = sum(min(MAX_PROBE, fraction * train) for fraction in FRACTIONS)
    once += timing.features * (heads + TRAININGS * min(MEASURED, val)) + timing.fits
    step = FORWARDS_PER_STEP * timing.features * recipe.train.batch
    return once, share * step_cost_ratio(recipe) * step, TRAININGS * MIN_STEPS * step


def trial_seconds(kinds: int, minutes: float | None) -> float:
    """How long to time each kind of step: longer for longer runs, which need a better estimate."""
    if minutes is None:
        return TRIAL
    return min(MAX_TRIAL, TRIAL_SHARE * 60 * minutes) / kinds


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps of a run that cost the same."""

    share: float  # of all steps
    drops: bool  # with patch dropout
    unlabelled: bool  # with images without labels


def list_phases(recipe: Recipe) -> list[Phase]:
    config = recipe.train
    drop_until = config.drop_until if config.drop_patches else 0.0
    start = recipe.joint.start if recipe.joint is not None and recipe.uses_unlabelled else 1.0
    ends = sorted({0.0, drop_until, start, 1.0})
    return [
        Phase(share=end - begin, drops=begin < drop_until, unlabelled=begin >= start)
        for begin, end in pairwise(ends)
    ]


def measure_timing(
    recipe: Recipe, loader: Loader, learner: Learner, seconds: float, world: World
) -> StepTiming:
    """Times steps on a copy of the learner, so that the training itself has not started.

    A sharded one is not copied, but restored, as two of them may not fit.
    """
    trial, saved, step = learner, None, 0.0
    if learner.sharded:
        saved = {name: x.to("cpu", copy=True) for name, x in learner.tensors().items()}
    else:
        trial = copy.deepcopy(learner)
    for phase in reversed(list_phases(recipe)):  # the complete steps, which need most memory, first
        loaded = loader.training(unlabelled_from=0 if phase.unlabelled else ENDLESS)
        batches = ((batch.images, batch.targets) for batch in loaded)
        rate = recipe.train.drop_patches if phase.drops else 0.0
        config = replace(recipe.train, drop_patches=rate, drop_until=1.0)
        one = seconds_per_step(trial, batches, config, recipe.patches, seconds, world)
        step += phase.share * one
    model = trial.eval_model if recipe.pretrain is not None else backbone_of(trial.eval_model)
    image = seconds_per_image(model, trial.dtype, loader) / world.size
    features = 0.0
    if recipe.pretrain is not None:
        whole = PatchFeatures(backbone_of(model))
        features = seconds_per_image(whole, trial.dtype, loader)
    if saved is not None:
        learner.restore(saved)
    fits = seconds_of_fits(recipe, loader) if recipe.pretrain and can_probe(loader) else 0.0
    return StepTiming(step=step, image=image, features=features, fits=fits)


def seconds_of_fits(recipe: Recipe, loader: Loader) -> float:
    """Of one linear probe on each fraction of the labels."""
    train = int(count_labels(loader.source, split_indices(loader.source, "train")).sum())
    sizes = [math.ceil(fraction * min(PROBE_IMAGES, train)) for fraction in FRACTIONS]
    with limit_threads(1):
        times = [estimate_fit_seconds(n, recipe.vit.width, recipe.vit.classes) for n in sizes]
    return sum(times)


def seconds_per_step(
    learner: Learner,
    batches: Iterable[loop.Batch],
    config: TrainConfig,
    patches: int,
    seconds: float,
    world: World = SINGLE,
) -> float:
    stop: list[int] = []
    steps = loop.train_steps(
        learner, batches, config, ENDLESS, patches=patches, world=world, stop=stop
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
