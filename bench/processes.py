"""Two processes with one thread each: FSDP2 against DDP, both against one, checkpoints, memory."""

import gc
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from functools import cache, partial
from itertools import repeat
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench.measure import Budget, Case, OnProgress, Times, measure
from bench.process import ROOT, reset_peak_memory, resident_memory
from vitrail.run.build import make_learner
from vitrail.run.devices import this_cpu
from vitrail.run.forecast import Cluster, predict_memory
from vitrail.run.recipe import Recipe
from vitrail.training.checkpoint import CHUNK, save_checkpoint
from vitrail.training.config import Shard, TrainConfig
from vitrail.training.distributed import SINGLE, World, join_world
from vitrail.training.loop import Step, train_steps
from vitrail.zoo.presets import preset

RANKS = 2
MODEL, IMAGE, BATCH = "Mini/4", 32, 128
PARAMETERS, COPIES = 600_000_000, 3  # in a checkpoint: weights and the two moments of AdamW
LARGE, BLOCKS, LARGE_IMAGE = "H/14", 2, 56
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
NOTE = (
    "Vitrail is FSDP2 in the first row, DDP in the second, against one process that trains on half "
    "of the batch: equal times would be the ideal. A checkpoint is compared with a plain write of "
    "as many bytes, both until they are on the disk; memory with its closed form."
)


def run(budget: Budget, progress: OnProgress) -> dict[str, Any]:
    cases = [
        Case(
            label=f"step of {MODEL}, FSDP2 and DDP",
            unit="ms",
            measure=partial(measure_steps, {"vitrail": "full", "DDP": "off"}),
        ),
        Case(
            label=f"step of {MODEL}, {RANKS} processes and one",
            unit="ms",
            measure=partial(measure_steps, {"vitrail": "off", "one process": "single"}),
        ),
        Case(
            label=f"checkpoint of {PARAMETERS // 10**6} M parameters",
            unit="s",
            measure=lambda budget: launch("checkpoint", 1),
        ),
        Case(
            label=f"peak memory of a rank, {LARGE} with {BLOCKS} blocks",
            unit="MB",
            measure=lambda budget: launch("memory", 1),
        ),
    ]
    try:
        return {"cases": measure(cases, budget, progress), "note": NOTE}
    finally:
        measured_steps.cache_clear()


def measure_steps(contenders: dict[str, str], budget: Budget) -> Times:
    times = measured_steps(max(budget.min_rounds, min(budget.rounds, int(2 * budget.seconds))))
    return {name: times[kind] for name, kind in contenders.items()}


@cache
def measured_steps(rounds: int) -> Times:
    """All kinds of steps in the same processes, interleaved."""
    return launch("steps", rounds)


