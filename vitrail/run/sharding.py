"""Chooses whether to shard a training and to recompute activations, by memory, with a reason."""

from dataclasses import replace

import torch

from vitrail.errors import UserError
from vitrail.run.devices import Device, this_cpu
from vitrail.run.forecast import USABLE, Cluster, predict_memory
from vitrail.run.recipe import Recipe
from vitrail.training.learner import compute_dtype


def choose_sharding(
    recipe: Recipe, device: torch.device, processes: int
) -> tuple[Recipe, list[str]]:
    """The recipe with `train.shard` decided for these processes, and why."""
    requested = recipe.train.shard
    if processes == 1:
        if requested == "full":
            why = "`train.shard` full needs two processes or more; one has the whole model"
            return recipe, [f"sharding off: {why}"]
        return change_train(recipe, shard="off"), []
    if requested == "off":
        return recipe, []
    obstacle = find_obstacle(recipe, device, processes)
    if requested == "full" and obstacle:
        raise UserError(f"`train.shard` full: {obstacle}, or set `train.shard` off")
    cluster = Cluster(device=describe_device(device, processes), count=processes, rate=1.0)
    itemsize = compute_dtype(recipe.train.precision, device).itemsize
    whole = predict_memory(recipe, cluster, itemsize, "off")
    needed = f"{whole.total / 1e9:.1f} GB per process"
    usable = f"{USABLE * whole.available / 1e9:.1f} GB"
    if requested == "auto" and (whole.fits or obstacle):
        why = f"a training of {needed} fits into {usable}"
        if not whole.fits:
            why = f"a training of {needed} does not fit into {usable}, but {obstacle}"
        return change_train(recipe, shard="off"), [f"sharding off: {why}"]
    recipe = change_train(recipe, shard="full")
    why = "requested" if requested == "full" else f"{needed} does not fit into {usable}"
    sharded = predict_memory(recipe, cluster, itemsize, "full")
    if not sharded.fits and not recipe.train.recompute:
        recipe = change_train(recipe, recompute=True)
        sharded = predict_memory(recipe, cluster, itemsize, "full")
        why += "; activations are recomputed, as they would not fit either"
    reasons = [f"sharding full: {why}; {sharded.total / 1e9:.1f} GB per process with it"]
    if recipe.train.probe:
        recipe = change_train(recipe, probe=0)
        reasons.append("head: starts from zeros, as a linear probe needs the whole model")
    return recipe, reasons


def change_train(recipe: Recipe, **changes: object) -> Recipe:
    return replace(recipe, train=replace(recipe.train, **changes))  # type: ignore[arg-type]


def find_obstacle(recipe: Recipe, device: torch.device, processes: int) -> str | None:
    """Why this training cannot be sharded, and what to change."""
    train, width = recipe.train, recipe.vit.width
    if device.type not in ("cpu", "cuda"):
        return f"{device.type} cannot shard; set `device` to cuda or cpu"
    if recipe.pretrain is not None:
        return "a pretraining cannot be sharded; choose a smaller `model`"
    if recipe.uses_unlabelled:
        return "images without labels need the whole model; set `joint.ratio` to 0"
    if recipe.tune != "all" or train.frozen:
        return "frozen weights cannot be sharded; set `tune` to all"
    if train.precision == "float16":
        return "float16 cannot be sharded; set `train.precision` to bfloat16 or float32"
    if train.compile:
        return "a compiled model cannot be sharded; set `train.compile` to false"
    if processes > width:
        return (
            f"{processes} processes cannot share matrices of {width} rows; "
            f"start at most {width} processes"
        )
    if train.batch // processes < train.accumulate:
        return (
            f"{processes} processes have fewer images of a batch of {train.batch} than "
            f"{train.accumulate} micro-batches; lower `train.accumulate`"
        )
    return None


def describe_device(device: torch.device, processes: int) -> Device:
    """The memory of the device that each process trains on."""
    cpu = this_cpu(processes)
    if device.type == "cpu":
        return cpu
    return replace(cpu, name="gpu", memory=torch.cuda.mem_get_info(device)[1])
