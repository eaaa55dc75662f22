"""What happens between steps: the journal, saved states, validation, signals, early stopping."""

import math
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from vitrail.data.loader import Loader
from vitrail.data.source import indices
from vitrail.errors import UserError
from vitrail.evaluation.metrics import accuracy, log_loss
from vitrail.run.journal import Journal
from vitrail.run.live import Live
from vitrail.run.predictions import ask_together
from vitrail.run.recipe import Recipe
from vitrail.training import checkpoint, loop
from vitrail.training.distributed import ALONE, Together
from vitrail.training.learner import Learner

OnEpoch = Callable[[dict[str, Any]], None]  # may raise, and so end the run where it stands

FRESH: dict[str, Any] = {  # what a run knows of itself, beside its tensors
    "step": 0,  # steps done
    "seconds": 0.0,  # spent on them
    "epoch_loss": 0.0,  # sum over the steps of this epoch
    "epoch_steps": 0,
    "epoch_right": 0,  # answers, of all on the images as they were trained on
    "epoch_images": 0,
    "best": None,  # validation accuracy, loss, epoch and step of the kept weights
}


class Stopped(SystemExit):
    """A signal asked the run to stop; it was saved. The exit code is the shell's for it."""

    def __init__(self, number: int):
        super().__init__(128 + number)


