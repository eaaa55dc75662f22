"""A folder of class folders, with or without `train/ val/ test/` above them.

Folders inside a class folder belong to the class. `ignored` lists every file that was left out,
with the reason.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.config import Columns, LabelKind
from vitrail.data.image import READABLE, read_file
from vitrail.data.reading.contents import ContentBuffer
from vitrail.data.source import UNLABELLED, Item, Source, has_label
from vitrail.data.sources.names import PackedNames, match_labels, normalise_name
from vitrail.data.sources.store import Location
from vitrail.data.sources.store_cache import Range
from vitrail.data.sources.store_tree import StoreMembers
from vitrail.data.sources.tree import Folder, Members, Tree
from vitrail.data.split import SPLIT_ALIASES, assign_splits
from vitrail.display.text import format_count
from vitrail.errors import UserError

BESIDE_TRAINING = "beside the folder of training images"  # why an image is ignored
NO_CLASS = "not in a class folder"


@dataclass(frozen=True, eq=False)
class FileSource:
    """Image files and their labels, from a folder, a table or a zip."""

    name: str
    path: Location  # the folder, table or zip
    root: Location  # `ids` are paths from here
    classes: tuple[str, ...]
    labels: NDArray[Any]  # class indices; multi-label: (images, classes) of 0 and 1
    splits: NDArray[np.str_]
    ids: PackedNames
    sizes: NDArray[np.int64]
    mtimes: NDArray[np.int64]
    ignored: dict[str, str]
    members: Members | None = None  # of a zip or a store
    columns: Columns = field(default_factory=Columns)  # of its tables
    requested_labels: LabelKind | None = None  # with which its tables were opened
    contents: ContentBuffer = field(default_factory=ContentBuffer, repr=False)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Item:
        name = self.ids[index]
        path = os.path.join(self.root, name) if self.members is None else str(self.path)
        content = self.contents.read(index, path, lambda: self._read(index, path))
        suffix = os.path.splitext(name)[1].lower()
        return Item(content, self.labels[index], name, suffix)

    def stored_range(self, index: int) -> Range | None:
        """Where an image is in a store; None if it is not in one."""
        if not isinstance(self.members, StoreMembers):
            return None
        return self.members.stored_range(index, int(self.sizes[index]))

    def _read(self, index: int, path: str) -> bytes:
        size = int(self.sizes[index])
        if self.members is not None:
            return self.members.read(index, size)
        content = read_file(path)
        if len(content) != size:
            raise UserError(
                f"changed since it was listed: it has {len(content)} bytes, expected {size}"
            )
        return content


def open_folder(
    tree: Tree,
    *,
    classes: Sequence[str] | None,
    labels: LabelKind | None = None,
    split: bool,
    progress: bool,
) -> FileSource:
    """All images below class folders; the names of these folders are the classes."""
    path, ignored = tree.path, dict[str, str]()
    folders = list(tree.scan(ignored))
    if not any(folder.names for folder in folders):
        raise UserError(describe_no_images(path, ignored, labels))
    if labels == "none":
        return open_unlabelled(tree, folders, ignored, split=split, progress=progress)
    split_folders = find_split_folders(folders)
    used = []
    for folder in folders:
        folder_split, name = split_and_class(folder, split_folders)
        if name is None:
            ignored |= dict.fromkeys(folder.names, NO_CLASS)
        elif folder.names or split:  # a class without images is a mistake, but not in a test set
            used.append((folder, folder_split, normalise_name(name)))
    if not any(folder.names for folder, _, _ in used):
        raise UserError(
            f"the images of {path} are not in class folders; "
            f"put the images of each class into a folder of their own, or list them in a table"
        )
    where = {name: f"folder {'/'.join(folder.parts)}" for folder, _, name in used}
    if split:
        check_class_names(path, where, labels)
    if len(where) == 1 and (split or not are_known(where, classes)):
        if (inner := find_inner_folder(folders)) is not None:
            return open_folder(
                tree.enter(inner), classes=classes, labels=labels, split=split, progress=progress
            )
        if split:
            raise UserError(describe_single_class(path, folders, next(iter(where))))
    names, index = match_labels(where, classes)
    parts = [(folder, part_split, index[name]) for folder, part_split, name in used]
    source = merge_folders(path, tree.name, names, parts, ignored)
    source = replace(source, members=tree.locate(source.ids))
    if labels == "multi":
        from vitrail.data.sources.multi_label import merge_copies

        source = merge_copies(source, progress)
    return assign_splits(source, split=split, progress=progress)


def open_unlabelled(
    tree: Tree, folders: list[Folder], ignored: dict[str, str], *, split: bool, progress: bool
) -> FileSource:
    """All images of a tree of folders, without labels.

    Folders called train, val or test at its top are splits, and others beside train do not belong
    to the data.
    """
    tops = {folder.parts[0] for folder in folders if folder.parts and folder.names}
    splits = {top: SPLIT_ALIASES[top.casefold()] for top in tops if top.casefold() in SPLIT_ALIASES}
    if "train" not in splits.values():
        if splits and split:
            names = sorted(splits)
            raise UserError(
                f"{tree.path} has a folder {' and '.join(names)} but no folder train; put the "
                f"training images into train/, or rename {names[0]} if it is not a split"
            )
        splits = {}
    parts = []
    for folder in folders:
        top = folder.parts[0] if folder.parts else ""
        if splits and top not in splits:
            ignored |= dict.fromkeys(folder.names, BESIDE_TRAINING)
        else:
            parts.append((folder, splits.get(top, ""), 0))
    source = merge_folders(tree.path, tree.name, (UNLABELLED,), parts, ignored)
    source = replace(source, members=tree.locate(source.ids))
    return assign_splits(source, split=split, progress=progress)


def merge_folders(
    path: Location,
    name: str,
    classes: tuple[str, ...],
    parts: list[tuple[Folder, str, int]],
    ignored: dict[str, str],
) -> FileSource:
    """One source from many folders, each with its split ("" if unknown) and its class index."""
    counts = [len(folder.names) for folder, _, _ in parts]
    return FileSource(
        name=name,
        path=path.absolute(),
        root=path.absolute(),
        classes=classes,
        labels=np.repeat(np.array([label for _, _, label in parts], np.int64), counts),
        splits=np.repeat(np.array([split for _, split, _ in parts], "<U5"), counts),
        ids=PackedNames(file for folder, _, _ in parts for file in folder.names),
        sizes=np.array([size for folder, _, _ in parts for size in folder.sizes], np.int64),
        mtimes=np.array([mtime for folder, _, _ in parts for mtime in folder.mtimes], np.int64),
        ignored=ignored,
    )


def find_split_folders(folders: list[Folder]) -> dict[str, str]:
    """The split of each top-level folder that is a split and not a class.

    A class may be called "train" too. So a split folder must contain folders of images, which an
    unlabelled `test/` does not, and a single one is a split only if no other folder has images.
    """
    nested = {folder.parts[0] for folder in folders if len(folder.parts) > 1 and folder.names}
    tops = {top: SPLIT_ALIASES[top.casefold()] for top in nested if top.casefold() in SPLIT_ALIASES}
    others = any(
        folder.names and folder.parts and folder.parts[0].casefold() not in SPLIT_ALIASES
        for folder in folders
    )
    return tops if len(set(tops.values())) > 1 or not others else {}


def split_and_class(folder: Folder, split_folders: dict[str, str]) -> tuple[str, str | None]:
    """The split and the class of a folder's images: "" and None if they have none."""
    if not split_folders:
        return "", folder.parts[0] if folder.parts else None
    if len(folder.parts) < 2 or folder.parts[0] not in split_folders:
        return "", None
    return split_folders[folder.parts[0]], folder.parts[1]


