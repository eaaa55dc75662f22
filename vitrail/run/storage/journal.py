"""`log.jsonl`: one line per logged step and per epoch, kept consistent across kills and resumes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitrail import files
from vitrail.errors import UserError

REQUIRED = {  # numbers of each kind of line, besides the step
    "step": ("epoch", "loss", "lr", "images_per_s"),
    "epoch": ("epoch", "seconds", "train_loss"),
}
OPTIONAL = (
    *("train_accuracy", "val_loss", "val_accuracy"),
    *("val_rank", "val_spread", "random_rank"),  # of a pretraining
)


class Journal:
    """Appends lines to the log; first drops those past the step that the run starts from."""

    def __init__(self, path: Path, start: int, tensorboard: bool = False):
        self.path = path
        lines = [line for line in read_journal(path) if line["step"] <= start]
        files.write_file(path, "".join(json.dumps(line) + "\n" for line in lines))
        with self._report_errors():
            self.file = path.open("ab", buffering=0)  # unbuffered: a failed write is not repeated
        self.board = None
        if tensorboard:
            folder = path.parent / "tensorboard"
            self.board = import_summary_writer()(str(folder), purge_step=start + 1)

    def write(self, line: dict[str, Any]) -> None:
        with self._report_errors():
            rest = json.dumps(line).encode() + b"\n"
            while rest:
                rest = rest[self.file.write(rest) :]
        if self.board:
            for key, value in line.items():
                if key not in ("kind", "step", "epoch") and value is not None:
                    self.board.add_scalar(f"{line['kind']}/{key}", value, line["step"])

    @contextmanager
    def _report_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = f"cannot write {self.path}: {files.describe_os_error(error)}"
            raise UserError(f"{why}; the checkpoints are intact") from error

    def close(self) -> None:
        self.file.close()
        if self.board:
            self.board.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All complete lines; a kill can truncate the last one, a disk error can damage any."""
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines
    files.check_regular(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {files.describe_os_error(error)}") from error
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if is_complete(line):
            lines.append(line)
    return lines


def is_complete(line: Any) -> bool:
    """Whether a line has all the numbers that its readers expect."""
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return False
    required = REQUIRED.get(str(line.get("kind")))
    if required is None:
        return False
    numbers = [line.get(name) for name in required]
    numbers += [line[name] for name in OPTIONAL if line.get(name) is not None]
    return all(isinstance(number, int | float) for number in numbers)


def import_summary_writer() -> Any:
    """TensorBoard's SummaryWriter; raises if it is not installed."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise UserError(
            "TensorBoard is not installed; run pip install 'vitrail[tensorboard]'"
        ) from error
    return SummaryWriter
