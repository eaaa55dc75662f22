"""Atomic, fsynced writes: a file or folder appears complete at its path, or not at all.

The package writes everything through here, except what grows or changes in place (the logs of a
run and of a search, a partial download), lock files, blocks of a cache that can be read again, and
temporary files that it deletes itself.
"""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitrail.errors import UserError

ADVICE = {  # what a user can do about an error of the operating system
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
RESOURCE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # the system's fault, not the file's
MAX_TEXT = 16 << 20  # bytes of a file that people write; 21,843 class names take 2 MB
# Characters of a name that its temporary folder repeats: at most 240 bytes of UTF-8, which leaves
# room for the rest of the temporary name in the 255 bytes that file systems allow.
PREFIX_LENGTH = 60


def write_file(path: str | Path, data: bytes | str) -> None:
    """Writes `data` to `path` completely, or leaves the previous file unchanged."""
    path = Path(path)
    try:
        with atomic_write(path) as temporary:
            temporary.write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        why = describe_os_error(error)
        raise UserError(f"cannot write {path}: {why}; nothing was changed") from error


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path for a file or folder that becomes `path` if the block succeeds.

    A file replaces an existing one, but never a device or pipe. A folder must be new: no system
    replaces a folder that holds files.
    """
    path = Path(path)
    check_regular(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name[:PREFIX_LENGTH]}."
    scratch = Path(tempfile.mkdtemp(prefix=prefix, suffix=".tmp", dir=path.parent))
    try:
        temporary = scratch / path.name
        yield temporary
        for file in [temporary, *temporary.rglob("*")]:
            fsync(file)
        temporary.replace(path)
        fsync(path.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read_regular(path: str | Path, limit: int = MAX_TEXT) -> bytes:
    """The content of a file that people write; OSError for pipes, devices and endless files."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would block
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"longer than {limit:,} bytes", str(path))
    return content


def check_regular(path: Path) -> None:
    """Raises for pipes and devices, which would block or never end; a missing file is not checked.

    For files that other libraries open or that are too large for `read_regular`, and for those
    that are written: a rename would replace /dev/null by a regular file.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path} is not a regular file; give a file or folder")


def create_output_folder(out: str | Path | None, default: str | Path) -> Path:
    """Creates `out`, or else `default`-1, -2, ...; raises if `out` contains files."""
    number, folder = 1, Path(out or f"{default}-1")
    try:
        while out is None and folder.exists():
            number, folder = number + 1, Path(f"{default}-{number + 1}")
        check_empty(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = describe_os_error(error)
        raise UserError(f"cannot create {folder}: {why}; choose another `out`") from error
    return folder


def check_empty(folder: Path) -> None:
    """Raises unless `folder` is empty or does not exist."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, not a folder; choose another `out`")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} already exists and is not empty; choose another `out`")


def expand_user(path: str | Path) -> Path:
    """Replaces a leading ~ or ~name with that user's home folder; leaves unknown names as is."""
    return Path(os.path.expanduser(path))


def check_utf8_name(path: str | Path) -> None:
    """Raises if the path is not valid UTF-8, which recipes and safetensors cannot store, or NUL."""
    name = str(path)
    if "\0" in name:
        raise UserError(f"{name!r:.60} contains a NUL character; no path can")
    if name != name.encode(errors="replace").decode():
        raise UserError(f"{name!r} is not valid UTF-8; rename it, or choose another")


def fsync(path: Path) -> None:
    """Flushes the content of a file, or the entries of a folder, to the disk."""
    is_folder = path.is_dir()
    try:
        # Windows flushes only files that are open for writing
        handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except PermissionError:
        if not is_folder:  # Windows cannot open a folder, and NTFS journals its entries
            raise


def describe_os_error(error: OSError) -> str:
    """The system's message, followed by the matching `ADVICE`, if any."""
    message = error.strerror or str(error)
    return f"{message}, {ADVICE[error.errno]}" if error.errno in ADVICE else message


def remove_temporary(folder: Path, *names: str) -> None:
    """Removes what interrupted writes of these names (or patterns) left in `folder`."""
    for name in names:
        for leftover in folder.glob(f".{name[:PREFIX_LENGTH]}.*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
