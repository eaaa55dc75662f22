"""Zip archives of torch (.pth, .bin) and NumPy (.npz): only uncompressed, dense arrays."""

import pickletools
import struct
from argparse import Namespace
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile, ZipInfo

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.zoo.files.lazy import DTYPES, FileContents, LazyTensor

Span = tuple[int, int]  # offset of the first byte in the file, and number of bytes

# A giant ViT has 700 tensors, its checkpoint with an optimizer three times as many.
MAX_ENTRIES = 5_000
MAX_DIRECTORY = 1 << 20  # bytes of the archive's central directory
MAX_PICKLE = 4 << 20  # bytes of the pickle with names and shapes
MAX_OPCODES = 300_000  # of the pickle: each may create an object of a hundred bytes
MAX_NESTING = 4  # dicts within dicts: state_dict, teacher, backbone; known checkpoints have no more
MAX_NPY_HEADER = 12_000  # bytes; NumPy itself refuses headers above 10,000
END_RECORDS = 98  # bytes of the last three zip records: 56 and 20 for ZIP64, 22 for the end

NUMPY_DTYPES = {  # by the .npy type string; NumPy has no bfloat16 and stores it as two raw bytes
    "<f8": torch.float64,
    "<f4": torch.float32,
    "<f2": torch.float16,
    "|V2": torch.bfloat16,
    "<i8": torch.int64,
    "<i4": torch.int32,
    "|u1": torch.uint8,
    "|b1": torch.bool,
}

# Everything that a pickle of dense tensors calls. weights_only=True allows more: sparse and
# quantised tensors, and a bytearray of any length. DINO's checkpoints have settings in a Namespace.
ALLOWED_GLOBALS = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "torch Size",
    "torch device",
    "argparse Namespace",
    *(f"torch {dtype}Storage" for dtype in ("Double", "Float", "Half", "BFloat16")),
    *(f"torch {dtype}Storage" for dtype in ("Long", "Int", "Short", "Char", "Byte", "Bool")),
}


def open_zip_archive(path: Path) -> FileContents:
    members = list_members(path)
    pickles = [name for name in members if name.endswith("data.pkl")]
    if len(pickles) == 1:
        return open_torch_archive(path, members, pickles[0])
    if members and all(name.endswith(".npy") for name in members):
        return open_npz(path, members)
    raise UserError(f"{path} is an archive of neither torch nor NumPy; unpack it first")


def list_members(path: Path) -> dict[str, Span]:
    """The bytes of each member, all of them uncompressed.

    Neither torch.save nor numpy.savez compresses, and an uncompressed member cannot be a zip bomb.
    """
    check_central_directory(path)
    try:
        with ZipFile(path) as archive, path.open("rb") as file:
            entries = archive.infolist()
            members = {info.filename: (find_data(file, info), info.file_size) for info in entries}
    except (BadZipFile, NotImplementedError, ValueError, EOFError, struct.error) as error:
        raise UserError(f"{path} is not a valid archive: {error}; download it again") from error
    if packed := [info.filename for info in entries if info.compress_type or info.flag_bits & 1]:
        raise UserError(
            f"{path} stores {packed[0]} compressed or encrypted, which torch.save and numpy.savez "
            f"never do; save it again with one of them"
        )
    if len(members) < len(entries):
        raise UserError(f"{path} has two members of the same name; save it again")
    total, size = sum(info.file_size for info in entries), path.stat().st_size
    if total > size or any(info.file_size != info.compress_size for info in entries):
        raise UserError(f"{path} lists {total:,} bytes but has {size:,}; download it again")
    return members


def check_central_directory(path: Path) -> None:
    """Raises if the central directory is too long or does not end the file."""
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - END_RECORDS))
        tail = file.read()
    if tail[-22:-18] != b"PK\5\6":
        raise UserError(f"{path} is truncated: its end record is missing; download it again")
    (length,) = struct.unpack("<I", tail[-10:-6])
    if tail[:4] == b"PK\6\6":
        (length,) = struct.unpack("<Q", tail[40:48])
    if length > MAX_DIRECTORY:
        raise UserError(f"{path} lists more members than a model has; save the state_dict only")


def find_data(file: Any, entry: ZipInfo) -> int:
    """The offset of a member's data: after its local header, which may be padded."""
    file.seek(entry.header_offset)
    header = file.read(30)
    if header[:4] != b"PK\3\4":
        raise BadZipFile(f"{entry.filename} is not where the archive says")
    name, extra = struct.unpack("<HH", header[26:30])
    return int(entry.header_offset + 30 + name + extra)


def read_span(path: Path, span: Span) -> bytes:
    with path.open("rb") as file:
        file.seek(span[0])
        return file.read(span[1])


