"""How far a run has come: what its checkpoints store besides tensors."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vitrail.zoo.metadata import Best


@dataclass(kw_only=True)
class Progress:
    """Updated after each step; a resume starts from the stored copy."""

    fingerprint: str  # checksum of the data
    step: int = 0  # steps done
    seconds: float = 0.0  # spent on training
    epoch_loss: float = 0.0  # sum over the steps of the current epoch
    epoch_steps: int = 0
    epoch_correct: int = 0  # correct predictions on the augmented training images of this epoch
    epoch_images: int = 0
    best: Best | None = None
    expected: dict[str, Any] | None = None  # accuracy that frozen features reach
    random_rank: float | None = None  # effective rank of random weights, in a pretraining

    def start_epoch(self) -> None:
        self.epoch_loss, self.epoch_steps, self.epoch_correct, self.epoch_images = 0.0, 0, 0, 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Progress":
        best = stored["best"]
        return cls(**{**stored, "best": None if best is None else Best(**best)})