class Driver:
    """Drives one training from where `facts` says it stands to its last step.

    `keep` is called whenever the learner's weights are the best so far, `on_epoch` after each look
    at the validation images, with its line of the journal and the `steps` in all. Of processes that
    train together the first does so, and writes and speaks; the others have no `journal`.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        loader: Loader,
        learner: Learner,
        facts: dict[str, Any],
        live: Live,
        journal: Journal | None,
        keep: Callable[[dict[str, Any]], None],
        on_epoch: OnEpoch = lambda line: None,
        together: Together = ALONE,
    ):
        self.folder, self.recipe, self.loader, self.learner = folder, recipe, loader, learner
        self.facts, self.live, self.journal, self.keep = facts, live, journal, keep
        self.on_epoch, self.together = on_epoch, together
        self.logged, self.before = facts["step"], facts["seconds"]
        self.since = self.started = self.saved = time.monotonic()

    def drive(self) -> None:
        """Goes on until all steps are done, patience ends, or a signal comes."""
        settings = self.recipe.train
        with stopping() as heard:
            if self.facts["epoch_steps"] and self.ends_epoch(self.facts["step"]):
                self.end_epoch(self.facts["step"])  # the look at its end had failed
            for step in self.steps(heard):
                self.note(step)
                if self.ends_epoch(step.number):
                    self.end_epoch(step.number)
                if time.monotonic() - self.saved >= settings.save_every:
                    self.save()
                if self.patience_is_over(step.number):
                    self.live.say(f"no better for {settings.patience} epochs: stopping early")
                    break
            if self.together.sum(len(heard))[0]:  # whoever heard it
                self.leave()
                raise Stopped(*heard[:1] or (signal.SIGTERM,))
            self.save()

    def steps(self, heard: list[int]) -> Iterator[loop.Step]:
        """From where the run stands; what a step cannot be taken for is told after a save."""
        settings, done = self.recipe.train, self.facts["step"]
        if self.patience_is_over(done):
            return
        loaded = self.loader.training(done, settings.steps)
        batches = ((batch.images, batch.targets) for batch in loaded)
        try:
            yield from loop.train(
                self.learner,
                batches,
                settings,
                settings.steps,
                start=done,
                patches=self.recipe.patches,
                class_weights=self.class_weights(),
                together=self.together,
                heard=heard,
            )
        except loop.Diverged:
            self.save()  # the weights are still those before the step
            raise
        except UserError:
            self.leave()
            raise

    def class_weights(self) -> Tensor | None:
        if not self.recipe.train.class_weights:
            return None
        source = self.loader.source
        labels = torch.from_numpy(source.labels[indices(source, "train")])
        return loop.balance(torch.bincount(labels, minlength=len(source.classes)))

    def note(self, step: loop.Step) -> None:
        """One step into the books."""
        facts, settings = self.facts, self.recipe.train
        facts["step"] = step.number
        facts["epoch_loss"] += step.loss
        facts["epoch_steps"] += 1
        facts["epoch_right"] += step.right
        facts["epoch_images"] += step.images
        self.live.reach(step.number)
        plain = step.number == 1 and not settings.class_weights  # weighted, it is far anyway
        if plain and (hint := loop.first_loss_hint(step.loss, self.recipe.vit.classes)):
            self.live.say(hint)
        if step.number % settings.log_every and step.number not in (1, settings.steps):
            return
        now, epoch = time.monotonic(), self.epoch(step.number)
        rate = settings.batch * (step.number - self.logged) / max(now - self.since, 1e-9)
        self.since, self.logged = now, step.number
        line = {"kind": "step", "step": step.number, "epoch": epoch, "loss": step.loss}
        if self.journal:
            self.journal.write(line | {"lr": step.lr, "images_per_s": round(rate, 1)})
        self.live.step(step.number, epoch, step.loss, rate)

    def epoch(self, step: int) -> int:
        return -(-step // self.loader.steps)

    def ends_epoch(self, step: int) -> bool:
        return step % self.loader.steps == 0 or step == self.recipe.train.steps

    def end_epoch(self, step: int) -> None:
        """Looks at the validation images, keeps the weights if they are the best so far."""
        facts, epoch = self.facts, self.epoch(step)
        line: dict[str, Any] = {"kind": "epoch", "epoch": epoch, "step": step}
        line["seconds"] = round(self.seconds(), 3)
        line["train_loss"] = facts["epoch_loss"] / facts["epoch_steps"]
        line["train_accuracy"] = facts["epoch_right"] / facts["epoch_images"]
        line |= {"val_loss": None, "val_accuracy": None}
        if epoch % self.recipe.train.evaluate_every == 0 or step == self.recipe.train.steps:
            scores = self.look()
            line |= {name: scores[name] for name in ("val_loss", "val_accuracy")}
            if better(line, facts["best"], scores["images"]):
                names = ("val_accuracy", "val_loss", "epoch", "step")
                facts["best"] = {name: line[name] for name in names}
                if self.together.first:
                    self.keep(facts["best"])
        for name in ("epoch_loss", "epoch_steps", "epoch_right", "epoch_images"):
            facts[name] = FRESH[name]
        if self.journal:
            self.journal.write(line)
        self.live.epoch(line)
        if line["val_accuracy"] is not None and self.together.first:
            self.on_epoch({**line, "steps": self.recipe.train.steps})

    def look(self) -> dict[str, Any]:
        """What the averaged weights are worth on the validation images.

        If one of them is broken, the run is saved as it stands before the look.
        """
        try:
            seen = ask_together(
                self.learner.result, self.loader, "val", self.learner.dtype, self.together
            )
        except UserError:
            self.leave()
            raise
        scores: dict[str, Any] = {}
        if seen is not None:
            scores["val_loss"] = log_loss(seen.logits, seen.labels)
            scores["val_accuracy"] = accuracy(seen.logits, seen.labels)
            scores["images"] = len(seen.labels)
        return self.together.tell(scores)

    def patience_is_over(self, step: int) -> bool:
        """Told at a look at the validation images, and only then."""
        settings, best, epoch = self.recipe.train, self.facts["best"], self.epoch(step)
        looked = step % self.loader.steps == 0 and epoch % settings.evaluate_every == 0
        return bool(settings.patience and best and looked) and (
            epoch - best["epoch"] >= settings.patience
        )

    def seconds(self) -> float:
        return float(self.before + time.monotonic() - self.started)

    def leave(self) -> None:
        """The run stays as it stands, and the user hears how it goes on."""
        self.save()
        self.live.say(
            f"stopped after step {self.facts['step']}; "
            f"`vitrail resume {shlex.quote(str(self.folder))}` goes on from what was saved"
        )

    def save(self) -> None:
        if not self.together.first:
            return
        if not all(p.isfinite().all() for p in self.learner.model.parameters()):
            return  # the next step stops and says so; the state before this one is still good
        self.facts["seconds"] = self.seconds()
        checkpoint.save(
            self.folder / "checkpoints",
            self.facts["step"],
            self.learner.tensors(),
            dict(self.facts),
        )
        self.saved = time.monotonic()


def better(line: dict[str, Any], best: dict[str, Any] | None, images: int) -> bool:
    """More right answers by more than chance, one standard error; or else a lower loss.

    Of many looks at few images, the one with the most right answers is the luckiest, not the best.
    """
    if best is None:
        return True
    rate, kept = line["val_accuracy"], best["val_accuracy"]
    if abs(rate - kept) > math.sqrt(max(kept * (1 - kept), 1 / images) / images):
        return bool(rate > kept)
    return bool(line["val_loss"] < best["val_loss"])


@contextmanager
def stopping() -> Iterator[list[int]]:
    """Notes SIGINT and SIGTERM instead of dying of them; a second one is obeyed at once."""
    heard: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield heard  # only the main thread is told of signals
        return

    def hear(number: int, frame: FrameType | None) -> None:
        if heard:
            raise Stopped(number)
        heard.append(number)

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
