"""The hyperparameters of a training, checked on construction."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from vitrail.errors import UserError

Optimizer = Literal["adamw", "muon"]
Schedule = Literal["cosine", "linear"]
Shard = Literal["auto", "off", "full"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]

MINIMUM = {  # of each whole number
    "epochs": 1,
    "steps": 0,
    "batch": 1,
    "accumulate": 1,
    "evaluate_every": 0,
    "patience": 0,
    "save_every": 1,
    "log_every": 1,
    "seed": 0,
    "frozen": 0,
    "probe": 0,
    "rank": 1,
}
MAXIMUM = 10**9  # of each whole number except the seed; products of larger ones overflow
RANGES = {  # minimum and maximum of the other numbers
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
    epochs: int = 100  # passes over the training split
    steps: int = 0  # optimizer steps in total; 0: as many as the epochs need
    batch: int = 128  # batch size, over all processes
    accumulate: int = 1  # micro-batches per step (gradient accumulation), to save memory
    optimizer: Optimizer = "adamw"  # adamw, or muon for matrices (Jordan et al., 2024)
    lr: float = 1e-3  # peak learning rate; from scratch, muon needs about five times adamw's
    weight_decay: float = 0.05  # decoupled weight decay of matrices, times the learning rate
    warmup: float = 0.05  # fraction of all steps with linear learning-rate warm-up
    schedule: Schedule = "cosine"  # learning-rate decay after the warm-up
    final_lr: float = 0.0  # learning rate of the last step, as a fraction of the peak
    clip: float = 1.0  # maximum gradient norm; 0 disables clipping
    smoothing: float = 0.0  # label smoothing
    ema: float = 0.0  # EMA decay of the averaged weights, such as 0.999; 0 disables averaging
    layer_decay: float = 1.0  # layer-wise learning-rate decay: factor from a layer to the one below
    drop_patches: float = 0.0  # patch dropout: fraction dropped at random in each image and step
    drop_until: float = 1.0  # fraction of all steps with patch dropout
    frozen: int = 0  # blocks, from the input on, that do not learn: computed once and cached
    probe: int = 0  # images of the linear probe that the head starts from; 0: it starts at zero
    rank: int = 8  # of the factors that LoRA adds to a matrix (Hu et al., 2022)
    class_weights: bool = False  # weight the loss by inverse class frequency
    evaluate_every: int = 0  # epochs between evaluations on the validation split; 0: automatic
    patience: int = 0  # epochs without improvement before early stopping; 0 disables it
    precision: Precision = "auto"  # auto: bfloat16 on devices with units for it, else float32
    compile: bool = False  # use torch.compile: about a minute to compile, faster steps on a GPU
    shard: Shard = "auto"  # full: divide weights and optimizer among the processes (FSDP)
    recompute: bool = False  # activation checkpointing: less memory, a third more compute
    save_every: int = 60  # seconds between checkpoints
    log_every: int = 10  # steps between lines of log.jsonl
    seed: int = 0  # random seed of weights, data order, augmentation and dropout

    def __post_init__(self) -> None:
        self._check_choices()
        for name, minimum in MINIMUM.items():
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or number < minimum:
                raise UserError(
                    f"train.{name} is {number!r:.40}; give a whole number of at least {minimum}"
                )
            most = 2**63 - 1 if name == "seed" else MAXIMUM
            if number > most:
                raise UserError(
                    f"train.{name} is {number!r:.40}; give a whole number of at most {most:,}"
                )
        for name, (low, high) in RANGES.items():
            number = getattr(self, name)
            if not is_number(number) or not low <= number <= high:
                raise UserError(f"train.{name} is {number!r}; give a number from {low} to {high}")
        if not is_number(self.lr) or not 0 < self.lr <= 10:
            raise UserError(f"train.lr is {self.lr!r}; give a number above 0, such as 1e-3")
        if self.accumulate > self.batch:
            raise UserError(
                f"a batch of {self.batch} images cannot be split into {self.accumulate} "
                f"micro-batches; lower `train.accumulate`"
            )

    def _check_choices(self) -> None:
        choices: dict[str, Any] = {"optimizer": Optimizer, "schedule": Schedule}
        choices |= {"precision": Precision, "shard": Shard}
        for name, literal in choices.items():
            if getattr(self, name) not in get_args(literal):
                known = ", ".join(get_args(literal))
                raise UserError(
                    f"train.{name} {getattr(self, name)!r} is unknown; choose one of {known}"
                )
        for name in ("class_weights", "compile", "recompute"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"train.{name} is {getattr(self, name)!r}; give true or false")


def is_number(value: object) -> bool:
    """Whether `value` is an int or a float; bool, a subclass of int, does not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)
