"""Forward passes, from one image to a batch, from 32 to 224 pixels."""

from collections.abc import Callable

import torch

from bench.peers import PEERS
from vitrail.model.config import ViTConfig

CASES = [
    ("Ti/16", 1),
    ("Ti/16", 16),
    ("S/16", 1),
    ("S/16", 16),
    ("B/16", 1),
    ("B/16", 16),
    ("Mini/4", 1),
    ("Mini/4", 128),
]
ALONE = [("Ti/16", 1), ("Ti/16", 16)]  # each peer in a process of its own, for memory and start-up


def prepare(peer: str, config: ViTConfig, batch: int) -> Callable[[], object]:
    model, images = PEERS[peer](config).eval(), torch.randn(batch, config.channels, *config.size)

    @torch.inference_mode()
    def run() -> object:
        return model(images)

    return run
