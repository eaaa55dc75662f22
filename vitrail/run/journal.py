"""`log.jsonl`: one line per logged step and per epoch, kept true through kills and resumes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitrail import files
from vitrail.errors import UserError

NUMBERS = {  # of each kind of line, beside the step
    "step": ("epoch", "loss", "lr", "images_per_s"),
    "epoch": ("epoch", "seconds", "train_loss"),
}
WHERE_KNOWN = ("train_accuracy", "val_loss", "val_accuracy")


class Journal:
    """Appends lines; given the step a run starts from, it first drops those past it."""

    def __init__(self, path: Path, start: int, tensorboard: bool = False):
        self.path = path
        kept = [line for line in read_journal(path) if line["step"] <= start]
        files.write(path, "".join(json.dumps(line) + "\n" for line in kept))
        with self.told():
            self.file = path.open("ab", buffering=0)  # what was refused is not tried again
        self.board = board(path.parent / "tensorboard", start) if tensorboard else None

    def write(self, line: dict[str, Any]) -> None:
        with self.told():
            rest = json.dumps(line).encode() + b"\n"
            while rest:
                rest = rest[self.file.write(rest) :]
        if self.board:
            for key, value in line.items():
                if key not in ("kind", "step", "epoch") and value is not None:
                    self.board.add_scalar(f"{line['kind']}/{key}", value, line["step"])

    @contextmanager
    def told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = f"cannot write {self.path}: {files.refusal(error)}"
            raise UserError(f"{why}; the saved states are untouched") from error

    def close(self) -> None:
        self.file.close()
        if self.board:
            self.board.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All whole lines: a kill may have torn the last one, a disk any."""
    lines = []
    if path.exists():
        for text in read(path).splitlines():
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if whole(line):
                lines.append(line)
    return lines


def whole(line: Any) -> bool:
    """Whether a line has the numbers that others read off it."""
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return False
    needed = NUMBERS.get(str(line.get("kind")))
    if needed is None:
        return False
    known = [line[name] for name in WHERE_KNOWN if line.get(name) is not None]
    numbers = [line.get(name) for name in needed] + known
    return all(isinstance(number, int | float) for number in numbers)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {files.refusal(error)}") from error


def board(folder: Path, start: int) -> Any:
    return summary_writer()(str(folder), purge_step=start + 1)


def summary_writer() -> Any:
    """TensorBoard's class, or what to install."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise UserError(
            "TensorBoard is not installed; pip install 'vitrail[tensorboard]'"
        ) from error
    return SummaryWriter
