"""A tensor that still lies in its file, and how it is read from there."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import UserError

Shape = tuple[int, ...]

KINDS = {  # as safetensors calls them
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor that still lies in its file."""

    file: Path
    start: int  # byte where it begins
    lies: Shape  # as it lies in the file
    dtype: torch.dtype
    fortran: bool = False  # the first axis runs fastest
    shape: Shape  # as it is read
    turn: Callable[[Tensor], Tensor] | None = None  # from the one to the other

    @property
    def bytes(self) -> int:
        return torch.Size(self.lies).numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        x = torch.empty(self.lies[::-1] if self.fortran else self.lies, dtype=self.dtype)
        if x.numel():
            with self.file.open("rb", buffering=0) as file:
                file.seek(self.start)
                fill(file, memoryview(x.view(-1).view(torch.uint8).numpy().data), self.file)
        x = x.permute(*reversed(range(x.ndim))) if self.fortran else x
        return self.turn(x) if self.turn else x

    def turned(self, shape: Shape, turn: Callable[[Tensor], Tensor]) -> "Stored":
        """The same numbers, seen in another shape."""
        before = self.turn or (lambda x: x)
        return replace(self, shape=shape, turn=lambda x: turn(before(x)))

    def split(self) -> "list[Stored]":
        """The slices along its first axis."""
        inner = self.lies[1:]
        if self.fortran:  # they are interleaved
            turns = [partial(Tensor.select, dim=0, index=i) for i in range(self.lies[0])]
            return [replace(self, shape=inner, turn=turn) for turn in turns]
        one = replace(self, lies=inner, shape=inner)
        return [replace(one, start=self.start + i * one.bytes) for i in range(self.lies[0])]


@dataclass(frozen=True, kw_only=True)
class Contents:
    tensors: dict[str, Stored]
    metadata: dict[str, str] = field(default_factory=dict)  # of a safetensors file
    others: tuple[str, ...] = ()  # what is no tensor: epoch, args, optimizer


def fill(file: Any, view: memoryview, path: Path) -> None:
    while len(view):
        count = file.readinto(view)
        if not count:
            raise UserError(f"{path} ends too early; it was cut off, fetch it again")
        view = view[count:]
