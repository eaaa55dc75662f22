"""Checkpoints that survive a crash: saved in one rename, verified byte by byte when loaded.

A sharded training writes one file per rank. Concatenated in the order of the ranks, they are the
tensors of an unsharded one, so that either can resume what the other has saved.
"""

import hashlib
import json
import os
import platform
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch import distributed as dist

from vitrail import __version__, files
from vitrail.decoding import parse_json
from vitrail.errors import UserError
from vitrail.training.device import has_bfloat16_units
from vitrail.training.distributed import SINGLE, World

FORMAT = 1  # version of the folders written here
CHECKPOINTS_KEPT = 2  # the newest, and one to fall back on if a disk error damages the newest
PROGRESS, TENSORS, MANIFEST = "progress.json", "tensors.safetensors", "manifest.json"
REPLACED = ".replaced"  # suffix of a checkpoint while a new one of the same step is renamed
NAME = re.compile(r"step-\d{8,15}(\.replaced)?")
RANK_FILE = "rank-{:05d}-of-{:05d}.safetensors"
MAX_RANKS = 99_999
CHUNK = 16 << 20  # bytes that are hashed while they are written
DTYPES = {  # of safetensors
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

# name and shape of a whole tensor in, the rows to read out
FindRows = Callable[[str, tuple[int, ...]], slice]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    step: int  # steps done
    path: Path
    tensors: dict[str, Tensor]  # empty if they were not requested
    progress: dict[str, Any]  # the JSON that was saved with them
    warnings: tuple[str, ...] = ()  # newer checkpoints that were damaged; changes of the machine


def save_checkpoint(
    folder: str | Path,
    step: int,
    tensors: Mapping[str, Tensor],
    progress: Mapping[str, Any],
    world: World = SINGLE,
) -> None:
    """Saves `folder/step-00001200` in one rename, then removes old checkpoints.

    `progress` is any JSON; floats are restored to the last bit. All ranks of `world` must call it,
    each with its part of the tensors; once all of them have written theirs, the leader renames.
    """
    folder = Path(folder)
    path = folder / f"step-{step:08d}"
    failure, consequence = f"cannot save step {step} in {folder}", "older checkpoints are intact"
    with ExitStack() as stack:

        def create() -> str:
            if not folder.parent.is_dir():
                raise missing_folder_error(folder.parent, f"step {step}")
            stack.enter_context(report_disk_errors(failure, consequence))
            new = stack.enter_context(files.atomic_write(path))
            new.mkdir()
            return str(new.resolve())

        new = Path(world.on_leader(create))
        entries = write_parts(new, tensors, world, failure, consequence)

        def complete() -> None:
            content = {"progress": progress, "machine": describe_machine()}
            (new / PROGRESS).write_bytes(json.dumps(content).encode())
            (new / MANIFEST).write_bytes(make_manifest(new, step, entries).encode())
            move_aside(path)

        world.on_leader(complete)
    world.on_leader(lambda: prune_checkpoints(folder, step))


def write_parts(
    new: Path, tensors: Mapping[str, Tensor], world: World, failure: str, consequence: str
) -> dict[str, str]:
    """Writes the file of each rank; if one of them fails, raises on all."""
    name = TENSORS if world.size == 1 else RANK_FILE.format(world.rank, world.size)
    error, entry = "", ""
    try:
        with report_disk_errors(failure, consequence):
            if not new.is_dir():
                raise UserError(
                    f"rank {world.rank} cannot see {new.parent.parent}: a sharded training needs a "
                    f"run folder on a disk that all machines share; set `out`, or `train.shard` off"
                )
            entry = write_tensors(new / name, tensors)
    except UserError as caught:
        error = str(caught)
    found = world.all_gather([name, entry, error])
    for _, _, text in found:
        if text:
            raise UserError(text)
    return {name: entry for name, entry, _ in found}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes a safetensors file, one tensor after the other; returns its entry in the manifest.

    The library's own function copies all tensors first, and would leave the hashing for later.
    """
    # as the library does: the largest numbers first, so that all are aligned
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header, offset = {}, 0
    for name in names:
        end = offset + tensors[name].nbytes
        shape, dtype = list(tensors[name].shape), DTYPES[tensors[name].dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start_of_file = memoryview(len(text).to_bytes(8, "little") + text)
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
        for data in chain([start_of_file], (raw_bytes(tensors[name]) for name in names)):
            for start in range(0, len(data), CHUNK):
                chunk = data[start : start + CHUNK]
                hashing = pool.submit(digest.update, chunk)
                while chunk:
                    chunk = chunk[file.write(chunk) :]
                hashing.result()
        os.fsync(file.fileno())
        return f"{file.tell()} bytes, sha256 {digest.hexdigest()}"


def raw_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def missing_folder_error(folder: Path, what: str) -> UserError:
    return UserError(
        f"{folder} was moved or deleted, and {what} was not saved; "
        f"move it back, or resume it at its new path"
    )


def load_checkpoint(folder: str | Path, *, tensors: bool = True) -> Checkpoint | None:
    """The newest undamaged checkpoint; None if the folder has none at all.

    Without `tensors` it is verified, but none of them is loaded.
    """
    with report_disk_errors(f"cannot list {folder}", "nothing was changed"):
        paths = list_checkpoints(Path(folder))
    damaged = []
    for path in paths:
        try:
            checkpoint = read_checkpoint(path, tensors=tensors)
        except UserError as error:
            damaged.append(f"{path.name} {error}")
            continue
        fallback = [f"{reason}; falling back to step {checkpoint.step}" for reason in damaged]
        return replace(checkpoint, warnings=(*fallback, *checkpoint.warnings))
    if damaged:
        reasons = ", ".join(damaged)
        raise UserError(f"all checkpoints in {folder} are damaged: {reasons}; start a new run")
    return None


def read_checkpoint(path: Path, *, tensors: bool = True) -> Checkpoint:
    """One checkpoint, with every byte verified."""
    step = step_number(path)
    try:
        check_manifest(make_manifest(path, step), require_file(path / MANIFEST).read_bytes())
        content = parse_json((path / PROGRESS).read_bytes())
        return Checkpoint(
            step=step,
            path=path,
            tensors=read_parts(path) if tensors else {},
            progress=content["progress"],
            warnings=compare_machines(content["machine"], describe_machine()),
        )
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}") from error
    except (SafetensorError, json.JSONDecodeError, LookupError, TypeError, RuntimeError) as error:
        raise UserError(f"is not a valid checkpoint: {error!r:.80}") from error


def read_parts(
    path: Path, find_rows: FindRows = lambda name, shape: slice(None)
) -> dict[str, Tensor]:
    """The tensors of a checkpoint, or some rows of them, whether one or many ranks wrote it."""
    with ExitStack() as stack:
        opened = [
            stack.enter_context(safe_open(path / name, framework="pt"))
            for name in tensor_files(path)
        ]
        parts = defaultdict(list)
        for file in opened:
            for name in file.keys():  # noqa: SIM118 - not a dict
                parts[name].append(file.get_slice(name))
        return {name: join_rows(name, some, find_rows) for name, some in parts.items()}


def join_rows(name: str, parts: list[Any], find_rows: FindRows) -> Tensor:
    """Rows of a tensor whose rows are divided among the files of the ranks."""
    shape = parts[0].get_shape()
    if not shape:
        whole: Tensor = parts[0][...]
        return whole
    lengths = [part.get_shape()[0] for part in parts]
    start, stop, _ = find_rows(name, (sum(lengths), *shape[1:])).indices(sum(lengths))
    pieces, offset = [], 0
    for part, length in zip(parts, lengths, strict=True):
        first, last = max(start - offset, 0), min(stop - offset, length)
        if first < last:
            pieces.append(part[first:last])
        offset += length
    if not pieces:
        empty: Tensor = parts[0][:0]
        return empty
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def tensor_files(path: Path) -> list[str]:
    """The names of a checkpoint's files of tensors: one, or one for each rank that wrote it."""
    for written in sorted(path.glob("rank-*.safetensors")):
        size = written.stem.rpartition("-of-")[2]
        if size.isdecimal() and int(size) <= MAX_RANKS:
            return [RANK_FILE.format(rank, int(size)) for rank in range(int(size))]
    return [TENSORS]


def make_manifest(path: Path, step: int, known: Mapping[str, str] | None = None) -> str:
    """The sizes and checksums of a checkpoint's files, one per line; some may be `known`."""
    entries: dict[str, Any] = {"format": FORMAT, "step": step}
    for name in (PROGRESS, *tensor_files(path)):
        if known and name in known:
            entries[name] = known[name]
            continue
        with require_file(path / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            entries[name] = f"{os.fstat(file.fileno()).st_size} bytes, sha256 {digest}"
    return json.dumps(entries, indent=1)


def check_manifest(actual: str, stored: bytes) -> None:
    """Raises where the files of a checkpoint differ from its stored manifest, in any byte."""
    lines = stored.decode(errors="replace").split("\n")
    for mine, theirs in zip_longest(actual.split("\n"), lines, fillvalue=""):
        if mine != theirs:
            entry = mine.strip(' ",{}').partition('"')[0] or MANIFEST
            if entry == "format":
                raise UserError(f"is not of format {FORMAT}; resume with the version that wrote it")
            raise UserError(f"is damaged: {entry} differs from what was saved")


def require_file(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"is incomplete: {path.name} is missing")
    return path


def step_number(path: Path) -> int:
    """Steps done, from the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step-").removesuffix(REPLACED))


def list_checkpoints(folder: Path) -> list[Path]:
    """The folders of all checkpoints, newest first, damaged ones included."""
    paths = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=lambda path: (-step_number(path), path.name))


def move_aside(path: Path) -> None:
    """Renames a checkpoint so that a new one of the same step can take its name.

    Until then the old one still loads. The two differ in their progress: the end of an epoch adds
    a validation score.
    """
    if path.exists():
        aside = path.with_name(path.name + REPLACED)
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)


def prune_checkpoints(folder: Path, step: int) -> None:
    """Keeps the checkpoint of `step` and the newest ones before it.

    Checkpoints of later steps are damaged, or the training would have resumed from them.
    """
    with report_disk_errors(f"cannot remove old checkpoints from {folder}", "the newest is saved"):
        files.remove_temporary(folder, "step-*")
        paths = list_checkpoints(folder)
        older = [path for path in paths if step_number(path) < step and path.suffix != REPLACED]
        keep = [folder / f"step-{step:08d}", *older[: CHECKPOINTS_KEPT - 1]]
        for path in paths:
            if path not in keep:
                shutil.rmtree(path)  # if killed here, a damaged one stays behind an intact one


def describe_machine() -> dict[str, str | int]:
    """What determines the last bits of a training, besides its settings and data."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processes": dist.get_world_size() if dist.is_initialized() else 1,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        + " bfloat16" * has_bfloat16_units(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "vitrail": __version__,
        **{name: package_version(name) for name in ("numpy", "pillow", "simplejpeg")},
    }


@cache
def package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def compare_machines(saved: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[str, ...]:
    """A warning for each difference that may change the last bits of a resumed training."""
    same = {"processes": "weights, optimizer and batches are the same, but "}
    return tuple(
        f"saved with {name} {saved.get(name)}, resumed with {current[name]}: "
        f"{same.get(name, '')}the last bits may differ"
        for name in current
        if saved.get(name, current[name]) != current[name]
    )


@contextmanager
def report_disk_errors(failure: str, consequence: str) -> Iterator[None]:
    """Turns an error of the disk into one line: what failed, why, and what is still there."""
    try:
        yield
    except OSError as error:
        why = files.describe_os_error(error)
        raise UserError(f"{failure}: {why}; {consequence}") from error
