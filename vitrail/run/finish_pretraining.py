"""Trains a prepared pretraining to its end, then measures its features and writes the results."""

import json
from pathlib import Path
from typing import Any

from vitrail import files
from vitrail.data.loader import Loader
from vitrail.data.source import split_indices
from vitrail.model.vit import ViT
from vitrail.run.drive import Driver
from vitrail.run.fractions import compare_with_scratch, count_labelled_steps
from vitrail.run.progress import Progress
from vitrail.run.quality import (
    adapt_backbone,
    describe_collapse,
    describe_few_images,
    evaluate_pretraining,
    measure_random_rank,
    probe_backbone,
)
from vitrail.run.recipe import Recipe
from vitrail.run.recorder import open_recorder
from vitrail.run.request import Options
from vitrail.run.result import Run, make_run
from vitrail.run.storage import predictions
from vitrail.run.storage.record import METRICS, MODEL
from vitrail.run.terminal import Terminal
from vitrail.training.distributed import World
from vitrail.training.learner import Learner
from vitrail.zoo.file import save_model


def complete_pretraining(
    folder: Path,
    recipe: Recipe,
    loader: Loader,
    learner: Learner,
    progress: Progress,
    metadata: dict[str, Any],
    options: Options,
    world: World,
) -> Run:
    """Trains from where `progress` is to the end, measures the features, makes the report."""
    from vitrail.run.finish import make_report

    assert recipe.pretrain is not None
    method = recipe.pretrain.method
    metadata |= {"classes": None, "pretraining": method}
    if progress.random_rank is None:
        progress.random_rank = measure_random_rank(recipe, learner, loader, world)
    images = len(split_indices(loader.source, "val"))
    if (warning := describe_few_images(images)) is not None:
        Terminal(quiet=options.quiet).print(warning)
    with open_recorder(folder, recipe, progress, metadata, options, world) as recorder:
        Driver(folder, recipe, loader, learner, progress, recorder, world).drive()
    backbone = adapt_backbone(learner, loader)
    scores = evaluate_pretraining(recipe, learner, backbone, loader, world)
    metrics = {
        "run": str(folder),
        "model": recipe.model,
        "method": method,
        "epochs": -(-progress.step // loader.steps),
        "steps": progress.step,
        "seconds": round(progress.seconds, 1),
        "loss": scores["val_loss"],
        "rank": scores["val_rank"],
        "random_rank": progress.random_rank,
        "collapsed": describe_collapse(scores, method, images, progress.random_rank),
    }
    metrics = world.on_slow_leader(
        lambda: write_quality(folder, recipe, backbone, loader, metadata, metrics)
    )
    if options.report:
        make_report(folder, loader.as_single_process(), Terminal(quiet=options.quiet))
    return make_run(folder, metrics, world.is_leader)


def write_quality(
    folder: Path,
    recipe: Recipe,
    backbone: ViT,
    loader: Loader,
    metadata: dict[str, Any],
    metrics: dict[str, Any],
) -> dict[str, Any]:
    """Probes the features, then writes the model and the metrics, which mark the end."""
    probe = probe_backbone(recipe, backbone, loader)
    if probe is not None:
        rows = compare_with_scratch(recipe, backbone, loader.with_labels())
        steps = count_labelled_steps(recipe, loader.world_size)
        probe = {**probe, "steps": steps, "trained": rows}
    metrics = {**metrics, "probe": probe}
    results = {"metrics": {name: metrics[name] for name in ("loss", "rank", "probe")}}
    environment = {"environment": predictions.describe_environment(), "best": None}
    save_model(folder / MODEL, backbone, {**metadata, **results, **environment})
    document = json.dumps(metrics, indent=1)
    files.write_file(folder / METRICS, document + "\n")
    stored: dict[str, Any] = json.loads(document)  # as a resume will read them
    return stored
