"""What happens between the steps: log, checkpoints, evaluation, signals, early stopping."""

import math
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from vitrail.data.loader import Loader
from vitrail.data.source import count_labels, is_multi_label, split_indices
from vitrail.errors import UserError
from vitrail.evaluation import multi_label
from vitrail.evaluation.metrics import accuracy, log_loss
from vitrail.pretraining.objective import backbone_of
from vitrail.run.progress import Progress
from vitrail.run.quality import adapt_backbone, describe_collapse, evaluate_pretraining
from vitrail.run.recipe import Recipe
from vitrail.run.recorder import NullRecorder
from vitrail.run.storage.predictions import SplitOutputs, predict_split_distributed
from vitrail.signals import ending_signals_handled
from vitrail.training import loop
from vitrail.training.distributed import SINGLE, World
from vitrail.training.learner import Learner
from vitrail.zoo.metadata import Best


class Stopped(SystemExit):
    """A signal stopped the run, after a checkpoint; the exit code is the shell's for it."""

    def __init__(self, number: int):
        super().__init__(128 + number)


class Driver:
    """Trains from where `progress` is to the last step; the recorder writes what it produces."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        loader: Loader,
        learner: Learner,
        progress: Progress,
        recorder: NullRecorder,
        world: World = SINGLE,
    ):
        self.folder, self.recipe, self.loader, self.learner = folder, recipe, loader, learner
        self.progress, self.recorder, self.world = progress, recorder, world
        self.logged_step, self.seconds_before = progress.step, progress.seconds
        self.logged = self.started = self.saved = time.monotonic()

    def drive(self) -> None:
        """Trains until all steps are done, patience ends, or a signal arrives."""
        config = self.recipe.train
        with catch_signals() as signals:
            if self.progress.epoch_steps and self.ends_epoch(self.progress.step):
                self.end_epoch(self.progress.step)  # its evaluation failed before the resume
            if config.probe and self.progress.step == 0:
                self.evaluate_start()
            for step in self.train_steps(signals):
                self.record_step(step)
                if self.ends_epoch(step.number):
                    self.end_epoch(step.number)
                if self.is_save_due():
                    self.save()
                if self.is_out_of_patience(step.number):
                    self.recorder.print(
                        f"early stopping: no improvement for {config.patience} epochs"
                    )
                    break
            if self.world.all_reduce(len(signals))[0]:  # on any rank
                self.save_and_announce()
                raise Stopped(*signals[:1] or (signal.SIGTERM,))
            self.save()

    def train_steps(self, signals: list[int]) -> Iterator[loop.Step]:
        """The remaining steps; if one fails, saves a checkpoint, then raises."""
        config, done = self.recipe.train, self.progress.step
        if self.is_out_of_patience(done):
            return
        loaded = self.loader.training(
            done, config.steps, unlabelled_from=self.recipe.first_joint_step
        )
        batches = ((batch.images, batch.targets) for batch in loaded)
        try:
            yield from loop.train_steps(
                self.learner,
                batches,
                config,
                config.steps,
                start=done,
                patches=self.recipe.patches,
                class_weights=self.class_weights(),
                multi_label=is_multi_label(self.loader.source),
                world=self.world,
                stop=signals,
            )
        except loop.Diverged:
            self.save()  # the weights are still those before the step
            raise
        except UserError:
            self.save_and_announce(failed=True)
            raise

    def class_weights(self) -> Tensor | None:
        if not self.recipe.train.class_weights:
            return None
        source = self.loader.source
        train = split_indices(source, "train")
        counts = torch.from_numpy(count_labels(source, train))
        if is_multi_label(source):
            return loop.positive_weights(counts, len(train))
        return loop.balanced_class_weights(counts)

    def record_step(self, step: loop.Step) -> None:
        """Updates the progress, and logs the step if it is due."""
        progress, config = self.progress, self.recipe.train
        progress.step = step.number
        progress.epoch_loss += step.loss
        progress.epoch_steps += 1
        progress.epoch_correct += step.correct
        progress.epoch_images += step.images
        self.recorder.advance(step.number)
        # a weighted loss and one of several labels differ anyway; a linear probe knows the labels
        comparable = step.number == 1 and not (config.class_weights or config.probe)
        comparable = comparable and not is_multi_label(self.loader.source)
        comparable = comparable and self.learner.criterion is None
        if comparable and (hint := loop.first_loss_hint(step.loss, self.recipe.vit.classes)):
            self.recorder.print(hint)
        if step.number % config.log_every == 0 or step.number in (1, config.steps):
            self.log_step(step)

    def log_step(self, step: loop.Step) -> None:
        now = time.monotonic()
        images = self.recipe.train.batch * (step.number - self.logged_step)
        rate = images / max(now - self.logged, 1e-9)
        self.logged, self.logged_step = now, step.number
        line = {"kind": "step", "step": step.number, "epoch": self.epoch(step.number)}
        line |= {"loss": step.loss, "lr": step.lr, "images_per_s": round(rate, 1)}
        self.recorder.log_step(line)

    def epoch(self, step: int) -> int:
        return -(-step // self.loader.steps)

    def ends_epoch(self, step: int) -> bool:
        return step % self.loader.steps == 0 or step == self.recipe.train.steps

    def end_epoch(self, step: int) -> None:
        """Evaluates if it is due, saves the weights if they are the best so far, and logs."""
        progress, epoch = self.progress, self.epoch(step)
        line: dict[str, Any] = {"kind": "epoch", "epoch": epoch, "step": step}
        line["seconds"] = round(self.seconds(), 3)
        line["train_loss"] = progress.epoch_loss / progress.epoch_steps
        due = epoch % self.recipe.train.evaluate_every == 0 or step == self.recipe.train.steps
        if self.recipe.pretrain is not None:
            line |= self.evaluate_features(self.recipe.pretrain.method) if due else {}
            progress.start_epoch()
            self.recorder.log_epoch(line)
            return
        line["train_accuracy"] = progress.epoch_correct / progress.epoch_images
        line |= {"val_loss": None, "val_accuracy": None}
        if due:
            scores = self.evaluate()
            line |= {name: value for name, value in scores.items() if name.startswith("val_")}
            new = Best(
                val_accuracy=scores.get("val_map", scores["val_accuracy"]),
                val_loss=scores["val_loss"],
                epoch=epoch,
                step=step,
            )
            if is_better(new, progress.best, scores["images"]):
                progress.best = new
                self.recorder.save_best(self.learner.eval_model, new)
        progress.start_epoch()
        self.recorder.log_epoch(line)

    def evaluate_features(self, method: str) -> dict[str, Any]:
        """Held-out loss and the quality of the features; saves the backbone as it is now.

        Without labels no evaluation is the best one: a longer training has better features.
        """
        with self.saved_on_error():
            self.recorder.save_rebuilt(self.learner.eval_model, self.loader, self.progress.step)
            backbone = adapt_backbone(self.learner, self.loader)
            scores = evaluate_pretraining(
                self.recipe, self.learner, backbone, self.loader, self.world
            )
        self.recorder.save_best(backbone, None)
        images = len(split_indices(self.loader.source, "val"))
        random_rank = self.progress.random_rank or 0.0
        if (collapse := describe_collapse(scores, method, images, random_rank)) is not None:
            self.recorder.print(f"warning: {collapse}")
        return {**scores, "random_rank": random_rank}

    def evaluate_start(self) -> None:
        """Evaluates the linear probe: the run keeps it if nothing later is better."""
        scores = self.evaluate()
        self.progress.best = Best(
            val_accuracy=scores["val_accuracy"], val_loss=scores["val_loss"], epoch=0, step=0
        )
        self.recorder.save_best(self.learner.eval_model, self.progress.best)

    def evaluate(self) -> dict[str, Any]:
        """Loss and accuracy of the EMA weights on the validation split.

        If one of its images is broken, saves a checkpoint, then raises.
        """
        with self.saved_on_error():
            model = backbone_of(self.learner.eval_model)
            outputs = predict_split_distributed(
                model, self.loader, "val", self.learner.dtype, self.world
            )
        return self.world.on_leader(lambda: score_validation(outputs))

    @contextmanager
    def saved_on_error(self) -> Iterator[None]:
        """Saves a checkpoint if the block raises a `UserError`."""
        try:
            yield
        except UserError:
            self.save_and_announce(failed=True)
            raise

    def is_out_of_patience(self, step: int) -> bool:
        """Whether early stopping is due; it is decided at evaluations only."""
        config, best, epoch = self.recipe.train, self.progress.best, self.epoch(step)
        evaluated = step % self.loader.steps == 0 and epoch % config.evaluate_every == 0
        if not (config.patience and best and evaluated):
            return False
        return epoch - best.epoch >= config.patience

    def seconds(self) -> float:
        return float(self.seconds_before + time.monotonic() - self.started)

    def is_save_due(self) -> bool:
        """Whether the time has come; of a sharded model the leader's clock decides for all."""
        due = time.monotonic() - self.saved >= self.recipe.train.save_every
        return self.world.broadcast(due) if self.learner.sharded else due

    def save_and_announce(self, failed: bool = False) -> None:
        """Saves a checkpoint, and says how to resume from it.

        A rank that failed by itself cannot save a sharded model: the others wait for its rows.
        """
        if not (failed and self.learner.sharded):
            self.save()
        self.recorder.print(
            f"stopped after step {self.progress.step}; "
            f"resume from the last checkpoint with `vitrail resume {shlex.quote(str(self.folder))}`"
        )

    def save(self) -> None:
        """Saves a checkpoint, unless a weight is not finite.

        In that case the next step raises, and the previous checkpoint is still good.
        """
        finite = self.learner.is_finite()
        if self.learner.sharded:
            finite = self.world.all_reduce(finite)[0] == self.world.size
        if not finite:
            return
        self.progress.seconds = self.seconds()
        self.recorder.save_checkpoint(self.learner, self.progress)
        self.saved = time.monotonic()


