"""Plans a training run on any devices: designs its recipe, measures what is here, and forecasts."""

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice, repeat
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from vitrail.arguments import check_arguments
from vitrail.data.loader import Loader, limit_threads
from vitrail.data.open import open_data
from vitrail.data.preview import load_into_memory
from vitrail.data.source import Source, sample_indices, split_indices
from vitrail.errors import UserError
from vitrail.model.cost import count_macs, count_parameters
from vitrail.run.build import make_learner
from vitrail.run.design import design_recipe
from vitrail.run.devices import CPU, Device, parse_devices
from vitrail.run.forecast import (
    ACHIEVED,
    Cluster,
    Forecast,
    choose_shard,
    find_limit,
    find_warnings,
    predict_memory,
    predict_step,
    sent_bytes,
    training_flops,
    training_vit,
)
from vitrail.run.plan import seconds_per_step
from vitrail.run.recipe import Recipe
from vitrail.run.request import AUTO, Request, name_data, read_settings
from vitrail.training.config import Shard

TRIALS, TRIAL = 3, 1.0  # trials whose median counts, and seconds for which each times steps
TRIAL_FLOPS = {"cpu": 3e10, "cuda": 1e14}  # of a timed step, at most: about a second
REQUESTED = "requested"  # the reason for a utilisation that wins over a measured one
READ_PASSES = 2  # over a sample of the images


@check_arguments
def plan(
    data: str | Path | Source,
    *,
    devices: str,
    epochs: int | None = None,
    images: int | None = None,
    model: str | None = None,
    weights: str | Path = AUTO,
    tune: str = AUTO,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    shard: Shard = "auto",
    price: float | None = None,
    mfu: float | None = None,
    per_machine: int | None = None,
    network: float | None = None,
    cores: int | None = None,
    disk: float | None = None,
) -> Forecast:
    """Forecasts a training: its time, cost, memory per device, and what limits it.

    The recipe is the one that `train` would choose. Nothing is trained or downloaded. If such a
    device is in this machine, a few steps are timed on it; else the speed is a typical fraction of
    its peak. Reading is timed on a sample of the images, on one core of this machine.

    Args:
        data: as for `vitrail.train`; a sample of the data is enough, with `images`
        devices: number and kind, such as "64xH100" or "2xcpu" for two processes on this machine
        epochs: passes over the training images; by default what `train` would choose
        images: number of training images, if `data` is only a sample of them
        model: architecture to train from scratch, such as "S/16"
        weights: what to fine-tune, "auto" or "none", as for `vitrail.train`
        tune: what fine-tuning changes, as for `vitrail.train`
        recipe: TOML file with settings
        settings: settings by section, such as {"train": {"batch": 4096}}
        shard: "full" divides weights, gradients and optimizer among the devices (FSDP), "off"
            keeps them on each (DDP); "auto" shards what does not fit
        price: of a device-hour, in any currency; without it the cost is None
        mfu: fraction of the devices' peak that training reaches, instead of a typical one
        per_machine: devices of a machine, by default 8
        network: Gbit/s between machines, by default that of usual machines
        cores: CPU threads of a machine, by default those of usual machines
        disk: MB/s that a machine reads images at; by default no limit

    >>> vitrail.plan("digits", devices="8xA100", epochs=300, price=2.0).epochs
    300
    """
    check_numbers(images=images, price=price, mfu=mfu, per_machine=per_machine, network=network,
                  cores=cores, disk=disk)  # fmt: skip
    if shard not in get_args(Shard):
        raise UserError(f"`shard` {shard!r} is unknown; choose one of {', '.join(get_args(Shard))}")
    count, device = parse_devices(devices)
    device = change_device(device, mfu, per_machine, network, cores)
    table = read_settings(recipe, settings or {}, None, epochs)
    request = Request(
        data=name_data(data, table),
        model=model,
        weights=str(weights),
        tune=tune,
        epochs=epochs,
        settings=table,
    )
    source = data
    if isinstance(source, str | Path):
        source = open_data(request.data, columns=request.columns, labels=request.labels)
    kind = torch.device("cpu" if device.name == CPU else "cuda")
    design = design_recipe(source, request, kind, count, download=False, images=images)
    if design.recipe.train.batch < count:
        raise UserError(
            f"a batch of {design.recipe.train.batch} leaves some of {count} devices without an "
            f"image; set `train.batch` to at least {count}"
        )
    return forecast_recipe(
        design.recipe,
        source,
        measure_cluster(design.recipe, source, device, count, disk),
        devices=devices,
        images=images or len(split_indices(source, "train")),
        shard=shard,
        price=price,
    )