def open_npz(path: Path, members: dict[str, Span]) -> FileContents:
    tensors = {}
    for member, (start, size) in members.items():
        stream = BytesIO(read_span(path, (start, min(size, MAX_NPY_HEADER))))
        name = member.removesuffix(".npy")
        try:
            version = np.lib.format.read_magic(stream)
            read_header = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, fortran_order, dtype = read_header(stream)
        except Exception as error:  # NumPy evaluates it as Python, which can raise anything
            raise UserError(f"{path} stores {name} with a broken header; download it again") from (
                error
            )
        if any(size < 0 for size in shape):
            raise UserError(f"{path} stores {name} with a negative dimension; download it again")
        if dtype.str not in NUMPY_DTYPES:
            raise UserError(
                f"{path} stores {name} as {dtype}; only floating-point arrays can be loaded"
            )
        tensor = LazyTensor(
            file=path,
            offset=start + stream.tell(),
            stored_shape=shape,
            shape=shape,
            dtype=NUMPY_DTYPES[dtype.str],
            fortran_order=bool(fortran_order) and len(shape) > 1,
        )
        if stream.tell() + tensor.nbytes != size:
            raise UserError(
                f"{path} stores {name} in {size:,} bytes, but its shape is {shape}; "
                "download it again"
            )
        tensors[name] = tensor
    return FileContents(tensors=tensors)


def open_torch_archive(path: Path, members: dict[str, Span], pickle: str) -> FileContents:
    """Lets torch read names and shapes only: on the device "meta" tensors take no memory."""
    if members[pickle][1] > MAX_PICKLE:
        raise UserError(f"{path} contains more names than a model has; save the state_dict only")
    check_pickle(path, read_span(path, members[pickle]))
    byteorder = members.get(pickle.removesuffix("data.pkl") + "byteorder")
    if byteorder is not None and read_span(path, byteorder) != b"little":
        raise UserError(f"{path} was written on a big-endian machine; save it again as safetensors")
    try:
        with torch.serialization.safe_globals([Namespace]):
            tree = torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:  # a broken pickle can raise anything
        reason = str(error).split("\n")[0][:200]
        raise UserError(f"torch cannot read {path}: {reason}") from error
    if not isinstance(tree, dict):
        raise UserError(
            f"{path} contains a {type(tree).__name__}; save the state_dict of the model"
        )
    sizes = {start: size for start, size in members.values()}
    tensors: dict[str, LazyTensor] = {}
    others: list[str] = []
    for name, leaf in iterate_leaves(tree, MAX_NESTING):
        if isinstance(leaf, Tensor):
            tensors[name] = locate_tensor(path, name, leaf, sizes)
        else:
            others.append(name)
        if len(tensors) + len(others) > MAX_ENTRIES:
            raise UserError(
                f"{path} contains more than {MAX_ENTRIES:,} entries; save the state_dict only"
            )
    return FileContents(tensors=tensors, others=tuple(others))


def check_pickle(path: Path, pickle: bytes) -> None:
    """Raises if a pickle contains more than dense tensors in dicts, before torch unpickles it."""
    called: set[str] = set()
    count = 0
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(pickle)):
            if opcode.name in ("GLOBAL", "INST", "STACK_GLOBAL"):
                called.add(str(argument))
            if count > MAX_OPCODES:
                break
    except Exception as error:  # a broken pickle can raise anything
        raise UserError(f"{path} is not a valid checkpoint; download it again") from error
    if count > MAX_OPCODES:
        raise UserError(f"{path} contains more than weights; save the state_dict only")
    if unexpected := sorted(called - ALLOWED_GLOBALS):
        name = unexpected[0].replace(" ", ".")
        raise UserError(
            f"{path} wants to call {name}, which weights do not need; nothing was executed: "
            f"save the tensors of its state_dict only"
        )


def iterate_leaves(
    tree: dict[Any, Any], max_depth: int, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Every value below nested dicts with its dotted name.

    Dicts whose keys are not strings, such as an optimizer's state by number, count as values.
    """
    for key, value in tree.items():
        if (
            isinstance(value, dict)
            and value
            and max_depth > 1
            and all(isinstance(name, str) for name in value)
        ):
            yield from iterate_leaves(value, max_depth - 1, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def locate_tensor(path: Path, name: str, x: Tensor, sizes: dict[int, int]) -> LazyTensor:
    """Where the file stores a meta tensor, which must be dense and fill a member of its size."""
    storage = x.untyped_storage()
    start = getattr(storage, "_checkpoint_offset", None)
    if x.layout != torch.strided or x.device.type != "meta" or start is None:
        raise UserError(f"{path} stores {name} as {x.layout}; only dense tensors can be loaded")
    if sizes.get(start) != storage.nbytes():
        raise UserError(
            f"{path} declares {storage.nbytes():,} bytes for {name} and has "
            f"{sizes.get(start, 0):,}; download it again"
        )
    if x.dtype not in DTYPES.values():
        raise UserError(
            f"{path} stores {name} as {x.dtype}; only floating-point weights can be loaded"
        )
    transposed = x.ndim == 2 and not x.is_contiguous() and x.mT.is_contiguous()
    if not x.is_contiguous() and not transposed:
        raise UserError(f"{path} stores {name} as a strided view; save it with .contiguous()")
    return LazyTensor(
        file=path,
        offset=start + x.storage_offset() * x.dtype.itemsize,
        stored_shape=tuple(x.shape),
        shape=tuple(x.shape),
        dtype=x.dtype,
        fortran_order=transposed,
    )