def launch(kind: str, rounds: int) -> dict[str, list[float]]:
    """What the leader of a torchrun of two processes measures."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    settings = {"model": MODEL, "batch": BATCH, "parameters": PARAMETERS, "large": LARGE}
    with tempfile.TemporaryDirectory() as folder:
        arguments = json.dumps({"rounds": rounds, "folder": folder, **settings})
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *command, "-m", "bench.processes", kind, arguments],
            env={**os.environ, **ENVIRONMENT},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"a benchmark process failed:\n{done.stderr}")
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def make_recipe(
    model: str, image: int, batch: int, shard: Shard, depth: int | None = None
) -> Recipe:
    train = TrainConfig(batch=batch, optimizer="adamw", ema=0.999, shard=shard)
    config = preset(model, image=image, classes=10, head="linear", depth=depth)
    return Recipe(vit=config, train=train)


def time_steps(world: World, rounds: int, model: str, batch: int) -> dict[str, list[float]]:
    """Seconds of steps: sharded, with DDP, and of the leader alone while the other ranks wait."""
    images = torch.randn(batch // world.size, 3, IMAGE, IMAGE)
    labels = torch.zeros(len(images), dtype=torch.int64)
    worlds: dict[str, World] = {"full": world, "off": world, "single": SINGLE}
    steps = {}
    for kind, some in worlds.items():
        shard: Shard = "full" if kind == "full" else "off"
        recipe = make_recipe(model, IMAGE, len(images) * some.size, shard)
        learner = make_learner(recipe, torch.device("cpu"), some)
        steps[kind] = train_steps(
            learner, repeat((images, labels)), recipe.train, 10**6, world=some
        )
    times: dict[str, list[float]] = {kind: [] for kind in worlds}
    order, rng = list(worlds), random.Random(0)
    for number in range(rounds + 2):  # the first two allocate memory
        rng.shuffle(order)
        for kind in order:
            world.all_reduce(1)
            start = perf_counter()
            if kind != "single" or world.is_leader:
                assert isinstance(next(steps[kind]), Step)
            if number >= 2:
                times[kind].append(perf_counter() - start)
    world.all_reduce(1)
    return times


def time_checkpoint(world: World, folder: Path, parameters: int) -> dict[str, list[float]]:
    """Seconds to save this rank's part, and to write as many bytes without more."""
    names, size = 24, parameters // world.size // 24
    shared = torch.randn(size)  # one tensor under all names: less memory, the same bytes
    tensors = {f"{copy}/{name}": shared for copy in range(COPIES) for name in range(names)}
    seconds: dict[str, list[float]] = {"vitrail": [], "plain write": []}
    (folder / "run").mkdir(exist_ok=True)
    # whichever is first pays for fresh pages of the system's cache, so that each is first once
    for number, kind in enumerate(("plain write", "vitrail", "vitrail", "plain write")):
        world.all_reduce(1)
        start = perf_counter()
        if kind == "vitrail":
            save_checkpoint(folder / "run" / str(number), 1, tensors, {}, world)
        else:
            data = shared.view(torch.uint8).numpy().data
            with (folder / f"plain-{world.rank}").open("wb", buffering=0) as file:
                for _ in tensors:
                    for offset in range(0, len(data), CHUNK):
                        file.write(data[offset : offset + CHUNK])
                os.fsync(file.fileno())
        world.all_reduce(1)
        seconds[kind].append(perf_counter() - start)
        (folder / f"plain-{world.rank}").unlink(missing_ok=True)
        world.on_leader(partial(shutil.rmtree, folder / "run" / str(number), ignore_errors=True))
    return seconds


def measure_memory(world: World, name: str) -> dict[str, list[float]]:
    """MB of two sharded steps, without imports and one-time allocations; and their prediction."""
    cluster = Cluster(device=this_cpu(world.size), count=world.size, rate=1.0)
    for model, blocks in (("Pico/4", 1), (name, BLOCKS)):
        recipe = make_recipe(model, LARGE_IMAGE, 2 * world.size, "full", depth=blocks)
        images = torch.randn(2, 3, LARGE_IMAGE, LARGE_IMAGE)
        batches = repeat((images, torch.zeros(2, dtype=torch.int64)), 2)
        if world.is_leader:  # whose host holds all initial weights for a moment
            make_learner(recipe, torch.device("cpu"))
        gc.collect()
        before = resident_memory("VmRSS")
        learner = make_learner(recipe, torch.device("cpu"), world)
        gc.collect()
        reset_peak_memory()
        list(train_steps(learner, batches, recipe.train, 2, world=world))
        peak = resident_memory("VmHWM") - before
        del learner
    predicted = predict_memory(recipe, cluster, 4, "full").total / 2**20
    return {"vitrail": [peak], "predicted": [predicted]}


def main(kind: str, arguments: str) -> None:
    settings = json.loads(arguments)
    torch.set_num_threads(1)
    with join_world(600) as world:
        if kind == "steps":
            found = time_steps(world, settings["rounds"], settings["model"], settings["batch"])
        elif kind == "checkpoint":
            found = time_checkpoint(world, Path(settings["folder"]), settings["parameters"])
        else:
            found = measure_memory(world, settings["large"])
        if world.is_leader:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
