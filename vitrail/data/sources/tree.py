"""The files of a data set by their paths: in a folder on disk, in a zip, or in a store.

Skips hidden files and folders, and those that operating systems create (`Thumbs.db`). Does not
follow links to folders, which could form a loop, nor links to files outside.
"""

import os
import posixpath
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Protocol

from vitrail.data.image import SUFFIXES
from vitrail.data.sources.places import modification_time
from vitrail.data.sources.store import Location, StoreFile
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


class Members(Protocol):
    """The images of a data set that are not files on disk."""

    def read(self, index: int, size: int) -> bytes:
        """Reads an image; a `UserError` gives the reason without its name."""

    def select(self, indices: Sequence[int]) -> "Members":
        """Some of the images."""


class Tree(Protocol):
    """Files below a root."""

    @property
    def path(self) -> Location:
        """The folder, the zip file, or the URL."""

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

    def find_bytes(self, name: str) -> "Place":
        """The file that holds this file as it is, and the first and last of its bytes."""

    def enter(self, folder: str) -> "Tree":
        """The files below one of the folders."""

    def locate(self, names: Sequence[str]) -> Members | None:
        """These files in a zip or a store; None on disk, where paths lead to them."""


Place = tuple[Path | StoreFile, int, int]  # of a file's bytes


class ListedTree:
    """Files that were listed at once, below a root that is not a folder on disk."""

    def __init__(self, listed: Mapping[str, File | None], links: Sequence[str] = ()):
        self.listed = listed  # by path from the root; None for a folder
        self.links = set(links)  # paths that are not files themselves

    def scan(self, ignored: dict[str, str]) -> Iterator[Folder]:
        folders: dict[tuple[str, ...], Folder] = {(): Folder(())}
        for name in sorted(self.listed):
            file, parts = self.listed[name], tuple(name.rstrip("/").split("/"))
            for depth in range(1, len(parts) + (file is None)):
                folders.setdefault(parts[:depth], Folder(parts[:depth]))
            if file is None:
                continue
            if name in self.links:
                ignored[name] = "a link, which is not followed in a zip"
            elif posixpath.splitext(name)[1].lower() not in SUFFIXES:
                ignored[name] = "does not have the extension of an image"
            else:
                folder = folders[parts[:-1]]
                folder.names.append(name)
                folder.sizes.append(file.size)
                folder.mtimes.append(file.mtime)
        return iter([folders[parts] for parts in sorted(folders)])

    def list_names(self, folder: str = "") -> Sequence[str]:
        start = f"{folder}/" if folder else ""
        inside = (name[len(start) :] for name in self.listed if name.startswith(start))
        return sorted({first + slash for first, slash, _ in (n.partition("/") for n in inside)})

    def find(self, path: str) -> File:
        name = posixpath.normpath(path)
        if name.startswith(("/", "../")):
            raise UserError(f"{path} is outside the folder of the table")
        if name not in self.listed and f"{name}/" not in self.listed:
            raise MissingFile(f"{path}: no such file")
        file = self.listed.get(name)
        if file is None or name in self.links:
            raise UserError(f"{path} is not a regular file")
        return file

    def list_below(self, folder: str) -> dict[str, File | None]:
        """What is below one of the folders, by path from there."""
        start = f"{folder}/"
        return {
            name.removeprefix(start): file and replace(file, name=file.name.removeprefix(start))
            for name, file in self.listed.items()
            if name.startswith(start) and name != start
        }


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

    def find_bytes(self, name: str) -> Place:
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
