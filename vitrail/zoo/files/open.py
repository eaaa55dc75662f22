"""Weight files opened safely: what they hold and where it lies, before a byte of it is read."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from vitrail.errors import UserError
from vitrail.zoo.files.archive import open_archive
from vitrail.zoo.files.stored import KINDS, Contents, Stored

HEADER = 16 << 20  # bytes of names and shapes at most; 21,843 names of classes take 1 MB


def open_file(path: Path) -> Contents:
    """What a weight file holds, whatever its name ends in."""
    try:
        with path.open("rb") as file:
            start = file.read(512)
        if start[:4] == b"PK\3\4":
            contents = open_archive(path)
        elif len(start) > 8 and start[8:9] == b"{":
            contents = open_safetensors(path)
        else:
            raise UserError(f"{path} holds no weights: {looks_like(start)}")
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}; check the path") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    check_places(path, contents.tensors)
    return contents


def looks_like(start: bytes) -> str:
    if not start:
        return "it is empty"
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer that git-lfs left; run `git lfs pull`"
    if start.lstrip()[:1] == b"<":
        return "it is a web page; fetch the file itself"
    if start[:1] == b"\x80":
        return (
            "it is a bare pickle, as torch wrote before 1.6; load it where you trust it, and "
            "write its tensors with torch.save or safetensors"
        )
    return "it is neither safetensors, nor a .pth or .bin of torch, nor a .npz; convert it first"


def check_places(path: Path, tensors: dict[str, Stored]) -> None:
    """Stops unless every tensor lies inside its file and none lies on another."""
    size = path.stat().st_size
    end, before = 0, ""
    for name, one in sorted(tensors.items(), key=lambda pair: pair[1].start):
        if not one.bytes:
            continue
        if one.start + one.bytes > size:
            raise UserError(f"{path} ends before its tensor {name} does; fetch it again")
        if one.start < end:
            raise UserError(
                f"{path} keeps {before} and {name} in the same bytes; "
                f"copy them before saving (tensor.clone())"
            )
        end, before = one.start + one.bytes, name


def open_safetensors(path: Path) -> Contents:
    """The package checks that the header is sound and that tensors fill the file one by one."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > HEADER:
        raise UserError(f"{path} has a header of {length:,} bytes; no weights need {HEADER:,}")
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            shapes = {name: opened.get_slice(name) for name in opened.offset_keys()}
            kinds = {
                name: (one.get_dtype(), tuple(one.get_shape())) for name, one in shapes.items()
            }
    except SafetensorError as error:
        raise UserError(f"{path} is no sound safetensors file: {error}") from error
    start, tensors = 8 + length, {}
    for name, (kind, shape) in kinds.items():  # in the order in which they lie, without gaps
        if kind not in KINDS:
            raise UserError(f"{path} holds {name} as {kind}; give floating point weights")
        one = Stored(file=path, start=start, lies=shape, shape=shape, dtype=KINDS[kind])
        tensors[name], start = one, start + one.bytes
    return Contents(tensors=tensors, metadata=metadata)
