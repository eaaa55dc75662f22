"""Resumes a run from its newest checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail import files
from vitrail.arguments import check_arguments
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.run import finish
from vitrail.run.build import make_learner, make_loader
from vitrail.run.dataset import check_unchanged, open_on_all_ranks, shared_fingerprint
from vitrail.run.progress import Progress
from vitrail.run.rebuilt import REBUILT
from vitrail.run.recipe import (
    Recipe,
    read_recipe,
    recipe_to_toml,
    settings_from_dict,
    settings_to_dict,
)
from vitrail.run.request import Options
from vitrail.run.result import Run, make_run
from vitrail.run.semi_supervised import attach_unlabelled
from vitrail.run.sharding import choose_sharding
from vitrail.run.storage import predictions
from vitrail.run.storage.folder import lock_run
from vitrail.run.storage.journal import import_summary_writer
from vitrail.run.storage.record import (
    CHECKPOINTS,
    LOG,
    METRICS,
    MODEL,
    RECIPE,
    check_is_run,
    prepend_reasons,
    read_metrics,
    read_reasons,
)
from vitrail.run.teacher import attach_teacher
from vitrail.run.terminal import Terminal
from vitrail.run.transfer import expect_accuracy, start_from_features
from vitrail.run.whitening import whiten_stem
from vitrail.training import checkpoint
from vitrail.training.config import Shard
from vitrail.training.device import pick_device
from vitrail.training.distributed import TIMEOUT, World, join_world
from vitrail.training.learner import Learner
from vitrail.training.sharding import rank_rows
from vitrail.zoo.file import load_model


@check_arguments
def resume(
    run: str | Path,
    *,
    device: str = "auto",
    skip_broken: bool = False,
    shard: Shard | None = None,
    report: bool = True,
    test: bool = True,
    quiet: bool = False,
    timeout: float = TIMEOUT,
    on_epoch: Callable[[dict[str, Any]], None] | None = None,
) -> Run:
    """Resumes a run from its newest checkpoint; a finished run is returned as it is.

    The result equals that of an uninterrupted run bit for bit, on the same machine with the same
    versions and number of threads.

    Args:
        run: a run folder.
        device: "cpu", "cuda", "cuda:1", "mps"; "auto" picks a GPU if there is one.
        skip_broken: from now on, skip images that cannot be read.
        shard: "full" divides weights and optimizer among the processes of a torchrun (FSDP), "off"
            does not, "auto" decides by memory; by default as before.
        report: write report.html at the end.
        test: evaluate on the test split at the end.
        quiet: print nothing.
        timeout: seconds that the processes of a torchrun wait for each other.
        on_epoch: called after each evaluation with its line of log.jsonl and the total `steps`.

    >>> run = vitrail.resume("runs/digits-1")
    >>> sorted(run.metrics)
    ['epochs', 'model', 'run', 'seconds', 'steps', 'test', 'trust', 'val']
    """
    options = Options(quiet=quiet, report=report, test=test, on_epoch=on_epoch)
    with join_world(timeout) as world:
        folder = files.expand_user(run)
        return resume_run(folder, device, options.for_rank(world), world, skip_broken, shard)


def resume_run(
    folder: Path,
    device: str,
    options: Options,
    world: World,
    skip_broken: bool = False,
    shard: Shard | None = None,
) -> Run:
    """Only the leader reads the run folder; other ranks must see it only if they are sharded."""
    terminal = Terminal(quiet=options.quiet)
    world.on_leader(lambda: check_is_run(folder))
    with lock_run(folder, world):
        metrics = world.on_leader(lambda: read_metrics(folder))
        if metrics is not None:
            return return_finished(folder, metrics, options, terminal, world)
        target = pick_device(device, world.local_rank)

        def read() -> dict[str, Any]:
            stored = read_stored(folder, skip_broken, shard)
            return settings_to_dict(decide_sharding(stored, target, world, terminal))

        recipe = settings_from_dict(Recipe, world.on_leader(read))
        source = open_recipe_data(recipe, world)
        loader = make_loader(recipe, source, target, world)
        checksum = shared_fingerprint(source, world)
        learner, stored, fresh = load_learner(
            folder, recipe, source, checksum, target, world, terminal
        )
        progress = Progress.from_dict(stored)
        if skip_broken or shard:
            world.on_leader(lambda: store_recipe(folder, recipe))
        tensorboard = world.on_leader(lambda: can_use_tensorboard(folder, options, terminal))
        options = replace(options, tensorboard=tensorboard)
        if recipe.pretrain is not None:
            options = replace(options, test=False)
        terminal.print(f"run {folder}: resuming from step {progress.step} of {recipe.train.steps}")
        loader.prepare("train", *options.splits)
        if recipe.teacher is not None:
            attach_teacher(recipe, loader, world)
        attach_unlabelled(recipe, loader, world)
        if fresh:
            whiten_stem(recipe, learner, loader)
            progress.expected = expect_accuracy(recipe, learner, loader, terminal)
        else:
            start_from_features(recipe, learner, loader, fresh=False)
        return finish.complete_run(folder, recipe, loader, learner, progress, options, world)


def open_recipe_data(recipe: Recipe, world: World) -> Source:
    config, pretraining = recipe.data, recipe.pretrain is not None
    return open_on_all_ranks(
        recipe.source, config.columns, config.labels, world, config.labelled, pretraining
    )


def decide_sharding(
    recipe: Recipe, device: torch.device, world: World, terminal: Terminal
) -> Recipe:
    """The recipe for these processes, which may be more or fewer than before."""
    decided, reasons = choose_sharding(recipe, device, world.size)
    for reason in reasons:
        terminal.print(reason)
    return decided


def return_finished(
    folder: Path, metrics: dict[str, Any], options: Options, terminal: Terminal, world: World
) -> Run:
    terminal.print(f"{folder} is already finished")
    run = make_run(folder, metrics, world.is_leader)
    if options.report and run.report is None:
        finish.make_report(folder, None, terminal)
    return run


def read_stored(folder: Path, skip_broken: bool, shard: Shard | None = None) -> Recipe:
    """The recipe of a run, after removing what a kill may have left in its folder."""
    files.remove_temporary(folder, RECIPE, LOG, MODEL, METRICS, predictions.FILE)
    files.remove_temporary(folder / REBUILT, "*.png")
    table = read_recipe(folder / RECIPE)
    recipe = settings_from_dict(Recipe, table)
    if missing := find_missing(settings_to_dict(recipe), table):
        raise UserError(
            f"the recipe {folder / RECIPE} is incomplete, {missing} is missing: it was truncated "
            f"or edited; restore it, or train again"
        )
    if skip_broken:
        recipe = replace(recipe, data=replace(recipe.data, skip_broken=True))
    if shard is not None:
        recipe = replace(recipe, train=replace(recipe.train, shard=shard))
    return recipe


def find_missing(complete: Mapping[str, Any], table: Mapping[str, Any]) -> str | None:
    """A setting that a run stores, but that its recipe lacks: no default may replace it."""
    for name, value in complete.items():
        if name not in table:
            return name
        if isinstance(value, Mapping) and (inner := find_missing(value, table[name])):
            return f"{name}.{inner}"
    return None


def load_learner(
    folder: Path,
    recipe: Recipe,
    source: Source,
    checksum: str,
    device: torch.device,
    world: World,
    terminal: Terminal,
) -> tuple[Learner, dict[str, Any], bool]:
    """The learner and the progress of the newest checkpoint, and whether there is none yet.

    Unsharded, the leader broadcasts all tensors; sharded, each rank reads its rows.
    """

    def load(tensors: bool) -> tuple[dict[str, Tensor], tuple[dict[str, Any], str | None]]:
        found, progress, path = load_progress(
            folder, recipe, source, checksum, terminal, tensors=tensors
        )
        return found, (progress, path)

    if recipe.train.shard != "full" or world.size == 1:
        tensors, (stored, path) = world.load_on_leader(lambda: load(True))
        return restore_learner(recipe, tensors, device), stored, path is None
    stored, path = world.on_leader(lambda: load(False)[1])
    if path is None:
        return make_learner(recipe, device, world), stored, True
    learner = make_learner(replace(recipe, weights=""), device, world)

    def find_rows(name: str, shape: tuple[int, ...]) -> slice:
        if not learner.holds_rows(name, shape):
            return slice(None)
        return rank_rows(shape[0], world.rank, world.size)

    if not Path(path).is_dir():
        raise UserError(
            f"rank {world.rank} cannot see {path}: a sharded training needs a run folder on a disk "
            f"that all machines share; move it there, or set `shard` off"
        )
    learner.restore(checkpoint.read_parts(Path(path), find_rows))
    return learner, stored, False


def load_progress(
    folder: Path,
    recipe: Recipe,
    source: Source,
    checksum: str,
    terminal: Terminal,
    *,
    tensors: bool = True,
) -> tuple[dict[str, Tensor], dict[str, Any], str | None]:
    """The tensors, progress and path of the newest checkpoint; empty if there is none yet."""
    saved = checkpoint.load_checkpoint(folder / CHECKPOINTS, tensors=tensors)
    progress = Progress(fingerprint=checksum)
    if saved is not None:
        progress = Progress.from_dict(saved.progress)
    stored = None if saved is None else progress.fingerprint
    warnings = [check_unchanged(folder, recipe, source, checksum, stored)]
    if saved is not None:
        warnings += saved.warnings
    if progress.best and not has_model(folder):
        warnings.append(
            f"{MODEL} is missing or damaged; the best weights from now on will be saved"
        )
        progress.best = None
    for warning in filter(None, warnings):
        terminal.print(warning)
    if saved is None:
        return {}, progress.to_dict(), None
    return saved.tensors, progress.to_dict(), str(saved.path.resolve())


def has_model(folder: Path) -> bool:
    """Whether the best weights so far can be loaded."""
    try:
        load_model(folder / MODEL)
    except UserError:
        return False
    return True


def restore_learner(recipe: Recipe, tensors: dict[str, Tensor], device: torch.device) -> Learner:
    if not tensors:
        return make_learner(recipe, device)
    # a checkpoint has all tensors: the weights that the run started from may not exist any more
    learner = make_learner(replace(recipe, weights=""), device)
    learner.restore(tensors)
    return learner


def store_recipe(folder: Path, recipe: Recipe) -> None:
    """Writes a changed recipe, with the reasons of the original."""
    reasons = read_reasons(folder / RECIPE)
    files.write_file(folder / RECIPE, prepend_reasons(reasons, recipe_to_toml(recipe)))


def can_use_tensorboard(folder: Path, options: Options, terminal: Terminal) -> bool:
    """Whether to continue TensorBoard's events; if it is not installed, the run resumes without."""
    if not options.tensorboard and not (folder / "tensorboard").is_dir():
        return False
    try:
        import_summary_writer()
    except UserError as error:
        terminal.print(f"{error}; resuming without its events")
        return False
    return True
