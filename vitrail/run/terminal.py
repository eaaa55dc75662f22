"""What a run shows while it trains: a progress bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from vitrail.display.text import format_duration

LINE_INTERVAL = 10.0  # seconds between two plain lines about steps
EPOCH_INTERVAL = 1.0  # seconds between two plain lines about epochs
SPEED_WINDOW = 600.0  # seconds over which the bar averages the speed; steps may be slow


class Terminal:
    """Writes to stderr only: stdout is reserved for `--json`.

    `work` says what all steps up to a number cost; by default, they cost the same.
    """

    def __init__(self, total: int = 0, quiet: bool = False, work: Callable[[int], float] = float):
        self.quiet, self.work = quiet, work
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.bar = make_bar(self.console) if self.console.is_terminal and not quiet else None
        self.task = self.bar.add_task("", total=work(total), status="") if self.bar else None
        self.total, self.last_line, self.validation = total, time.monotonic(), ""
        self.first: tuple[int, float] | None = None  # number and time of the first step shown
        self.remaining = ""

    def __enter__(self) -> "Terminal":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar:
            self.bar.stop()

    def print(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False)

    def advance(self, step: int) -> None:
        """Updates the bar and the remaining time; to be called after each step."""
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=self.work(step))
        number, since = self.first = self.first or (step, time.monotonic())
        if step > number:
            done, left = (
                self.work(step) - self.work(number),
                self.work(self.total) - self.work(step),
            )
            self.remaining = f"  {format_duration((time.monotonic() - since) * left / done)} left"

    def show_step(self, step: int, epoch: int, loss: float, rate: float) -> None:
        """Shows a logged step."""
        status = f"epoch {epoch}  loss {loss:.3f}  {rate:,.0f} images/s{self.validation}"
        if self.bar and self.task is not None:
            self.bar.update(self.task, status=status)
        elif time.monotonic() - self.last_line >= LINE_INTERVAL:
            self.last_line = time.monotonic()
            self.print(f"step {step} of {self.total}  {status}{self.remaining}")

    def show_epoch(self, line: dict[str, Any]) -> None:
        """Shows an epoch that ended with an evaluation; `line` is its line of the log."""
        if line.get("val_loss") is None:
            return
        if "val_rank" in line:
            self.validation = f"  held-out loss {line['val_loss']:.3f}  rank {line['val_rank']:.1f}"
            if "val_knn" in line:
                self.validation += f"  k-NN {line['val_knn']:.1%}"
        elif "val_map" in line:
            self.validation = f"  validation mAP {line['val_map']:.3f}"
        else:
            self.validation = f"  validation accuracy {line['val_accuracy']:.1%}"
        if not self.bar and time.monotonic() - self.last_line >= EPOCH_INTERVAL:
            self.last_line = time.monotonic()
            self.print(
                f"epoch {line['epoch']}  step {line['step']} of {self.total}  "
                f"loss {line['train_loss']:.3f}{self.validation}{self.remaining}"
            )


def make_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.percentage:>3.0f}%"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
        speed_estimate_period=SPEED_WINDOW,
    )
