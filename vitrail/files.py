"""The one place that writes: atomic, fsynced, all or nothing."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitrail.errors import UserError

ADVICE = {  # what to do about what a system says
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "raise the limit with ulimit -f",
    errno.EMFILE: "raise the limit with ulimit -n",
    errno.ENFILE: "close other programs",
    errno.ENOMEM: "close other programs",
    errno.EROFS: "make it writable",
    errno.EACCES: "make it writable",
    errno.ENAMETOOLONG: "shorten it",
}
SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # it lies at the system, not at the file


def write(path: str | Path, data: bytes | str) -> None:
    """Puts `data` at `path` whole, or leaves there what was there before."""
    path = Path(path)
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise UserError(f"cannot write {path}: {refusal(error)}; nothing was changed") from error


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
    try:
        while out is None and folder.exists():
            number, folder = number + 1, Path(f"{usual}-{number + 1}")
        check_empty(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {folder}: {refusal(error)}; choose another --out") from error
    return folder


def check_empty(folder: Path) -> None:
    """Refuses a place where something lies already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is no empty folder; choose another --out")


def expanded(path: str | Path) -> Path:
    """The path with its ~ replaced by that user's folder, if there is one."""
    return Path(os.path.expanduser(path))


def check_text(path: str | Path) -> None:
    """Refuses names of bytes that are no text: neither recipes nor safetensors can have them."""
    name = str(path)
    if name != name.encode(errors="replace").decode():
        raise UserError(f"{name!r} is no UTF-8 text; rename it, or choose another")


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def refusal(error: OSError) -> str:
    """What the system said, and what to do about it where that is known."""
    words = error.strerror or str(error)
    return f"{words}, {ADVICE[error.errno]}" if error.errno in ADVICE else words


def sweep(folder: Path, *names: str) -> None:
    """Removes what a killed writing of these names has left in `folder`."""
    for name in names:
        for rest in folder.glob(f".{name[:100]}.*.tmp"):
            shutil.rmtree(rest, ignore_errors=True)
