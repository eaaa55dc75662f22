"""A tensor that stays in its file until it is read."""

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import UserError

Shape = tuple[int, ...]
CHUNK = 1 << 20  # bytes that are read and hashed at once
THREADS = 2  # that read and hash: both release the interpreter

DTYPES = {  # by the name that safetensors uses
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
class LazyTensor:
    """Where a tensor is stored in a file, and how to transform it after reading."""

    file: Path
    offset: int  # of its first byte
    stored_shape: Shape  # in the file
    dtype: torch.dtype
    fortran_order: bool = False  # column-major: the first axis varies fastest
    shape: Shape  # after `transform`
    transform: Callable[[Tensor], Tensor] | None = None  # applied to the stored tensor
    content: Tensor | None = None  # the stored tensor, if it was already read

    @property
    def nbytes(self) -> int:
        return torch.Size(self.stored_shape).numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        x = self.read_stored() if self.content is None else self.content
        x = x.permute(*reversed(range(x.ndim))) if self.fortran_order else x
        return self.transform(x) if self.transform else x

    def read_stored(self, sha256: str | None = None, name: str = "") -> Tensor:
        """The tensor as the file has it; raises if its bytes do not have the given sha256."""
        shape = self.stored_shape[::-1] if self.fortran_order else self.stored_shape
        x = torch.empty(shape, dtype=self.dtype)
        buffer = memoryview(x.view(-1).view(torch.uint8).numpy().data)
        checksum = hashlib.sha256()
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.offset)
            for start in range(0, len(buffer), CHUNK):
                part = buffer[start : start + CHUNK]
                read_into(part, file, self.file)
                if sha256 is not None:  # while the bytes are in the processor's cache
                    checksum.update(part)
        if sha256 is not None and checksum.hexdigest() != sha256:
            raise UserError(
                f"{self.file} is damaged: its tensor {name} has the sha256 "
                f"{checksum.hexdigest()[:16]}, expected {sha256[:16]}; copy or download it again"
            )
        return x

    def add_transform(self, shape: Shape, transform: Callable[[Tensor], Tensor]) -> "LazyTensor":
        """The same tensor with one more transform, which gives it `shape`."""
        before = self.transform or (lambda x: x)
        return replace(self, shape=shape, transform=lambda x: transform(before(x)))

    def unstack(self) -> "list[LazyTensor]":
        """The slices along the first axis."""
        inner = self.stored_shape[1:]
        if self.fortran_order:  # the slices interleave, so each one reads the whole tensor
            selects = [partial(Tensor.select, dim=0, index=i) for i in range(self.stored_shape[0])]
            return [replace(self, shape=inner, transform=select) for select in selects]
        first = replace(self, stored_shape=inner, shape=inner)
        count = self.stored_shape[0]
        return [replace(first, offset=self.offset + i * first.nbytes) for i in range(count)]


@dataclass(frozen=True, kw_only=True)
class FileContents:
    """The contents of a weight file, before any tensor is read."""

    tensors: dict[str, LazyTensor]
    metadata: dict[str, str] = field(default_factory=dict)  # of a safetensors file
    others: tuple[str, ...] = ()  # names of entries that are not tensors: epoch, args, optimizer


def read_ahead(
    tensors: Mapping[str, LazyTensor], checksums: Mapping[str, str]
) -> dict[str, LazyTensor]:
    """The same tensors, read in parallel and compared with their sha256.

    Without checksums they stay in their file until they are needed.
    """
    if not checksums:
        return dict(tensors)
    with ThreadPoolExecutor(THREADS) as pool:
        contents = {
            name: pool.submit(tensor.read_stored, checksums.get(name), name)
            for name, tensor in tensors.items()
        }
    return {name: replace(one, content=contents[name].result()) for name, one in tensors.items()}


def read_into(buffer: memoryview, file: Any, path: Path) -> None:
    """Fills the whole buffer from the file."""
    while len(buffer):
        count = file.readinto(buffer)
        if not count:
            raise UserError(f"{path} is truncated; download it again")
        buffer = buffer[count:]
