"""Training steps: forward, backward and the same optimizer for all."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from bench.peers import PEERS
from vitrail.model.config import ViTConfig

CASES = [("Mini/4", 128), ("Ti/16", 8)]
ALONE = CASES  # each peer in a process of its own, for memory and start-up


def prepare(peer: str, config: ViTConfig, batch: int) -> Callable[[], object]:
    model, images = PEERS[peer](config).train(), torch.randn(batch, config.channels, *config.size)
    labels = torch.randint(config.classes, (batch,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> object:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run