def score_validation(outputs: SplitOutputs | None) -> dict[str, Any]:
    assert outputs is not None  # the leader has them
    if outputs.labels.ndim == 2:
        return {
            "val_loss": multi_label.binary_log_loss(outputs.logits, outputs.labels),
            "val_accuracy": multi_label.exact_match(outputs.logits > 0, outputs.labels),
            "val_map": multi_label.mean_average_precision(outputs.logits, outputs.labels),
            "images": len(outputs.labels),
        }
    return {
        "val_loss": log_loss(outputs.logits, outputs.labels),
        "val_accuracy": accuracy(outputs.logits, outputs.labels),
        "images": len(outputs.labels),
    }


def is_better(new: Best, best: Best | None, images: int) -> bool:
    """Whether the accuracy is higher by more than one standard error; if it is within, the loss.

    With many evaluations on few images, the highest accuracy is mostly chance.
    """
    if best is None:
        return True
    old = best.val_accuracy
    standard_error = math.sqrt(max(old * (1 - old), 1 / images) / images)
    if abs(new.val_accuracy - old) > standard_error:
        return new.val_accuracy > old
    return new.val_loss < best.val_loss


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collects signals that end a program; a second one ends the process at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python delivers signals to the main thread only
        return

    def receive(number: int, frame: FrameType | None) -> None:
        if received:
            raise Stopped(number)
        received.append(number)

    with ending_signals_handled(receive):
        yield received
