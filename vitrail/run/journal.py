"""`journal.jsonl`: one line per logged step and per epoch, kept true through kills and resumes."""

import json
from pathlib import Path
from typing import Any

from vitrail import files
from vitrail.errors import UserError


class Journal:
    """Appends lines; given the step a run starts from, it first drops those past it."""

    def __init__(self, path: Path, start: int, tensorboard: bool = False):
        self.path = path
        kept = [line for line in read_journal(path) if line["step"] <= start]
        files.write(path, "".join(json.dumps(line) + "\n" for line in kept))
        self.file = path.open("a")
        self.board = board(path.parent / "tensorboard", start) if tensorboard else None

    def write(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        if self.board:
            for key, value in line.items():
                if key not in ("kind", "step", "epoch") and value is not None:
                    self.board.add_scalar(f"{line['kind']}/{key}", value, line["step"])

    def close(self) -> None:
        self.file.close()
        if self.board:
            self.board.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a kill may have torn the last one."""
    lines = []
    if path.exists():
        for text in path.read_text().splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                break
            if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                break
            lines.append(line)
    return lines


def board(folder: Path, start: int) -> Any:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise UserError(
            "TensorBoard is not installed; pip install 'vitrail[tensorboard]'"
        ) from error
    return SummaryWriter(str(folder), purge_step=start + 1)
