"""What a run writes and shows while it trains: log, checkpoints, best weights, progress."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from vitrail.data.loader import Loader
from vitrail.model.vit import ViT
from vitrail.pretraining.masked import MaskedAutoencoder
from vitrail.pretraining.objective import backbone_of
from vitrail.run.progress import Progress
from vitrail.run.rebuilt import REBUILT, save_rebuilt
from vitrail.run.recipe import Recipe
from vitrail.run.request import Options
from vitrail.run.semi_supervised import work_until
from vitrail.run.storage.journal import Journal
from vitrail.run.storage.record import ADAPTER, CHECKPOINTS, LOG, MODEL
from vitrail.run.terminal import Terminal
from vitrail.training import checkpoint
from vitrail.training.distributed import SINGLE, World, is_sharded
from vitrail.training.learner import Learner
from vitrail.training.sharding import gather_model
from vitrail.zoo.adapters import merge_adapter, save_adapter
from vitrail.zoo.file import save_model
from vitrail.zoo.metadata import Best


class NullRecorder:
    """The recorder of all ranks but the leader: writes nothing but their shards of a checkpoint."""

    def __init__(self, folder: Path, world: World = SINGLE):
        self.folder, self.world = folder, world

    def __enter__(self) -> "NullRecorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def print(self, text: str) -> None:
        """Shows a line of text."""

    def advance(self, step: int) -> None:
        """Updates the progress bar after a step."""

    def log_step(self, line: dict[str, Any]) -> None:
        """Logs and shows a step; called every `train.log_every` steps."""

    def log_epoch(self, line: dict[str, Any]) -> None:
        """Logs and shows an epoch, and calls `on_epoch` if it ended with an evaluation."""

    def save_checkpoint(self, learner: Learner, progress: Progress) -> None:
        """Saves all that a resume needs; of a sharded model, each rank what it holds."""
        if learner.sharded:
            self.save_shards(learner, progress)

    def save_shards(self, learner: Learner, progress: Progress) -> None:
        tensors = learner.tensors()
        if not self.world.is_leader:  # what all ranks have, the leader saves
            tensors = {name: x for name, x in tensors.items() if learner.holds_rows(name, x.shape)}
        folder = self.folder / CHECKPOINTS
        checkpoint.save_checkpoint(folder, progress.step, tensors, progress.to_dict(), self.world)

    def save_best(self, model: nn.Module, best: Best | None) -> None:
        """Saves the weights of the best evaluation so far, which the leader gathers."""
        if is_sharded(model):
            gather_model(model, self.world)

    def save_rebuilt(self, model: nn.Module, loader: Loader, step: int) -> None:
        """Saves a few validation images as a masked autoencoder rebuilds them now."""


class Recorder(NullRecorder):
    """The recorder of the leader; `metadata` describes the model in its file."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        progress: Progress,
        metadata: dict[str, Any],
        options: Options,
        world: World,
    ):
        super().__init__(folder, world)
        self.metadata, self.on_epoch = metadata, options.on_epoch
        self.recipe = recipe
        self.steps = recipe.train.steps
        self.terminal = Terminal(self.steps, options.quiet, partial(work_until, recipe))
        self.journal = Journal(folder / LOG, progress.step, options.tensorboard)

    def __enter__(self) -> "Recorder":
        self.terminal.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.journal.close()
        self.terminal.__exit__(kind, error, trace)

    def print(self, text: str) -> None:
        self.terminal.print(text)

    def advance(self, step: int) -> None:
        self.terminal.advance(step)

    def log_step(self, line: dict[str, Any]) -> None:
        self.journal.write(line)
        self.terminal.show_step(line["step"], line["epoch"], line["loss"], line["images_per_s"])

    def log_epoch(self, line: dict[str, Any]) -> None:
        self.journal.write(line)
        self.terminal.show_epoch(line)
        if self.on_epoch is not None and line.get("val_loss") is not None:
            self.on_epoch({**line, "steps": self.steps})

    def save_checkpoint(self, learner: Learner, progress: Progress) -> None:
        if learner.sharded:
            self.save_shards(learner, progress)
            return
        folder = self.folder / CHECKPOINTS
        checkpoint.save_checkpoint(folder, progress.step, learner.tensors(), progress.to_dict())

    def save_best(self, model: nn.Module, best: Best | None) -> None:
        if is_sharded(model):
            model = self.gather_backbone(backbone_of(model))
        if not self.folder.is_dir():
            raise checkpoint.missing_folder_error(self.folder, "the best model")
        evaluation = None if best is None else asdict(best)
        metadata = {**self.metadata, "best": evaluation}
        model = backbone_of(model)
        save_model(self.folder / MODEL, merge_adapter(model), metadata)
        if self.recipe.tune != "all":
            keys = ("classes", "channels", "preprocess", "name")
            document = {key: metadata[key] for key in keys} | {"base": self.recipe.weights}
            tune, frozen = self.recipe.tune, self.recipe.train.frozen
            save_adapter(self.folder / ADAPTER, model, tune, frozen, document)

    def gather_backbone(self, model: ViT) -> ViT:
        """The whole of a sharded model, in the memory of the host."""
        with torch.device("meta"):
            whole = ViT(model.config)
        whole.load_state_dict(gather_model(model, self.world), assign=True)
        return whole

    def save_rebuilt(self, model: nn.Module, loader: Loader, step: int) -> None:
        if isinstance(model, MaskedAutoencoder):
            save_rebuilt(self.folder / REBUILT, model, loader, step)


def open_recorder(
    folder: Path,
    recipe: Recipe,
    progress: Progress,
    metadata: dict[str, Any],
    options: Options,
    world: World,
) -> NullRecorder:
    """The one place where the leader and the other ranks part during training."""
    if not world.is_leader:
        return NullRecorder(folder, world)
    return Recorder(folder, recipe, progress, metadata, options, world)
