"""The files of a data set by their paths: in a folder on disk, or in a zip that is not unpacked.

Skips hidden files and folders, and those that operating systems create (`Thumbs.db`). Does not
follow links to folders, which could form a loop, nor links to files outside.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from vitrail.data.image import SUFFIXES
from vitrail.data.sources.places import modification_time
from vitrail.errors import UserError
from vitrail.files import RESOURCE_ERRORS, describe_os_error

# Created by Windows, macOS and Synology: hidden there, but without a leading dot.
SYSTEM_FILES = {"thumbs.db", "desktop.ini", "__macosx", "@eadir"}


class MissingFile(UserError):
    """No file has this path."""


@dataclass(frozen=True)
class File:
    name: str  # its path from the root, with /
    size: int  # bytes
    mtime: int  # nanoseconds since 1970


@dataclass
class Folder:
    """One folder below the root, with the images directly inside."""

    parts: tuple[str, ...]  # its path below the root
    names: list[str] = field(default_factory=list)  # paths of the images below the root
    sizes: list[int] = field(default_factory=list)
    mtimes: list[int] = field(default_factory=list)


class Tree(Protocol):
    """Files below a root."""

    @property
    def path(self) -> Path:
        """The folder, or the zip file."""

    @property
    def name(self) -> str:
        """A short name for the data set: "flowers"."""

    def scan(self, ignored: dict[str, str]) -> Iterator[Folder]:
        """Every visible folder, sorted by name; adds files that are not images to `ignored`."""

    def list_names(self, folder: str = "") -> Sequence[str]:
        """The names of the visible files and folders in a folder, sorted; folders end in /."""

    def find(self, path: str) -> File:
        """The file with this path; a `UserError` says why it cannot be part of the data."""

    def open_file(self, name: str) -> BinaryIO:
        """Opens a file for reading."""

    def find_bytes(self, name: str) -> tuple[Path, int, int]:
        """The file on disk that holds this file as it is, and the first and last of its bytes."""

    def enter(self, folder: str) -> "Tree":
        """The files below one of the folders."""

    def locate(self, names: Sequence[str]) -> NDArray[np.int64] | None:
        """Where a zip has each of these files (see `archive.read_member`); None on disk."""


class FolderTree:
    """Files below a folder on disk."""

    def __init__(self, path: Path):
        self.path = path.absolute()
        self.name = path.resolve().name or "data"
        self.real_root = os.path.realpath(path)  # resolved, for comparisons
        self.real_folders: dict[str, str] = {}  # the real path of each folder

    def scan(self, ignored: dict[str, str]) -> Iterator[Folder]:
        return scan_folders(self.path, ignored)

    def list_names(self, folder: str = "") -> Sequence[str]:
        entries = list_visible(self.path, tuple(folder.split("/")) if folder else ())
        return [
            f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name
            for entry in entries
        ]

    def find(self, path: str) -> File:
        full = os.path.normpath(os.path.join(self.real_root, path))
        if not is_inside(full, self.real_root):
            raise UserError(
                f"{path} is outside the folder of the table; move the table to a parent folder"
            )
        folder = os.path.dirname(full)
        if folder not in self.real_folders:
            self.real_folders[folder] = os.path.realpath(folder)
        try:
            status = os.lstat(full)
            if stat.S_ISLNK(status.st_mode):
                status, real = os.stat(full), os.path.realpath(full)
            else:
                real = os.path.join(self.real_folders[folder], os.path.basename(full))
        except OSError as error:
            kind = MissingFile if isinstance(error, FileNotFoundError) else UserError
            raise kind(f"{path}: {(error.strerror or str(error)).lower()}") from error
        if not is_inside(real, self.real_root):
            raise UserError(f"{path} is a link to a file outside the folder of the table")
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a regular file")
        name = full[len(self.real_root.rstrip(os.sep)) + 1 :].replace(os.sep, "/")
        return File(name, status.st_size, modification_time(status))

    def open_file(self, name: str) -> BinaryIO:
        return open(self.path / name, "rb")

    def find_bytes(self, name: str) -> tuple[Path, int, int]:
        return self.path / name, 0, (self.path / name).stat().st_size

    def enter(self, folder: str) -> "FolderTree":
        return FolderTree(self.path / folder)

    def locate(self, names: Sequence[str]) -> None:
        return None


def scan_folders(
    root: Path, ignored: dict[str, str], start: tuple[str, ...] = ()
) -> Iterator[Folder]:
    """Every visible folder below `start`, sorted by name; adds other files to `ignored`."""
    real_root = os.path.realpath(root)
    queue = [start]
    while queue:
        folder = Folder(queue.pop())
        subfolders = []
        for entry in list_visible(root, folder.parts):
            name = "/".join([*folder.parts, entry.name])
            if entry.is_dir(follow_symlinks=False):
                subfolders.append((*folder.parts, entry.name))
            elif why := reason_to_ignore(entry, real_root):
                ignored[name] = why
            elif status := stat_entry(entry):
                folder.names.append(name)
                folder.sizes.append(status.st_size)
                folder.mtimes.append(modification_time(status))
            else:
                ignored[name] = "deleted while the folder was read"
        queue += reversed(subfolders)
        yield folder


def list_visible(root: Path, parts: tuple[str, ...]) -> list[os.DirEntry[str]]:
    """The entries of a folder that are not hidden, sorted."""
    path = os.path.join(root, *parts)
    try:
        with os.scandir(path) as entries:
            visible = [entry for entry in entries if not is_hidden(entry.name)]
    except OSError as error:
        kind = MissingFile if isinstance(error, FileNotFoundError) else UserError
        why = describe_os_error(error) if error.errno in RESOURCE_ERRORS else error.strerror
        raise kind(f"cannot list {path}: {why}") from error
    return sorted(visible, key=lambda entry: entry.name)


def is_hidden(name: str) -> bool:
    return name.startswith(".") or name.casefold() in SYSTEM_FILES


def stat_entry(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat()
    except OSError:
        return None


def reason_to_ignore(entry: os.DirEntry[str], real_root: str) -> str | None:
    """Why a file does not belong to the data set; None if it does."""
    if entry.is_symlink():
        try:
            mode = os.stat(entry.path).st_mode
        except OSError:
            return "a broken link"
        if stat.S_ISDIR(mode):
            return "a link to a folder, which is not followed"
        if not is_inside(os.path.realpath(entry.path), real_root):
            return "a link to a file outside the folder"
    if not entry.is_file():
        return "not a regular file"
    if os.path.splitext(entry.name)[1].lower() not in SUFFIXES:
        return "does not have the extension of an image"
    return None


def is_inside(path: str, folder: str) -> bool:
    """Whether a path is below a folder; both must be real paths."""
    return path.startswith(folder.rstrip(os.sep) + os.sep)