def check_class_names(path: Location, names: Iterable[str], labels: LabelKind | None) -> None:
    """Raises for classes that are the splits of a data set without class folders.

    Beside other classes, different splits are classes only if the caller says that there are
    labels.
    """
    splits = sorted(name for name in names if name.casefold() in SPLIT_ALIASES)
    others = sorted(name for name in names if name.casefold() not in SPLIT_ALIASES)
    different = len({SPLIT_ALIASES[name.casefold()] for name in splits}) > 1
    if len(splits) < 2 or (others and (labels or not different)):
        return
    advice = (
        f", or set `data.labels='single'` if they are classes like {others[0]}" if others else ""
    )
    raise UserError(
        f"{', '.join(splits)} of {path} are splits, but hold images without class folders; put "
        f"the images of each class into a folder of their own below them{advice}"
    )


def find_split_class(source: Source) -> str | None:
    """A class folder beside others that has the name of a split; None if there is none."""
    for number, name in enumerate(source.classes):
        if name.casefold() in SPLIT_ALIASES:
            items = np.flatnonzero(has_label(source, number)).tolist()
            if {source.ids[item].partition("/")[0] for item in items} == {name}:
                return name
    return None


def are_known(labels: Mapping[str, str], classes: Sequence[str] | None) -> bool:
    """Whether these are labels of a model with these classes."""
    try:
        match_labels(labels, classes)
    except UserError:
        return False
    return True


def find_inner_folder(folders: list[Folder]) -> str | None:
    """The only folder below the root, if it holds class folders and no images of its own."""
    used = [folder.parts for folder in folders if folder.names]
    tops = {parts[:1] for parts in used}
    classes = {parts[1] for parts in used if len(parts) > 1}
    if len(tops) != 1 or len(classes) < 2 or any(len(parts) < 2 for parts in used):
        return None
    return used[0][0]


def describe_single_class(path: Location, folders: list[Folder], name: str) -> str:
    inner = next((folder for folder in folders if len(folder.parts) == 2 and folder.names), None)
    hint = f"; did you mean {path / inner.parts[0]}?" if inner else ""
    return f"{path} has only one class, {name!r}; at least 2 are needed{hint}"


def describe_no_images(path: Location, ignored: dict[str, str], labels: LabelKind | None) -> str:
    hint = ""
    if ignored:
        name, why = next(iter(ignored.items()))
        hint = f" ({format_count(len(ignored), 'other file')}, such as {name}: {why})"
    expected = f"{READABLE} files"
    if labels != "none":
        expected = f"a folder of {expected} for each class"
    return f"no images in {path}{hint}; expected {expected}"
