"""Checkpoints that survive a crash: saved in one rename, verified byte by byte when loaded."""

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch import distributed as dist

from vitrail import __version__, files
from vitrail.decoding import parse_json
from vitrail.errors import UserError

FORMAT = 1  # version of the folders written here
CHECKPOINTS_KEPT = 2  # the newest, and one to fall back on if a disk error damages the newest
PROGRESS, TENSORS, MANIFEST = "progress.json", "tensors.safetensors", "manifest.json"
REPLACED = ".replaced"  # suffix of a checkpoint while a new one of the same step is renamed
NAME = re.compile(r"step-\d{8,15}(\.replaced)?")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    step: int  # steps done
    tensors: dict[str, Tensor]
    progress: dict[str, Any]  # the JSON that was saved with them
    warnings: tuple[str, ...] = ()  # newer checkpoints that were damaged; changes of the machine


def save_checkpoint(
    folder: str | Path, step: int, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]
) -> None:
    """Saves `folder/step-00001200` in one rename, then removes old checkpoints.

    `progress` is any JSON; floats are restored to the last bit.
    """
    folder = Path(folder)
    path = folder / f"step-{step:08d}"
    if not folder.parent.is_dir():
        raise missing_folder_error(folder.parent, f"step {step}")
    failure = f"cannot save step {step} in {folder}"
    with (
        report_disk_errors(failure, "older checkpoints are intact"),
        files.atomic_write(path) as new,
    ):
        new.mkdir()
        arrays = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(arrays, new / TENSORS)
        content = {"progress": progress, "machine": describe_machine()}
        (new / PROGRESS).write_bytes(json.dumps(content).encode())
        (new / MANIFEST).write_bytes(make_manifest(new, step).encode())
        move_aside(path)
    with report_disk_errors(f"cannot remove old checkpoints from {folder}", "the newest is saved"):
        prune_checkpoints(folder, step)


def missing_folder_error(folder: Path, what: str) -> UserError:
    return UserError(
        f"{folder} was moved or deleted, and {what} was not saved; "
        f"move it back, or resume it at its new path"
    )


def load_checkpoint(folder: str | Path) -> Checkpoint | None:
    """The newest undamaged checkpoint; None if the folder has none at all."""
    with report_disk_errors(f"cannot list {folder}", "nothing was changed"):
        paths = list_checkpoints(Path(folder))
    damaged = []
    for path in paths:
        try:
            checkpoint = read_checkpoint(path)
        except UserError as error:
            damaged.append(f"{path.name} {error}")
            continue
        fallback = [f"{reason}; falling back to step {checkpoint.step}" for reason in damaged]
        return replace(checkpoint, warnings=(*fallback, *checkpoint.warnings))
    if damaged:
        reasons = ", ".join(damaged)
        raise UserError(f"all checkpoints in {folder} are damaged: {reasons}; start a new run")
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """One checkpoint, with every byte verified."""
    step = step_number(path)
    try:
        check_manifest(make_manifest(path, step), require_file(path / MANIFEST).read_bytes())
        content = parse_json((path / PROGRESS).read_bytes())
        return Checkpoint(
            step=step,
            tensors=load_file(path / TENSORS),
            progress=content["progress"],
            warnings=compare_machines(content["machine"], describe_machine()),
        )
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}") from error
    except (SafetensorError, json.JSONDecodeError, LookupError, TypeError, RuntimeError) as error:
        raise UserError(f"is not a valid checkpoint: {error!r:.80}") from error


def make_manifest(path: Path, step: int) -> str:
    """The sizes and checksums of a checkpoint's files, one per line."""
    entries: dict[str, Any] = {"format": FORMAT, "step": step}
    for name in (PROGRESS, TENSORS):
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
    files.remove_temporary(folder, "step-*")
    paths = list_checkpoints(folder)
    older = [path for path in paths if step_number(path) < step and path.suffix != REPLACED]
    keep = [folder / f"step-{step:08d}", *older[: CHECKPOINTS_KEPT - 1]]
    for path in paths:
        if path not in keep:
            shutil.rmtree(path)  # if killed here, a damaged checkpoint stays behind an intact one


def describe_machine() -> dict[str, str | int]:
    """What determines the last bits of a training, besides its settings and data."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processes": dist.get_world_size() if dist.is_initialized() else 1,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
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
    return tuple(
        f"saved with {name} {saved.get(name)}, resumed with {current[name]}: "
        f"the last bits may differ"
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
    except SafetensorError as error:  # has the number of the OSError only in its message
        match = re.search(r"os error (\d+)", str(error))
        why = str(error)
        if match:
            number = int(match[1])
            why = files.describe_os_error(OSError(number, os.strerror(number)))
        raise UserError(f"{failure}: {why}; {consequence}") from error
