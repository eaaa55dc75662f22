"""All that must survive a crash: save, load, resume; and the lock on a run folder."""

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import socket
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
from vitrail.errors import UserError

FORMAT = 1  # of the folders written here
FACTS, TENSORS, MANIFEST = "facts.json", "tensors.safetensors", "manifest.json"
BEFORE = ".before"  # ends the name of a state that makes room for one of the same step
NAME = re.compile(r"step-\d{8,15}(\.before)?")


@dataclass(frozen=True, kw_only=True)
class State:
    step: int  # steps done
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    warnings: tuple[str, ...] = ()  # newer states that were broken, and what may change the bits


def save(
    folder: str | Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Commits `folder/step-00001200` by one rename; it and the newest before it stay.

    `facts` is anything that JSON holds; its numbers come back to the last bit.
    """
    folder = Path(folder)
    path = folder / f"step-{step:08d}"
    if not folder.parent.is_dir():
        raise gone(folder.parent, f"step {step}")
    failure = f"cannot save step {step} in {folder}"
    with disk_told(failure, "older states are untouched"), files.replacing(path) as new:
        new.mkdir()
        arrays = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(arrays, new / TENSORS)
        (new / FACTS).write_text(json.dumps({"facts": facts, "machine": machine()}))
        (new / MANIFEST).write_text(manifest(new, step))
        set_aside(path)
    with disk_told(f"cannot clear {folder} of older states", "the newest is saved"):
        prune(folder, step)


def gone(folder: Path, what: str) -> UserError:
    return UserError(
        f"{folder} is gone, {what} was not saved; put it back, or resume it where it is now"
    )


def load(folder: str | Path) -> State | None:
    """The newest state that is whole; None where none was ever saved."""
    with disk_told(f"cannot look into {folder}", "nothing was changed"):
        paths = saved(Path(folder))
    broken = []
    for path in paths:
        try:
            state = read(path)
        except UserError as error:
            broken.append(f"{path.name} {error}")
            continue
        passed = [f"{reason}; going back to step {state.step}" for reason in broken]
        return replace(state, warnings=(*passed, *state.warnings))
    if broken:
        raise UserError(f"no state in {folder} is whole: {', '.join(broken)}; start a new run")
    return None


def read(path: Path) -> State:
    """One state, checked to the last byte."""
    step = number_of(path)
    try:
        check(manifest(path, step), plain_file(path / MANIFEST).read_bytes())
        facts = json.loads((path / FACTS).read_text())
        return State(
            step=step,
            tensors=load_file(path / TENSORS),
            facts=facts["facts"],
            warnings=changes(facts["machine"], machine()),
        )
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}") from error
    except (SafetensorError, json.JSONDecodeError, LookupError, TypeError, RuntimeError) as error:
        raise UserError(f"holds what no state holds: {error!r:.80}") from error


def manifest(path: Path, step: int) -> str:
    """What a state consists of, to the byte; one line for each fact."""
    facts: dict[str, Any] = {"format": FORMAT, "step": step}
    for name in (FACTS, TENSORS):
        with plain_file(path / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            facts[name] = f"{os.fstat(file.fileno()).st_size} bytes, sha256 {digest}"
    return json.dumps(facts, indent=1)


def check(found: str, written: bytes) -> None:
    """Compares what a folder holds with what its manifest says; every byte counts in both."""
    lines = written.decode(errors="replace").split("\n")
    for mine, theirs in zip_longest(found.split("\n"), lines, fillvalue=""):
        if mine != theirs:
            fact = mine.strip(' ",{}').partition('"')[0] or MANIFEST
            if fact == "format":
                raise UserError(f"has no format {FORMAT}; resume with the version that wrote it")
            raise UserError(f"is damaged: {fact} is not as it was saved")


def plain_file(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"is not whole: {path.name} is missing")
    return path


def number_of(path: Path) -> int:
    """Steps done, by the name of a state's folder."""
    return int(path.name.removeprefix("step-").removesuffix(BEFORE))


def saved(folder: Path) -> list[Path]:
    """The folders of all states, newest first, whole or not."""
    found = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (-number_of(path), path.name))


def set_aside(path: Path) -> None:
    """Makes room for a second state of the same step; until that is there, the first still loads.

    It differs in its facts: the end of an epoch adds a validation score.
    """
    if path.exists():
        aside = path.with_name(path.name + BEFORE)
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)


def prune(folder: Path, step: int) -> None:
    """Leaves the state of `step` and the newest before it.

    States past it are broken, or the training would have gone on from there.
    """
    files.sweep(folder, "step-*")
    older = [path for path in saved(folder) if number_of(path) < step and path.suffix != BEFORE]
    newest = folder / f"step-{step:08d}"
    for path in saved(folder):
        if path not in (newest, *older[:1]):
            shutil.rmtree(path)  # a kill in here leaves a broken state older than a whole one


def machine() -> dict[str, str | int]:
    """What decides on the last bits of a training, beside its settings and data."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processes": dist.get_world_size() if dist.is_initialized() else 1,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "vitrail": __version__,
        **{name: installed(name) for name in ("numpy", "pillow", "simplejpeg")},
    }


@cache
def installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        f"saved with {name} {then.get(name)}, going on with {now[name]}: the last bits may differ"
        for name in now
        if then.get(name, now[name]) != now[name]
    )


@contextmanager
def disk_told(failure: str, left: str) -> Iterator[None]:
    """Tells what the disk refused, and what is left on it, in one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{failure}: {files.refusal(error)}; {left}") from error
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))  # it writes for itself
        why = files.refusal(OSError(int(number[1]), os.strerror(int(number[1])))) if number else ""
        raise UserError(f"{failure}: {why or error}; {left}") from error


_HELD: set[Path] = set()  # by this process, which the system would let in a second time


@contextmanager
def lock(folder: str | Path) -> Iterator[None]:
    """Keeps other processes out of a run folder until the block or this process ends.

    A record lock, which no child inherits: workers that outlive a killed process do not hold it.
    """
    path = Path(folder).resolve() / ".lock"
    if path in _HELD:
        raise in_use(folder, f"{os.getpid()}")
    with disk_told(f"cannot lock {folder}", "nothing was changed"):
        file = path.open("a+")
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            raise in_use(folder, file.read(200).strip()) from error
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}")
        file.flush()
        _HELD.add(path)
        try:
            yield
        finally:
            _HELD.remove(path)


def in_use(folder: str | Path, holder: str) -> UserError:
    return UserError(
        f"{folder} is in use by process {holder}; wait for it, or choose another --out"
    )
