"""Learning rate, patch dropout and EMA decay as plain functions of the step.

Steps count from 0; `total` is the number of steps in the whole training.
"""

import math

from vitrail.training.config import TrainConfig


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Linear warm-up to the peak, then cosine or linear decay to the final learning rate."""
    warmup = round(config.warmup * total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    decay = {"cosine": cosine, "linear": linear}[config.schedule](progress)
    return config.lr * (config.final_lr + (1 - config.final_lr) * decay)


def cosine(progress: float) -> float:
    """Half a cosine from 1 to 0 (Loshchilov and Hutter, 2017)."""
    return (1 + math.cos(math.pi * progress)) / 2


def linear(progress: float) -> float:
    return 1 - progress


def patches_to_keep(step: int, total: int, patches: int, config: TrainConfig) -> int:
    """Patches of each image that the model sees; a shorter sequence makes a cheaper step."""
    if step >= round(config.drop_until * total):
        return patches
    return min(patches, max(1, round(patches * (1 - config.drop_patches))))


def ema_decay(step: int, decay: float) -> float:
    """Low in the first steps, so that the average soon forgets the random initial weights."""
    return min(decay, (1 + step) / (10 + step))
