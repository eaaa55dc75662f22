"""Learning rate, patch dropping and averaging as plain functions of the step.

Steps count from 0; `total` is the number of steps in the whole training.
"""

import math

from vitrail.training.config import TrainConfig


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Rises in a line to the peak, then falls to its final value along the chosen curve."""
    warmup = round(config.warmup * total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    fall = {"cosine": cosine, "linear": linear}[config.schedule](done)
    return config.lr * (config.final_lr + (1 - config.final_lr) * fall)


def cosine(done: float) -> float:
    """Half a cosine from 1 to 0 (Loshchilov and Hutter, 2017)."""
    return (1 + math.cos(math.pi * done)) / 2


def linear(done: float) -> float:
    return 1 - done


def kept_patches(step: int, total: int, patches: int, config: TrainConfig) -> int:
    """How many of an image's patches the model sees; a shorter sequence is a cheaper step."""
    if step >= round(config.drop_until * total):
        return patches
    return min(patches, max(1, round(patches * (1 - config.drop_patches))))


def ema_decay(step: int, decay: float) -> float:
    """What the averaged weights keep of themselves: little at first, as they start at random."""
    return min(decay, (1 + step) / (10 + step))
