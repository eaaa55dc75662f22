"""Forecasts a training: time, cost, memory and the limiting resource, in closed form."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from vitrail.display.text import format_count, format_duration, format_parameters
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.cost import count_activation_bytes, count_macs, count_parameters
from vitrail.model.vit import ViT
from vitrail.run.build import count_stacked_matrices
from vitrail.run.devices import CPU, Device
from vitrail.run.plan import EVALUATION_SHARE, FORWARDS_PER_STEP
from vitrail.run.recipe import Recipe
from vitrail.training.config import Shard
from vitrail.training.schedule import patches_to_keep
from vitrail.zoo.adapters import freeze

Limit = Literal["compute", "communication", "input"]

ACHIEVED = 0.75  # of a link's data sheet, by the all-reduce of large tensors
BACKWARD = 2 / 3  # of a step's compute, during which gradients are sent
USABLE = 0.9  # of a device's memory; the rest is for CUDA, NCCL and fragmentation
FEW_TOKENS = 4096  # per device and step, below which a GPU waits for the start of its kernels
FLOAT32 = 4  # bytes


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The devices of a training, and what limits them besides."""

    device: Device
    count: int
    rate: float  # FLOP per second that one device reaches
    peak: float = 0.0  # of its data sheet, in the precision of the training; 0: unknown
    measured: bool = False  # whether the rate was measured
    core_seconds: float = 0.0  # of one CPU thread, to decode and augment an image
    image_bytes: float = 0.0  # that are read for an image
    disk: float | None = None  # bytes per second that a machine reads; None: no limit

    @property
    def machines(self) -> int:
        return math.ceil(self.count / self.device.per_machine)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of an all-reduce: between machines, their network is shared."""
        link = self.device.link if self.machines == 1 else self.device.network
        return link * (1.0 if self.device.name == CPU else ACHIEVED)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step; communication and input overlap with compute, except on a CPU."""

    compute: float
    communication: float
    input: float
    total: float


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device."""

    weights: float  # and their copy in 16 bit
    gradients: float  # and the buckets of DDP
    optimizer: float  # and EMA weights
    activations: float
    available: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def fits(self) -> bool:
        return self.total <= USABLE * self.available


@dataclass(frozen=True, kw_only=True, repr=False)
class Forecast:
    """What a training will take; its fields are the keys of `vitrail plan --json`.

    >>> forecast = vitrail.plan("digits", devices="8xA100", epochs=100)
    >>> forecast.memory.fits, forecast.cost  # without `price`
    (True, None)
    """

    data: str
    model: str
    parameters: int
    devices: str  # as requested: "64xH100"
    machines: int
    images: int  # training images
    epochs: int
    steps: int
    batch: int  # over all devices
    seconds: float
    device_hours: float
    price: float | None  # of a device-hour, in any currency
    cost: float | None
    flops: float  # of the whole training
    mfu: float | None  # fraction of the devices' peak; None for a CPU
    measured: bool  # whether the speed was measured here
    images_per_second: float
    limit: Limit
    step: StepTime
    sent_bytes: float  # by each device in each step
    read_bytes_per_second: float  # by each machine
    shard: Shard
    memory: Memory
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The document that `vitrail plan --json` prints.

        >>> vitrail.plan("digits", devices="8xA100", epochs=9).to_dict()["epochs"]
        9
        """
        memory = {**asdict(self.memory), "total": self.memory.total, "fits": self.memory.fits}
        return {**asdict(self), "memory": memory}

    def __repr__(self) -> str:
        step, memory = self.step, self.memory
        cost = "give `price`, that of a device-hour"
        if self.cost is not None:
            cost = f"{self.cost:,.2f} at {self.price:g} per device-hour"
        parts = ", ".join(
            f"{name} {getattr(memory, name) / 1e9:.2f}"
            for name in ("weights", "gradients", "optimizer", "activations")
        )
        mfu = "" if self.mfu is None else f", {100 * self.mfu:.0f} % of the peak"
        duration = format_duration(self.seconds)
        lines = [
            f"{self.model} ({format_parameters(self.parameters)} parameters) on {self.data}: "
            f"{format_count(self.images, 'image')}, {format_count(self.epochs, 'epoch')}, "
            f"{format_count(self.steps, 'step')} of {self.batch} on {self.devices}",
            f"  time          {duration} ({self.device_hours:,.2f} device-hours)",
            f"  cost          {cost}",
            f"  limited by    {self.limit}: a step takes {milliseconds(step.total)} (compute "
            f"{milliseconds(step.compute)}, communication {milliseconds(step.communication)}, "
            f"input {milliseconds(step.input)})",
            f"  speed         {self.images_per_second:,.0f} images per second{mfu}",
            f"  memory        {memory.total / 1e9:.2f} of {memory.available / 1e9:.0f} GB per "
            f"device ({parts}); sharding {self.shard}",
            f"  traffic       {self.sent_bytes / 1e6:,.1f} MB sent by each device in each step, "
            f"{self.read_bytes_per_second / 1e6:,.1f} MB read by each machine per second",
        ]
        lines += [f"  assumed       {line}" for line in self.assumptions]
        return "\n".join([*lines, *(f"  warning       {line}" for line in self.warnings)])


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"