def measure_cluster(
    recipe: Recipe, source: Source, device: Device, count: int, disk: float | None
) -> Cluster:
    """The devices with their speed, and what reading an image costs; `disk` is in MB/s."""
    peak = device.peak if compute_itemsize(recipe, device) == 2 else device.peak32
    rate = None if device.reason == REQUESTED else measure_rate(recipe, device, count)
    return Cluster(
        device=device,
        count=count,
        peak=peak,
        rate=rate or peak * device.mfu,
        measured=rate is not None,
        core_seconds=measure_reading(recipe, source, cached=device.name == CPU),
        image_bytes=float(np.mean(source.sizes[split_indices(source, "train")])),
        disk=None if disk is None else disk * 1e6,
    )


def check_numbers(**numbers: float | None) -> None:
    for name, number in numbers.items():
        if number is not None and not 0 < number < math.inf:
            raise UserError(f"`{name}` is {number:g}; give a number above 0")
    if (mfu := numbers["mfu"]) is not None and mfu > 1:
        raise UserError(f"`mfu` is {mfu:g}; give a fraction above 0, at most 1")


def change_device(
    device: Device,
    mfu: float | None,
    per_machine: int | None,
    network: float | None,
    cores: int | None,
) -> Device:
    """The device with what the caller knows better."""
    if device.name == CPU and mfu is not None:
        raise UserError("`mfu` is for GPUs: the speed of a CPU is measured; omit it")
    per_machine = per_machine or device.per_machine
    changes: dict[str, Any] = {"per_machine": per_machine}
    if mfu is not None:
        changes |= {"mfu": mfu, "reason": REQUESTED}
    if network is not None:
        changes["network"] = network * 1e9 / 8
    if cores is not None:
        changes["cores"] = max(1, cores // per_machine)
    return replace(device, **changes)


def forecast_recipe(
    recipe: Recipe,
    source: Source,
    cluster: Cluster,
    *,
    devices: str,
    images: int,
    shard: Shard,
    price: float | None,
) -> Forecast:
    """The forecast for a complete recipe."""
    train, count, itemsize = recipe.train, cluster.count, compute_itemsize(recipe, cluster.device)
    val = round(len(split_indices(source, "val")) * images / len(split_indices(source, "train")))
    steps = train.steps or train.epochs * (images // train.batch)
    shard = choose_shard(recipe, cluster, itemsize, train.shard if shard == "auto" else shard)
    flops, others = training_flops(recipe, images, val, steps)
    sent = sent_bytes(recipe, cluster, itemsize, shard)
    memory = predict_memory(recipe, cluster, itemsize, shard)
    step = predict_step(recipe, cluster, flops / steps, sent)
    seconds = steps * step.total + others / count / cluster.rate
    hours, speed = count * seconds / 3600, train.batch / step.total
    return Forecast(
        data=source.name,
        model=recipe.model or Path(recipe.weights).name,
        parameters=count_parameters(recipe.vit),
        devices=devices,
        machines=cluster.machines,
        images=images,
        epochs=math.ceil(steps * train.batch / images) if train.steps else train.epochs,
        steps=steps,
        batch=train.batch,
        seconds=seconds,
        device_hours=hours,
        price=price,
        cost=None if price is None else price * hours,
        flops=flops + others,
        mfu=(flops + others) / seconds / count / cluster.peak if cluster.peak else None,
        measured=cluster.measured,
        images_per_second=speed,
        limit=find_limit(step),
        step=step,
        sent_bytes=sent,
        read_bytes_per_second=speed * cluster.image_bytes / cluster.machines,
        shard=shard,
        memory=memory,
        assumptions=tuple(list_assumptions(cluster)),
        warnings=tuple(find_warnings(recipe, cluster, shard, memory, itemsize)),
    )


def compute_itemsize(recipe: Recipe, device: Device) -> int:
    """Bytes of the numbers in matrix products: "auto" is bfloat16 where the device has it."""
    if recipe.train.precision == "auto":
        return 2 if device.bfloat16 and device.name != CPU else 4
    return 4 if recipe.train.precision == "float32" else 2


def list_assumptions(cluster: Cluster) -> Iterator[str]:
    """Every number that was not computed, with its source."""
    device = cluster.device
    if cluster.measured:
        yield f"compute: {cluster.rate / 1e9:,.3g} GFLOP/s on one device, measured here"
    else:
        peak = f"{cluster.peak / 1e12:g} TFLOP/s"
        yield (
            f"compute: {100 * device.mfu:.0f} % of {peak} ({device.reason}); change it with `mfu`"
        )
    if cluster.machines > 1:
        yield (
            f"network: {8 * device.network / 1e9:g} Gbit/s for each of {cluster.machines} machines "
            f"of {device.per_machine}, of which {ACHIEVED:.0%} is achieved; change it with "
            f"`network` and `per_machine`"
        )
    elif cluster.count > 1:
        reached = "" if device.name == CPU else f", of which {ACHIEVED:.0%} is achieved"
        yield f"link: {device.link / 1e9:g} GB/s between devices{reached}"
    where = "cached" if device.name == CPU else "decoded in every epoch"
    threads = device.cores * device.per_machine
    yield (
        f"input: images {where}, {1000 * cluster.core_seconds:.2g} ms each on a core of this "
        f"machine, {threads} threads per machine; change it with `cores`"
    )


def measure_rate(recipe: Recipe, device: Device, count: int) -> float | None:
    """FLOP per second of training steps, if such a device is in this machine."""
    kind = "cpu" if device.name == CPU else "cuda"
    if kind == "cuda" and not (
        torch.cuda.is_available()
        and device.name.partition("-")[0].lower() in torch.cuda.get_device_name().lower()
    ):
        return None
    train = replace(recipe.train, frozen=0, drop_patches=0.0, accumulate=1, compile=False,
                    recompute=False)  # fmt: skip
    whole = replace(recipe, weights="", tune="all", teacher=None, train=train)
    vit = training_vit(recipe)
    flops = 6 * count_macs(vit)
    batch = min(math.ceil(train.batch / count), max(1, int(TRIAL_FLOPS[kind] / flops)))
    with limit_threads(device.cores if kind == "cpu" else torch.get_num_threads()):
        learner = make_learner(whole, torch.device(kind))
        images = torch.randn(batch, vit.channels, *vit.size, device=kind)
        targets = torch.zeros(batch, vit.classes, device=kind)
        targets[:, 0] = 1
        times = [
            seconds_per_step(learner, repeat((images, targets)), train, vit.patches, TRIAL)
            for _ in range(TRIALS)
        ]
    return flops * batch / statistics.median(times)


def measure_reading(recipe: Recipe, source: Source, *, cached: bool) -> float:
    """Seconds of one core to decode and augment a training image; cached, only to augment it."""
    sample = load_into_memory(source, sample_indices(source).tolist())
    settings = replace(
        recipe.data, workers=0, disk_gb=0, balanced=False, shuffle="all", skip_broken=True
    )
    if not cached:
        settings = replace(settings, cache_gb=0)
    with limit_threads(1):
        loader = Loader(sample, recipe.preprocess, settings, batch=len(sample), progress=False)
        batches = loader.training()
        next(batches)
        start = time.perf_counter()
        images = sum(len(batch.images) for batch in islice(batches, READ_PASSES))
    return (time.perf_counter() - start) / images
