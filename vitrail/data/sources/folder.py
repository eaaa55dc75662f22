"""A folder of class folders, with or without `train/ val/ test/` above them.

Hidden files and folders and what systems leave behind (`Thumbs.db`) do not exist here. Folders
inside a class folder belong to the class. Links to folders are not followed, so a loop cannot be
entered, nor are links to files outside; what is left out is named in `ignored`.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.data.image import SUFFIXES, read_file
from vitrail.data.source import Item
from vitrail.data.sources.names import Names, match, tidy
from vitrail.data.split import SPLITS, settle
from vitrail.errors import UserError

LITTER = {"thumbs.db", "desktop.ini", "__macosx", "@eadir"}  # hidden, though without a dot


@dataclass(frozen=True, eq=False)
class Files:
    """Image files with their labels: what a folder or a table holds."""

    name: str
    path: Path  # the folder or table
    root: Path  # `ids` are paths from here
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    splits: NDArray[np.str_]
    ids: Names
    sizes: NDArray[np.int64]
    dates: NDArray[np.int64]
    ignored: dict[str, str]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Item:
        name, size = self.ids[index], int(self.sizes[index])
        content = read_file(os.path.join(self.root, name))
        if len(content) != size:
            raise UserError(f"changed since it was listed: {len(content)} bytes instead of {size}")
        suffix = os.path.splitext(name)[1].lower()
        return Item(content, int(self.labels[index]), name, suffix)


@dataclass
class Folder:
    """One folder met on the walk, with the images directly inside."""

    parts: tuple[str, ...]  # its path below the root
    names: list[str] = field(default_factory=list)  # paths of the images below the root
    sizes: list[int] = field(default_factory=list)
    dates: list[int] = field(default_factory=list)


def open_folder(path: Path, *, classes: Sequence[str] | None, split: bool, progress: bool) -> Files:
    """All images below class folders; the names of the folders are the classes."""
    ignored: dict[str, str] = {}
    folders = list(walk(path, ignored))
    if not any(folder.names for folder in folders):
        raise UserError(nothing_there(path, ignored))
    places = [place(folder, split_tops(folders)) for folder in folders]
    used = []
    for folder, (given, name) in zip(folders, places, strict=True):
        if name is None:
            ignored |= dict.fromkeys(folder.names, "in no class folder")
        elif folder.names or split:  # a class without images is a mistake, but not in a test set
            used.append((folder, given, tidy(name)))
    if not any(folder.names for folder, _, _ in used):
        raise UserError(
            f"the images of {path} lie in no class folders; "
            f"put those of each class into a folder of its own, or write a table of them"
        )
    found = {name: f"folder {'/'.join(folder.parts)}" for folder, _, name in used}
    if split and len(found) == 1:
        raise UserError(one_class(path, folders, next(iter(found))))
    names, index = match(found, classes)
    parts = [(folder, given, index[name]) for folder, given, name in used]
    source = gather(path, path.resolve().name or "data", names, parts, ignored)
    return settle(source, split=split, progress=progress)


def gather(
    path: Path,
    name: str,
    classes: tuple[str, ...],
    parts: list[tuple[Folder, str, int]],
    ignored: dict[str, str],
) -> Files:
    """One source of many folders, each with its split, if it has one, and its class."""
    counts = [len(folder.names) for folder, _, _ in parts]
    return Files(
        name=name,
        path=path.absolute(),
        root=path.absolute(),
        classes=classes,
        labels=np.repeat(np.array([label for _, _, label in parts], np.int64), counts),
        splits=np.repeat(np.array([given for _, given, _ in parts], "<U5"), counts),
        ids=Names(file for folder, _, _ in parts for file in folder.names),
        sizes=np.array([size for folder, _, _ in parts for size in folder.sizes], np.int64),
        dates=np.array([date for folder, _, _ in parts for date in folder.dates], np.int64),
        ignored=ignored,
    )


def walk(root: Path, ignored: dict[str, str], start: tuple[str, ...] = ()) -> Iterator[Folder]:
    """Every visible folder from `start` on, sorted by name; notes in `ignored` what is no image."""
    inside = os.path.realpath(root)
    todo = [start]
    while todo:
        folder = Folder(todo.pop())
        deeper = []
        for entry in entries(root, folder.parts):
            name = "/".join([*folder.parts, entry.name])
            if entry.is_dir(follow_symlinks=False):
                deeper.append((*folder.parts, entry.name))
            elif why := unfit(entry, inside):
                ignored[name] = why
            elif status := status_of(entry):
                folder.names.append(name)
                folder.sizes.append(status.st_size)
                folder.dates.append(status.st_mtime_ns)
            else:
                ignored[name] = "gone while the folder was read"
        todo += reversed(deeper)
        yield folder


def entries(root: Path, parts: tuple[str, ...]) -> list[os.DirEntry[str]]:
    """What a folder holds, sorted, without what is hidden."""
    path = os.path.join(root, *parts)
    try:
        with os.scandir(path) as found:
            visible = [entry for entry in found if not hidden(entry.name)]
    except OSError as error:
        raise UserError(f"cannot look into {path}: {error.strerror}") from error
    return sorted(visible, key=lambda entry: entry.name)


def hidden(name: str) -> bool:
    return name.startswith(".") or name.casefold() in LITTER


def status_of(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat()
    except OSError:
        return None


def unfit(entry: os.DirEntry[str], inside: str) -> str | None:
    """Why this is no image of the set, if it is none; `inside` is the real path of the root."""
    if entry.is_symlink():
        try:
            mode = os.stat(entry.path).st_mode
        except OSError:
            return "a link to nothing"
        if stat.S_ISDIR(mode):
            return "a link to a folder, which is not followed"
        if not within(os.path.realpath(entry.path), inside):
            return "a link that leaves the folder"
    if not entry.is_file():
        return "no regular file"
    if os.path.splitext(entry.name)[1].lower() not in SUFFIXES:
        return "not named like an image"
    return None


def within(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")


def split_tops(folders: list[Folder]) -> dict[str, str]:
    """The top folders that are splits, not classes: they hold folders of images.

    A class may be called "train". So one of them alone counts only where no other folder has
    images, and one that holds images and no folders, as an unlabelled `test/` does, never.
    """
    deep = {folder.parts[0] for folder in folders if len(folder.parts) > 1 and folder.names}
    tops = {top: SPLITS[top.casefold()] for top in deep if top.casefold() in SPLITS}
    others = any(
        folder.names and folder.parts and folder.parts[0].casefold() not in SPLITS
        for folder in folders
    )
    return tops if len(set(tops.values())) > 1 or not others else {}


def place(folder: Folder, tops: dict[str, str]) -> tuple[str, str | None]:
    """The split and the class that a folder's images belong to: "" and None if they have none."""
    if not tops:
        return "", folder.parts[0] if folder.parts else None
    if len(folder.parts) < 2 or folder.parts[0] not in tops:
        return "", None
    return tops[folder.parts[0]], folder.parts[1]


def one_class(path: Path, folders: list[Folder], name: str) -> str:
    inner = next((folder for folder in folders if len(folder.parts) == 2 and folder.names), None)
    hint = f"; did you mean {path / inner.parts[0]}?" if inner else ""
    return f"{path} has one class only, {name!r}; at least 2 are needed{hint}"


def nothing_there(path: Path, ignored: dict[str, str]) -> str:
    hint = ""
    if ignored:
        name, why = next(iter(ignored.items()))
        hint = f" ({len(ignored)} other file{'s' * (len(ignored) > 1)}, such as {name}: {why})"
    kinds = "JPEG, PNG, WebP, GIF, BMP, TIFF or .npy"
    return f"no images in {path}{hint}; wanted a folder for each class with {kinds} files inside"