def training_flops(recipe: Recipe, images: int, val: int, steps: int) -> tuple[float, float]:
    """FLOPs of all steps, and of everything besides: evaluations, and what is computed once.

    A backward pass costs two forward passes: one for the gradients of the weights, which those of
    frozen weights are spared, one for those of the activations.
    """
    vit = training_vit(recipe)
    frozen = recipe.train.frozen / recipe.vit.depth
    forwards = (3 if recipe.tune == "all" else 2) * (1 - frozen)
    kept = [patches_to_keep(step, steps, vit.patches, recipe.train) for step in (0, steps - 1)]
    early = recipe.train.drop_until if kept[0] < kept[1] else 0.0
    macs = early * count_macs(vit, kept[0]) + (1 - early) * count_macs(vit, kept[1])
    once = 2 * frozen * images * count_macs(vit)  # of each image and its mirror image
    share = val / (FORWARDS_PER_STEP * images)
    every = recipe.train.evaluate_every or max(1, math.ceil(share / EVALUATION_SHARE))
    evaluations = 1 + steps * recipe.train.batch / images / every
    seen = steps * recipe.train.batch
    return 2 * forwards * macs * seen, 2 * (once + evaluations * val * count_macs(recipe.vit))


def training_vit(recipe: Recipe) -> ViTConfig:
    """The architecture at the size of the training images."""
    size = recipe.data.train_size or (recipe.preprocess.height, recipe.preprocess.width)
    return replace(recipe.vit, image=size)


class Counts(NamedTuple):
    """Parameters of a model in training."""

    all: int
    trained: int
    muon: int  # of those trained, in matrices that Muon updates


def count_in_training(recipe: Recipe) -> Counts:
    with torch.device("meta"):  # shapes without values
        model = ViT(recipe.vit)
        if recipe.tune != "all" or recipe.train.frozen:
            freeze(model, recipe.tune, recipe.train.rank, recipe.train.frozen)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    trained = {name: sizes[name] for name, p in model.named_parameters() if p.requires_grad}
    muon = (
        size
        for name, size in trained.items()
        if recipe.train.optimizer == "muon" and count_stacked_matrices(name, recipe.vit)
    )
    return Counts(sum(sizes.values()), sum(trained.values()), sum(muon))


def predict_memory(recipe: Recipe, cluster: Cluster, itemsize: int, shard: Shard) -> Memory:
    vit, (parameters, trained, muon) = training_vit(recipe), count_in_training(recipe)
    block = count_parameters(replace(vit, depth=vit.depth + 1)) - count_parameters(vit)
    outside = parameters - vit.depth * block
    ranks = cluster.count if shard == "full" else 1
    copy = itemsize * parameters if itemsize < FLOAT32 else 0
    if shard == "full":
        # this block and the next, each while it is gathered; the root until its backward pass
        copy = 2 * itemsize * block + FLOAT32 * outside
    buckets = FLOAT32 * trained if cluster.count > 1 and shard == "off" else 0
    if shard == "full":
        buckets = FLOAT32 * max(block, outside)  # until they are reduce-scattered
    moments = 2 * trained - muon  # AdamW has two of each parameter, Muon one
    average = parameters if recipe.train.ema else 0
    micro = math.ceil(recipe.train.batch / cluster.count / recipe.train.accumulate)
    below = recipe.train.frozen / vit.depth
    return Memory(
        weights=FLOAT32 * parameters / ranks + copy,
        gradients=FLOAT32 * trained / ranks + buckets,
        optimizer=FLOAT32 * (moments + average) / ranks,
        activations=micro * stored_activations(recipe, itemsize) * (1 - below),
        available=cluster.device.memory,
    )


