"""How many steps fit into the minutes: planned once from a short timing, then stored."""

import copy
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from vitrail.data.loader import Loader
from vitrail.data.source import Split, indices
from vitrail.errors import UserError
from vitrail.evaluation.loop import logits
from vitrail.run import auto
from vitrail.run.live import Live, duration
from vitrail.run.recipe import Recipe
from vitrail.training import loop
from vitrail.training.config import TrainConfig
from vitrail.training.distributed import ALONE, Together
from vitrail.training.learner import Learner

LOOKING = 0.02  # most of the time that may go into looking at validation images
TRIAL = 3.0  # seconds in which each kind of step is timed, where no minutes are given
SHARE, LONGEST = 0.05, 60.0  # part of the minutes, and seconds at most, in which all are timed
ENDING = 1.0  # seconds to write the results
SLOWER = 1.02  # a step later on, against a timed one: reports, saves, the machine's own work
HICCUPS = 0.1  # part of the timed steps, the slowest, that do not count: other programs wake too
SPLITS: tuple[Split, ...] = ("train", "val", "test")


@dataclass(frozen=True, kw_only=True)
class Timing:
    step: float  # seconds of a training step, on average over the run
    image: float  # seconds to evaluate an image


def plan(
    recipe: Recipe,
    loader: Loader,
    learner: Learner,
    minutes: float | None,
    began: float,
    live: Live,
    together: Together = ALONE,
) -> Recipe:
    """The recipe with its number of steps, and how often to look at the validation images.

    Of processes that time their steps together, the first decides.
    """
    settings = recipe.train
    timing = measure(recipe, loader, learner, timed(settings, minutes), together)
    if not together.first:
        return recipe
    counts = {split: len(indices(loader.source, split)) for split in SPLITS}
    # a step costs three forwards; counted, not timed, so that the same command gives the same run
    seldom = max(1, math.ceil(counts["val"] / (3 * counts["train"]) / LOOKING))
    every = settings.evaluate_every or seldom
    step = timing.step + timing.image * counts["val"] / (every * loader.steps)
    # at the end the best weights see validation and test images once more
    after = timing.image * (counts["val"] + counts["test"]) + ENDING
    if minutes is not None:
        left = 60 * minutes - (time.monotonic() - began) - after
        steps = math.floor(left / step / SLOWER)
        if steps < 1:
            least = math.ceil(10 * (60 * minutes - left + 10 * step) / 60) / 10
            raise UserError(
                f"{minutes:g} minutes are over before a step is taken; give --minutes {least:g}"
            )
        settings = replace(settings, steps=steps, epochs=math.ceil(steps / loader.steps))
    elif settings.steps:
        settings = replace(settings, epochs=math.ceil(settings.steps / loader.steps))
    else:
        settings = replace(settings, steps=settings.epochs * loader.steps)
    seconds = settings.steps * step + after
    live.say(f"{settings.steps:,} steps of {settings.batch} images, about {duration(seconds)}")
    if minutes is None and seconds > auto.LONG:
        live.say("for a shorter run, stop this one and give --minutes, such as --minutes 60")
    return replace(recipe, train=replace(settings, evaluate_every=every))


def timed(settings: TrainConfig, minutes: float | None) -> float:
    """Seconds for each kind of step: the longer the run, the surer the forecast should be."""
    if minutes is None:
        return TRIAL
    return min(LONGEST, SHARE * 60 * minutes) / (2 if settings.drop_patches else 1)


def measure(
    recipe: Recipe, loader: Loader, learner: Learner, seconds: float, together: Together
) -> Timing:
    """Times steps on a copy, so that the training itself has not begun."""
    settings, patches = recipe.train, recipe.patches
    trial = copy.deepcopy(learner)
    every = replace(settings, drop_patches=0.0)
    whole = seconds_per_step(trial, loader, every, patches, seconds, together)
    step = whole
    if settings.drop_patches:
        part = replace(settings, drop_until=1.0)
        less = seconds_per_step(trial, loader, part, patches, seconds, together)
        step = settings.drop_until * less + (1 - settings.drop_until) * whole
    return Timing(step=step, image=seconds_per_image(trial, loader) / together.world)


def seconds_per_step(
    learner: Learner,
    loader: Loader,
    settings: TrainConfig,
    patches: int,
    seconds: float,
    together: Together,
) -> float:
    batches = ((batch.images, batch.targets) for batch in loader.training())
    enough: list[int] = []
    steps = loop.train(
        learner, batches, settings, 10**9, patches=patches, together=together, heard=enough
    )
    for _ in islice(steps, 2):  # the first ones allocate
        pass
    return paced(steps, seconds, enough)


def seconds_per_image(learner: Learner, loader: Loader) -> float:
    """From a few batches of the training split, which is always there."""
    batches = list(islice(loader.evaluation("train"), 2))
    times = []
    for _ in range(2):
        start = time.perf_counter()
        logits(learner.result, [(b.images, b.labels) for b in batches], learner.dtype)
        times.append(time.perf_counter() - start)
    return min(times) / sum(len(batch.labels) for batch in batches)


def paced(steps: Iterator[object], seconds: float, enough: list[int]) -> float:
    """The seconds of a step on average, as the speed of a machine drifts; without the slowest."""
    times: list[float] = []
    start = time.perf_counter()
    for _ in steps:
        now = time.perf_counter()
        times.append(now - start)
        start = now
        if sum(times) >= seconds and len(times) >= 3:
            enough.append(len(times))  # ends the steps, of all processes at once
    return statistics.fmean(sorted(times)[: math.ceil((1 - HICCUPS) * len(times))])
