"""What a run shows while it goes on: a bar on a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

QUIET = 10.0  # seconds between two plain lines
PACE = 600.0  # seconds by whose steps the bar tells the time left; a slow step takes many


class Live:
    """Everything goes to stderr: stdout belongs to `--json`."""

    def __init__(self, total: int = 0, quiet: bool = False):
        self.quiet = quiet
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.bar = bar(self.console) if self.console.is_terminal and not quiet else None
        self.task = self.bar.add_task("", total=total, facts="") if self.bar else None
        self.total, self.last, self.validation = total, time.monotonic(), ""
        self.first: tuple[int, float] | None = None  # the first step that was seen, and when
        self.left = ""

    def __enter__(self) -> "Live":
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

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False)

    def reach(self, step: int) -> None:
        """Every step, for the time that is left."""
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=step)
        number, since = self.first = self.first or (step, time.monotonic())
        if step > number:
            each = (time.monotonic() - since) / (step - number)
            self.left = f"  {duration(each * (self.total - step))} left"

    def step(self, step: int, epoch: int, loss: float, rate: float) -> None:
        """A logged step, which has been reached."""
        facts = f"epoch {epoch}  loss {loss:.3f}  {rate:,.0f} images/s{self.validation}"
        if self.bar and self.task is not None:
            self.bar.update(self.task, facts=facts)
        elif time.monotonic() - self.last >= QUIET:
            self.last = time.monotonic()
            self.say(f"step {step} of {self.total}  {facts}{self.left}")

    def epoch(self, line: dict[str, Any]) -> None:
        if line["val_accuracy"] is None:
            return
        self.validation = f"  validation {line['val_accuracy']:.1%}"
        if not self.bar and time.monotonic() - self.last >= QUIET / 10:
            self.last = time.monotonic()
            self.say(
                f"epoch {line['epoch']}  step {line['step']} of {self.total}  "
                f"loss {line['train_loss']:.3f}{self.validation}{self.left}"
            )


def bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.percentage:>3.0f}%"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
        speed_estimate_period=PACE,
    )


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} second{'s' * (round(seconds) != 1)}"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