def stored_activations(recipe: Recipe, itemsize: int) -> float:
    """Bytes for an image: of all blocks, or of their inputs and the one that is recomputed."""
    vit = training_vit(recipe)
    stored = count_activation_bytes(vit, itemsize)
    if not recipe.train.recompute:
        return stored
    block = count_activation_bytes(replace(vit, depth=vit.depth + 1), itemsize) - stored
    return stored - (vit.depth - 1) * block + vit.depth * vit.tokens * vit.width * itemsize


def sent_bytes(recipe: Recipe, cluster: Cluster, itemsize: int, shard: Shard) -> float:
    """What each device sends in a step.

    A ring all-reduce of gradients sends them twice. Sharded, weights are gathered before the
    forward and the backward pass, and gradients are reduce-scattered; each sends them once.
    """
    ring = (cluster.count - 1) / cluster.count
    if shard == "full":
        return ring * count_parameters(recipe.vit) * (2 * itemsize + FLOAT32)
    return 2 * ring * FLOAT32 * count_in_training(recipe).trained


def predict_step(recipe: Recipe, cluster: Cluster, flops: float, sent: float) -> StepTime:
    """The time of a step of `flops` over all devices, each of which sends `sent` bytes."""
    device, batch = cluster.device, recipe.train.batch
    compute = flops / cluster.count / cluster.rate
    communication = sent / cluster.bandwidth
    cores = device.cores * cluster.count
    reading = batch * cluster.core_seconds / cores
    if cluster.disk:
        reading = max(reading, batch * cluster.image_bytes / cluster.disk / cluster.machines)
    if device.name == CPU:  # the same cores do everything
        total = compute + communication + reading
    else:
        total = max(compute + max(0.0, communication - BACKWARD * compute), reading)
    return StepTime(compute=compute, communication=communication, input=reading, total=total)


def find_limit(step: StepTime) -> Limit:
    """The resource that a faster one of would help most."""
    times: dict[Limit, float] = {
        "compute": step.compute,
        "communication": step.communication,
        "input": step.input,
    }
    return max(times, key=lambda name: times[name])


def choose_shard(recipe: Recipe, cluster: Cluster, itemsize: int, shard: Shard) -> Shard:
    if shard == "full" and cluster.count == 1:
        raise UserError("`shard` full needs two devices or more; omit it")
    if shard != "auto" or cluster.count == 1:
        return "off" if shard == "auto" else shard
    return "off" if predict_memory(recipe, cluster, itemsize, "off").fits else "full"


def find_warnings(
    recipe: Recipe, cluster: Cluster, shard: Shard, memory: Memory, itemsize: int
) -> list[str]:
    """What the caller should change, or not believe."""
    found, accumulate = [], recipe.train.accumulate
    if not memory.fits:
        fixed = memory.total - memory.activations
        room = USABLE * memory.available - fixed
        per_device = math.ceil(recipe.train.batch / cluster.count)
        advice = "the weights alone do not fit; take another device or a smaller `model`"
        if room * per_device > memory.activations * accumulate:  # one image at a time fits
            needed = math.ceil(accumulate * memory.activations / room)
            advice = f"set train.accumulate to {needed} or more"
        found.append(f"out of memory: {advice}")
    if cluster.device.name == CPU:
        return found
    tokens = training_vit(recipe).tokens * recipe.train.batch / cluster.count / accumulate
    if tokens < FEW_TOKENS:
        found.append(
            f"{tokens:,.0f} tokens per device and step are too few to use a GPU well, and the "
            f"forecast too good; raise train.batch, or take fewer devices"
        )
    if itemsize == FLOAT32:
        found.append("training in float32; set train.precision to bfloat16, or to float16 where "
                     "a GPU has no bfloat16")  # fmt: skip
    return found
