"""Opens weight files: lists their tensors and checks every offset before any tensor is read."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from vitrail.errors import UserError
from vitrail.files import check_regular
from vitrail.zoo.files.archive import open_zip_archive
from vitrail.zoo.files.find import INDEX_SUFFIX, read_shard_index
from vitrail.zoo.files.lazy import DTYPES, FileContents, LazyTensor

MAX_HEADER = 16 << 20  # bytes of tensor names, shapes and metadata; 21,843 class names take 1 MB
MAGIC_BYTES = 512  # enough to tell one file format from another


def open_weights(path: Path) -> FileContents:
    """The contents of a weight file, or of all shards that an index lists."""
    if not path.name.endswith(INDEX_SUFFIX):
        return open_weight_file(path)
    shard_of = read_shard_index(path)
    tensors: dict[str, LazyTensor] = {}
    for shard in sorted(set(shard_of.values())):
        found = open_weight_file(path.parent / shard).tensors
        if found.keys() != {name for name, file in shard_of.items() if file == shard}:
            raise UserError(
                f"{shard} does not contain the tensors that {path} lists; download both"
            )
        tensors |= found
    return FileContents(tensors=tensors)


def open_weight_file(path: Path) -> FileContents:
    """The contents of one weight file; its first bytes determine the format, not its suffix."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            start = file.read(MAGIC_BYTES)
        if start[:4] == b"PK\3\4":
            contents = open_zip_archive(path)
        elif len(start) > 8 and start[8:9] == b"{":
            contents = open_safetensors(path)
        else:
            raise UserError(f"{path} is not a weight file: {describe_content(start)}")
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; check the path") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    check_offsets(path, contents.tensors)
    return contents


def describe_content(start: bytes) -> str:
    """What a file seems to be, by its first bytes, and what to do about it."""
    if not start:
        return "it is empty"
    if start.startswith(b"version https://git-lfs"):
        return "it is a git-lfs pointer; run `git lfs pull`"
    if start.lstrip()[:1] == b"<":
        return "it is a web page; download the file itself"
    if start[:1] == b"\x80":
        return (
            "it is a bare pickle, as torch wrote before 1.6; if you trust it, load it with torch "
            "and save its tensors with torch.save or safetensors"
        )
    return "it is neither safetensors, nor a .pth or .bin of torch, nor a .npz; convert it first"


def check_offsets(path: Path, tensors: dict[str, LazyTensor]) -> None:
    """Raises unless every tensor ends inside its file and no two tensors overlap."""
    size = path.stat().st_size
    end, previous = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda pair: pair[1].offset):
        if not tensor.nbytes:
            continue
        if tensor.offset + tensor.nbytes > size:
            raise UserError(f"{path} ends before its tensor {name} does; download it again")
        if tensor.offset < end:
            raise UserError(
                f"{path} stores {previous} and {name} in the same bytes; "
                f"clone them before saving (tensor.clone())"
            )
        end, previous = tensor.offset + tensor.nbytes, name


def open_safetensors(path: Path) -> FileContents:
    """The package checks that the header is valid and that tensors fill the file without gaps."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER:
        raise UserError(
            f"{path} has a header of {length:,} bytes, more than {MAX_HEADER:,}; "
            "save the tensors only"
        )
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            headers = {name: (x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}
    except SafetensorError as error:
        raise UserError(f"{path} is not a valid safetensors file: {error}") from error
    offset, tensors = 8 + length, {}
    for name, (dtype, shape) in headers.items():  # in the order of their offsets, without gaps
        if dtype not in DTYPES:
            raise UserError(
                f"{path} stores {name} as {dtype}; only floating-point weights can be loaded"
            )
        tensor = LazyTensor(
            file=path, offset=offset, stored_shape=shape, shape=shape, dtype=DTYPES[dtype]
        )
        tensors[name], offset = tensor, offset + tensor.nbytes
    return FileContents(tensors=tensors, metadata=metadata)
