"""The one place that writes: atomic, fsynced, all or nothing."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitrail.errors import UserError


def write(path: str | Path, data: bytes | str) -> None:
    """Puts `data` at `path` whole, or leaves there what was there before."""
    path = Path(path)
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; nothing was changed") from error


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Where the block writes a file or a folder that becomes `path` if the block ends well.

    A folder must be new: no rename puts one folder in the place of another.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    holder = Path(tempfile.mkdtemp(prefix=f".{path.name[:100]}.", suffix=".tmp", dir=path.parent))
    try:
        temporary = holder / path.name
        yield temporary
        for file in [temporary, *temporary.rglob("*")]:
            sync(file)
        temporary.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def fresh_folder(out: str | Path | None, usual: str | Path) -> Path:
    """A new folder `out`, or else `usual`-1, -2, ...; one that holds something is never touched."""
    number, folder = 1, Path(out or f"{usual}-1")
    while out is None and folder.exists():
        number, folder = number + 1, Path(f"{usual}-{number + 1}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is no empty folder; choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {folder}: {error.strerror}; choose another --out") from error
    return folder


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
