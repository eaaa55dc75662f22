"""Zip archives of torch (.pth, .bin) and numpy (.npz): only plain arrays, nothing compressed."""

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
from vitrail.zoo.files.stored import KINDS, Contents, Stored

NAMES = 5_000  # at most; a giant ViT has 700, and a checkpoint with its optimizer three times that
LIST = 1 << 20  # bytes of an archive's list of members, at most
PICKLE = 4 << 20  # bytes of names and shapes in a checkpoint, at most
STEPS = 300_000  # of a pickle, at most: each may become an object of a hundred bytes
DEEP = 4  # dicts within dicts: state_dict, teacher, backbone; no checkpoint has more

NUMPY_KINDS = {  # as .npy calls them; bfloat16 is unknown there and comes as two bare bytes
    "<f8": torch.float64,
    "<f4": torch.float32,
    "<f2": torch.float16,
    "|V2": torch.bfloat16,
    "<i8": torch.int64,
    "<i4": torch.int32,
    "|u1": torch.uint8,
    "|b1": torch.bool,
}

# All that a pickle of dense tensors asks for. weights_only allows more: sparse and quantised
# tensors, and a bytearray of any length. A Namespace is a bag of settings, found in DINO's files.
CALLED = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "torch Size",
    "torch device",
    "argparse Namespace",
    *(f"torch {kind}Storage" for kind in ("Double", "Float", "Half", "BFloat16")),
    *(f"torch {kind}Storage" for kind in ("Long", "Int", "Short", "Char", "Byte", "Bool")),
}


def open_archive(path: Path) -> Contents:
    members = open_members(path)
    pickles = [name for name in members if name.endswith("data.pkl")]
    if len(pickles) == 1:
        return open_torch(path, members, pickles[0])
    if members and all(name.endswith(".npy") for name in members):
        return open_numpy(path, members)
    raise UserError(f"{path} is an archive, but neither of torch nor of numpy; unpack it first")


def open_members(path: Path) -> dict[str, tuple[int, int]]:
    """Where the bytes of each member begin, and how many they are; only stored ones are allowed.

    Neither torch.save nor numpy.savez compresses, and what is not compressed cannot grow.
    """
    check_directory(path)
    try:
        with ZipFile(path) as archive, path.open("rb") as file:
            entries = archive.infolist()
            members = {one.filename: (begin(file, one), one.file_size) for one in entries}
    except (BadZipFile, NotImplementedError, ValueError, EOFError, struct.error) as error:
        raise UserError(f"{path} is no sound archive: {error}; fetch it again") from error
    if squeezed := [one.filename for one in entries if one.compress_type or one.flag_bits & 1]:
        raise UserError(
            f"{path} holds {squeezed[0]} compressed or encrypted, which torch.save and numpy.savez "
            f"never do; write it again with one of them"
        )
    if len(members) < len(entries):
        raise UserError(f"{path} holds two members of one name; write it again")
    total, size = sum(one.file_size for one in entries), path.stat().st_size
    if total > size or any(one.file_size != one.compress_size for one in entries):
        raise UserError(f"{path} speaks of {total:,} bytes and has {size:,}; fetch it again")
    return members


def check_directory(path: Path) -> None:
    """Stops at an archive whose list of members is long or does not stand at the very end."""
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 98))  # 22 bytes of end, before it 20 and 56 of its 64 bits
        tail = file.read()
    if tail[-22:-18] != b"PK\5\6":
        raise UserError(f"{path} has no end; it was cut off, fetch it again")
    (length,) = struct.unpack("<I", tail[-10:-6])
    if tail[:4] == b"PK\6\6":
        (length,) = struct.unpack("<Q", tail[40:48])
    if length > LIST:
        raise UserError(f"{path} lists more members than weights have; give a file of weights only")


def begin(file: Any, one: ZipInfo) -> int:
    """Where a member's bytes begin: after its own header, which may be padded."""
    file.seek(one.header_offset)
    head = file.read(30)
    if head[:4] != b"PK\3\4":
        raise BadZipFile(f"{one.filename} is not where the archive says")
    name, extra = struct.unpack("<HH", head[26:30])
    return int(one.header_offset + 30 + name + extra)


def cut(path: Path, place: tuple[int, int]) -> bytes:
    with path.open("rb") as file:
        file.seek(place[0])
        return file.read(place[1])


