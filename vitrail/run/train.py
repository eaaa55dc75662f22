"""Trains a classifier on a data set, from the choice of its recipe to the report."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitrail import files
from vitrail.arguments import check_arguments
from vitrail.data.config import Preprocess
from vitrail.data.loader import Loader
from vitrail.data.source import Source, label_kind
from vitrail.data.split import keep_labels
from vitrail.errors import UserError
from vitrail.pretraining.config import TeacherConfig
from vitrail.run.build import make_learner, make_loader
from vitrail.run.dataset import open_on_all_ranks, shared_fingerprint, store_fingerprint
from vitrail.run.design import Design, design_recipe
from vitrail.run.finish import complete_run
from vitrail.run.plan import plan_steps
from vitrail.run.progress import Progress
from vitrail.run.recipe import (
    Recipe,
    merge_settings,
    recipe_to_toml,
    settings_from_dict,
    settings_to_dict,
)
from vitrail.run.request import AUTO, Options, Request, name_data, read_settings
from vitrail.run.result import Run
from vitrail.run.resume import resume_run
from vitrail.run.semi_supervised import attach_unlabelled
from vitrail.run.sharding import choose_sharding
from vitrail.run.storage.folder import (
    check_available,
    claim_folder,
    create_run_folder,
    find_restarted_run,
    lock_run,
    remove_on_failure,
)
from vitrail.run.storage.journal import import_summary_writer
from vitrail.run.storage.record import RECIPE, prepend_reasons
from vitrail.run.teacher import (
    CALLABLE,
    Teacher,
    attach_teacher,
    check_stored_answers,
    describe_teacher,
    open_teacher,
)
from vitrail.run.terminal import Terminal
from vitrail.run.transfer import expect_accuracy
from vitrail.run.unlabelled import open_images
from vitrail.run.whitening import whiten_stem
from vitrail.training.device import pick_device
from vitrail.training.distributed import TIMEOUT, World, join_world

PRETRAINED = "-pre"  # in the name of a run that learns without labels


@check_arguments
def train(
    data: str | Path | Source | None = None,
    *,
    model: str | None = None,
    weights: str | Path = AUTO,
    tune: str = AUTO,
    minutes: float | None = None,
    epochs: int | None = None,
    recipe: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    report: bool = True,
    test: bool = True,
    tensorboard: bool = False,
    quiet: bool = False,
    timeout: float = TIMEOUT,
    labels_only: float | None = None,
    teacher: str | Path | Teacher | None = None,
    on_epoch: Callable[[dict[str, Any]], None] | None = None,
    started: float | None = None,
) -> Run:
    """Trains a classifier on a data set and returns the finished run.

    Chooses a recipe from the data, prints why, trains, evaluates the best weights on the validation
    and test splits, and writes everything to a run folder. `settings` win over the file `recipe`,
    which wins over what is chosen from the data.

    Started by torchrun, the processes train together. If torchrun restarts them after a failure,
    they resume the run that they have started.

    Args:
        data: a folder of class folders, a table (.csv, .tsv or .jsonl), a folder of tar shards,
            the name of a built-in data set, or what `vitrail.open_data` returned. By default the
            data of `recipe`.
        model: architecture to train from scratch, such as "Nano/4" or "S/16".
        weights: run folder, weight file or folder, or "hf:owner/name" to fine-tune. "auto" starts
            from published weights if the images are photos, "none" always from scratch.
        tune: what fine-tuning changes: "all", the "head" alone, the attention projections and the
            head ("proj"), or low-rank factors that are merged at the end ("lora"). "auto" decides
            by the size of the model and the number of images.
        minutes: time until the results are written; the number of steps is planned to fit.
        epochs: passes over the training split, instead of `minutes`.
        recipe: TOML file with any of the settings.
        settings: settings by section, such as `{"train": {"lr": 3e-4}, "vit": {"heads": 3}}`.
        seed: random seed of weights, data order, augmentation and dropout.
        out: run folder to create, by default runs/<data>-1, -2, ...
        device: "cpu", "cuda", "cuda:1", "mps"; "auto" picks a GPU if there is one.
        report: write report.html at the end.
        test: evaluate on the test split at the end.
        tensorboard: also write TensorBoard events to the run folder.
        quiet: print nothing.
        timeout: seconds that the processes of a torchrun wait for each other.
        labels_only: fraction of the training images whose labels are used. With `weights` "auto",
            small images without labels are used, too, if `minutes` allow it.
        teacher: run, weight file or folder, "timm:NAME" or `vitrail.Teacher` to distil: its
            predictions if it has the same classes, else its features. On a CPU it predicts each
            image and its mirror image once, within the `minutes`.
        on_epoch: called after each evaluation with its line of log.jsonl and the total `steps`.
        started: reading of `time.monotonic()` from which `minutes` count; by default this call.

    >>> run = vitrail.train("digits", epochs=1, report=False, quiet=True)
    >>> run.metrics["epochs"], run.classifier.predict("digit.png").label in run.classifier.classes
    (1, True)
    """
    started = time.monotonic() if started is None else started
    table = read_settings(recipe, settings or {}, minutes, epochs)
    if labels_only is not None:
        if not 0 < labels_only <= 1:
            raise UserError(f"`labels_only` is {labels_only:g}; give a fraction above 0, at most 1")
        table = merge_settings(table, {"data": {"labelled": float(labels_only)}})
    request = Request(
        data=name_data(data, table),
        model=model,
        weights=str(weights),
        tune=tune,
        minutes=minutes,
        epochs=epochs,
        seed=seed,
        device=device,
        teacher=str(teacher) if isinstance(teacher, Path) else teacher,
        settings=table,
    )
    options = Options(
        tensorboard=tensorboard, quiet=quiet, report=report, test=test, on_epoch=on_epoch
    )
    folder = None if out is None else files.expand_user(out)
    opened = None if data is None or isinstance(data, str | Path) else data
    with join_world(timeout) as world:
        return start_run(request, options.for_rank(world), folder, started, world, opened)


def start_run(
    request: Request,
    options: Options,
    out: Path | None,
    started: float,
    world: World,
    opened: Source | None = None,
) -> Run:
    """Starts a run in a new folder, or resumes the one that this torchrun has started."""
    world.on_leader(lambda: check_output(out, options, world.launch_id))
    source, request, why = open_source(request, opened, world)
    earlier = world.on_leader(lambda: find_restarted_run(out, source, world.launch_id))
    if earlier and world.on_leader(lambda: (Path(earlier) / RECIPE).is_file()):
        return resume_run(Path(earlier), request.device, options, world)
    device = pick_device(request.device, world.local_rank)
    design = share_design(lambda: design_recipe(source, request, device, world.size), device, world)
    design.reasons.extend([*request.reasons, *why])
    teacher = world.leader_first(lambda: open_teacher(request.asks_teacher, design.recipe, source))
    suffix = "" if request.method is None else PRETRAINED
    folder = Path(world.on_leader(lambda: earlier or str(create_run_folder(out, source, suffix))))
    terminal = Terminal(quiet=options.quiet)
    with lock_run(folder, world):
        terminal.print("\n  ".join(design.reasons))
        with remove_on_failure(folder, world):
            world.on_leader(lambda: claim_folder(folder, world.launch_id))
            loader = make_loader(design.recipe, source, device, world)
            progress = Progress(fingerprint=shared_fingerprint(source, world))
            loader.prepare("train", *options.splits)
            recipe = measure_normalisation(design, loader, world)
            recipe = ask_teacher(request, teacher, recipe, loader, terminal, world)
            attach_unlabelled(recipe, loader, world)
            learner = make_learner(recipe, device, world)
            whiten_stem(recipe, learner, loader)
            progress.expected = expect_accuracy(recipe, learner, loader, terminal)
            recipe = plan_steps(recipe, loader, learner, request.minutes, started, terminal, world)
            world.on_leader(
                lambda: write_start(folder, recipe, design.reasons, source, progress.fingerprint)
            )
        terminal.print(f"run {folder}")
        return complete_run(folder, recipe, loader, learner, progress, options, world)


def open_source(
    request: Request, opened: Source | None, world: World
) -> tuple[Source, Request, list[str]]:
    """The data of a run, the request with the labels that it has, and reasons."""
    if opened is not None:
        request = request.with_settings_of(opened)
    if request.method is not None:
        if (
            opened is None or getattr(opened, "requested_labels", None) == "partial"
        ):  # lacks unlabelled rows
            return open_for_pretraining(request, world)
        return opened, request, []
    if opened is not None:
        return keep_labels(opened, request.labelled), request, []
    source = open_on_all_ranks(
        request.data, request.columns, request.labels, world, request.labelled
    )
    return source, request, []


def open_for_pretraining(request: Request, world: World) -> tuple[Source, Request, list[str]]:
    """The images, the request with the labels that they have, and reasons."""
    source, reason = open_images(request.data, request.columns, request.labels, world)
    kind = label_kind(source)
    request = request.with_labels(kind if kind in ("none", "partial") else request.labels)
    return source, request, [reason] if reason else []


def ask_teacher(
    request: Request,
    teacher: Teacher | None,
    recipe: Recipe,
    loader: Loader,
    terminal: Terminal,
    world: World,
) -> Recipe:
    """The recipe with its teacher, whose answers the loader adds to its batches from now on."""
    if request.asks_teacher is None:
        return recipe
    requested = request.settings.get("teacher", {}).get("temperature")

    def describe() -> dict[str, Any]:
        if teacher is not None:
            return settings_to_dict(describe_teacher(teacher, recipe, loader, requested))
        assert recipe.teacher is not None
        check_stored_answers(recipe.teacher, loader.source)
        return settings_to_dict(recipe.teacher)

    config = settings_from_dict(TeacherConfig, world.on_slow_leader(describe))
    what = f"features of width {config.features}"
    if not config.features:
        what = f"predictions at temperature {config.temperature:g}, half of the loss"
    name = config.weights
    if name.startswith(CALLABLE):
        name = (teacher.name if teacher is not None else "") or "given in Python"
    terminal.print(f"teacher {name}: {what}")
    recipe = replace(recipe, teacher=config)
    attach_teacher(recipe, loader, world)
    return recipe


def check_output(out: Path | None, options: Options, launch_id: str) -> None:
    """Raises early if the results could not be written."""
    if options.tensorboard:
        import_summary_writer()
    check_available(out, launch_id)


def share_design(design: Callable[[], Design], device: torch.device, world: World) -> Design:
    """The leader's design with the decision whether to shard, on every rank."""

    def to_json() -> tuple[dict[str, Any], list[str], dict[str, Any], list[str]]:
        mine = design()
        sharded, why = choose_sharding(mine.recipe, device, world.size)
        return settings_to_dict(sharded), [*mine.reasons, *why], mine.settings, mine.measured

    table, reasons, chosen, measured = world.on_leader(to_json)
    recipe = settings_from_dict(Recipe, table)
    return Design(recipe=recipe, reasons=reasons, settings=chosen, measured=measured)


def measure_normalisation(design: Design, loader: Loader, world: World) -> Recipe:
    """The recipe with the mean and std of the training images; the loader uses it from now on."""
    recipe = design.recipe
    if design.measured:
        found = dict(zip(("mean", "std"), world.on_leader(loader.measure), strict=True))
        chosen = {name: found[name] for name in design.measured}
        preprocess = Preprocess.from_dict({**recipe.preprocess.to_dict(), **chosen})
        recipe = replace(recipe, preprocess=preprocess)
        loader.preprocess = preprocess
    return recipe


def write_start(
    folder: Path, recipe: Recipe, reasons: list[str], source: Source, checksum: str
) -> None:
    """Writes what a resume needs before the first checkpoint."""
    store_fingerprint(folder, source, checksum)
    files.write_file(folder / RECIPE, prepend_reasons(reasons, recipe_to_toml(recipe)))
