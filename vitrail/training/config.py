"""Every number that defines a training, checked the moment it is written down."""

from dataclasses import dataclass
from typing import Literal, get_args

from vitrail.errors import UserError

Optimizer = Literal["adamw", "muon"]
Schedule = Literal["cosine", "linear"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]

WHOLE = {  # field: the least it may be
    "epochs": 1,
    "steps": 0,
    "batch": 1,
    "accumulate": 1,
    "evaluate_every": 0,
    "patience": 0,
    "save_every": 1,
    "log_every": 1,
    "seed": 0,
}
RANGES = {  # field: least, most
    "weight_decay": (0, 1),
    "warmup": (0, 1),
    "final_lr": (0, 1),
    "clip": (0, float("inf")),
    "smoothing": (0, 0.9),
    "ema": (0, 0.999999),
    "layer_decay": (0.1, 1),
    "drop_patches": (0, 0.95),
    "drop_until": (0, 1),
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    epochs: int = 100  # passes over the training images
    steps: int = 0  # optimizer steps in all; 0 means as many as the epochs need
    batch: int = 128  # images in one optimizer step, over all processes
    accumulate: int = 1  # parts a batch is computed in, one after the other, to need less memory
    optimizer: Optimizer = "adamw"  # or muon, which turns matrices as wholes (Jordan et al., 2024)
    lr: float = 1e-3  # learning rate at its peak; from scratch, muon wants about five times adamw's
    weight_decay: float = 0.05  # pull of matrices towards zero, times the learning rate
    warmup: float = 0.05  # part of all steps in which the learning rate rises to its peak
    schedule: Schedule = "cosine"  # how the learning rate falls after its peak
    final_lr: float = 0.0  # learning rate at the end, as a part of the peak
    clip: float = 1.0  # longest gradient that is not shortened; 0 shortens none
    smoothing: float = 0.0  # part of each label that is spread over all classes
    ema: float = 0.0  # share of the old in each step of the averaged weights, as 0.999; 0 is off
    layer_decay: float = 1.0  # learning rate of a layer over that of the layer above it
    drop_patches: float = 0.0  # part of the patches left out, others for each image and step
    drop_until: float = 0.7  # part of all steps in which patches are left out
    class_weights: bool = False  # let rare classes count more in the loss
    evaluate_every: int = 0  # epochs between two looks at validation images; 0 keeps them cheap
    patience: int = 0  # epochs without a better validation score before stopping; 0 never stops
    precision: Precision = "auto"  # auto: float32 on a CPU, bfloat16 on GPUs that have it
    compile: bool = False  # torch.compile: a minute of waiting, then faster steps on a GPU
    save_every: int = 60  # seconds between two saved states
    log_every: int = 10  # steps between two lines of the journal
    seed: int = 0  # of weights, order, augmentation and dropout

    def __post_init__(self) -> None:
        self._check_kinds()
        for name, least in WHOLE.items():
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise UserError(f"{name} is {number!r}; give a whole number of at least {least}")
        if self.seed >= 2**63:
            raise UserError(f"seed is {self.seed}; give a whole number below 2 to the 63rd")
        for name, (low, high) in RANGES.items():
            number = getattr(self, name)
            if not is_number(number) or not low <= number <= high:
                raise UserError(f"{name} is {number!r}; give a number from {low} to {high}")
        if not is_number(self.lr) or not 0 < self.lr <= 10:
            raise UserError(f"lr is {self.lr!r}; give a number above 0, such as 1e-3")
        if self.accumulate > self.batch:
            raise UserError(
                f"a batch of {self.batch} has no {self.accumulate} parts; lower accumulate"
            )

    def _check_kinds(self) -> None:
        kinds = {"optimizer": Optimizer, "schedule": Schedule, "precision": Precision}
        for name, kind in kinds.items():
            if getattr(self, name) not in get_args(kind):
                wanted = ", ".join(get_args(kind))
                raise UserError(
                    f"{name} {getattr(self, name)!r} is unknown; choose one of {wanted}"
                )
        for name in ("class_weights", "compile"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} is {getattr(self, name)!r}; give true or false")


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