def open_numpy(path: Path, members: dict[str, tuple[int, int]]) -> Contents:
    tensors = {}
    for member, (start, size) in members.items():
        head = BytesIO(cut(path, (start, min(size, 12_000))))
        name = member.removesuffix(".npy")
        try:
            version = np.lib.format.read_magic(head)
            header = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, fortran, kind = header(head)
        except Exception as error:  # numpy parses it as Python, and a broken one can raise anything
            raise UserError(f"{path} holds {name} with a broken header; fetch it again") from error
        if any(side < 0 for side in shape):
            raise UserError(f"{path} holds {name} with a side below 0; fetch it again")
        if kind.str not in NUMPY_KINDS:
            raise UserError(f"{path} holds {name} as {kind}; give arrays of floating point numbers")
        one = Stored(
            file=path,
            start=start + head.tell(),
            lies=shape,
            shape=shape,
            dtype=NUMPY_KINDS[kind.str],
            fortran=bool(fortran) and len(shape) > 1,
        )
        if head.tell() + one.bytes != size:
            raise UserError(f"{path} holds {name} in {size:,} bytes, but its shape is {shape}")
        tensors[name] = one
    return Contents(tensors=tensors)


def open_torch(path: Path, members: dict[str, tuple[int, int]], pickle: str) -> Contents:
    """Lets torch read names and shapes only: on the device "meta" numbers take no memory."""
    if members[pickle][1] > PICKLE:
        raise UserError(f"{path} holds more names than weights need; save the state_dict only")
    check_pickle(path, cut(path, members[pickle]))
    order = members.get(pickle.removesuffix("data.pkl") + "byteorder")
    if order is not None and cut(path, order) != b"little":
        raise UserError(f"{path} was written on a big-endian machine; save it again as safetensors")
    try:
        with torch.serialization.safe_globals([Namespace]):
            tree = torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:  # a broken pickle can raise anything
        reason = str(error).split("\n")[0][:200]
        raise UserError(f"{path} cannot be read by torch: {reason}") from error
    sizes = {start: size for start, size in members.values()}
    tensors: dict[str, Stored] = {}
    others: list[str] = []
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds a {type(tree).__name__}; save the state_dict of the model")
    for name, leaf in leaves(tree, DEEP):
        if not isinstance(leaf, Tensor):
            others.append(name)
        else:
            tensors[name] = place(path, name, leaf, sizes)
        if len(tensors) + len(others) > NAMES:
            raise UserError(f"{path} holds more than {NAMES:,} things; save the state_dict only")
    return Contents(tensors=tensors, others=tuple(others))


def check_pickle(path: Path, pickle: bytes) -> None:
    """Stops at anything but dense tensors in dicts, before torch looks at it."""
    called: set[str] = set()
    steps = 0
    try:
        for steps, (code, argument, _) in enumerate(pickletools.genops(pickle)):
            if code.name in ("GLOBAL", "INST", "STACK_GLOBAL"):
                called.add(str(argument))
            if steps > STEPS:
                break
    except Exception as error:  # a broken pickle can raise anything
        raise UserError(f"{path} is no sound checkpoint; fetch it again") from error
    if steps > STEPS:
        raise UserError(f"{path} holds more than weights; save the state_dict only")
    if strange := sorted(called - CALLED):
        name = strange[0].replace(" ", ".")
        raise UserError(
            f"{path} wants to call {name}, which weights do not need; nothing was run, "
            f"save the tensors of its state_dict only"
        )


def leaves(tree: dict[Any, Any], deep: int, front: str = "") -> Iterator[tuple[str, Any]]:
    """All that is no dict, under the names that lead there; optimizers count by number."""
    for key, value in tree.items():
        if (
            isinstance(value, dict)
            and value
            and deep > 1
            and all(isinstance(one, str) for one in value)
        ):
            yield from leaves(value, deep - 1, f"{front}{key}.")
        else:
            yield f"{front}{key}", value


def place(path: Path, name: str, x: Tensor, sizes: dict[int, int]) -> Stored:
    """Where the numbers of a tensor lie, which must be a dense one in a member of its size."""
    storage = x.untyped_storage()
    start = getattr(storage, "_checkpoint_offset", None)
    if x.layout != torch.strided or x.device.type != "meta" or start is None:
        raise UserError(f"{path} holds {name} as {x.layout}; give dense tensors")
    if sizes.get(start) != storage.nbytes():
        found = sizes.get(start, 0)
        raise UserError(
            f"{path} says {storage.nbytes():,} bytes for {name} and has {found:,}; fetch it again"
        )
    if x.dtype not in KINDS.values():
        raise UserError(f"{path} holds {name} as {x.dtype}; give floating point weights")
    shape, first = tuple(x.shape), start + x.storage_offset() * x.dtype.itemsize
    if x.is_contiguous():
        return Stored(file=path, start=first, lies=shape, shape=shape, dtype=x.dtype)
    if x.mT.is_contiguous() if x.ndim == 2 else False:  # a matrix saved as its transpose
        return Stored(file=path, start=first, lies=shape, shape=shape, dtype=x.dtype, fortran=True)
    raise UserError(f"{path} holds {name} with gaps between its numbers; save it .contiguous()")
