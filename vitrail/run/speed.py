"""How many images per second this CPU computes, from a few timed batches."""

import statistics
import time
from collections.abc import Callable

import torch

from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.training.learner import training_dtype

FORWARD_BATCH, TRAINING_BATCH = 8, 64  # images; small batches need less time, but train slowly
MAX_TIMED, TIMED_SECONDS = 5, 2.0  # batches, and about how long they take at most


@torch.inference_mode()
def measure_speed(model: ViT) -> float:
    """Images per second of a forward pass at the model's own resolution."""
    config = model.config
    images = torch.zeros(FORWARD_BATCH, config.channels, *config.size)
    model.eval()
    return FORWARD_BATCH / median_seconds(lambda: model(images))


def measure_training_speed(vit: ViTConfig) -> float:
    """Images per second of forward and backward passes, in the precision of training."""
    with torch.random.fork_rng(devices=[]):
        model = ViT(vit)
    images = torch.zeros(TRAINING_BATCH, vit.channels, *vit.size)
    dtype = training_dtype("auto", images.device)

    def step() -> None:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            outputs = model(images)
        outputs.float().sum().backward()

    return TRAINING_BATCH / median_seconds(step)


def median_seconds(compute: Callable[[], object]) -> float:
    """Of calls after the first one, which allocates memory."""
    compute()
    times: list[float] = []
    while len(times) < MAX_TIMED and sum(times) < TIMED_SECONDS:
        start = time.perf_counter()
        compute()
        times.append(time.perf_counter() - start)
    return max(1e-6, statistics.median(times))
