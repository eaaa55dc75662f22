"""Recognises the layout of a folder or zip: metadata of Hugging Face, Kaggle, ImageNet, classes."""

import posixpath
from collections.abc import Sequence
from typing import Any

from vitrail.data.config import Columns
from vitrail.data.image import SUFFIXES
from vitrail.data.sources import imagenet
from vitrail.data.sources.folder import FileSource, open_folder
from vitrail.data.sources.shards import find_shards
from vitrail.data.sources.table import Table, open_tables, read_header
from vitrail.data.sources.tree import Tree
from vitrail.data.split import SPLIT_ALIASES
from vitrail.errors import UserError

METADATA = ("metadata.csv", "metadata.jsonl")  # of Hugging Face's image folders: `file_name`


def open_tree(tree: Tree, *, columns: Columns, **settings: Any) -> FileSource:
    """Opens the images of a folder or zip, whatever its layout."""
    tree = enter_only_folder(tree)
    if tables := find_tables(tree, columns):
        return open_tables(tree, tables, columns=columns, **settings)
    if columns != Columns():
        raise UserError(f"{tree.path} is not a table; omit `data.columns`")
    if settings["labels"] == "partial":
        raise UserError(
            f"{tree.path} has no table, whose labels may be missing; omit `data.labels`"
        )
    if (truth := imagenet.find_ground_truth(tree)) and settings["labels"] in (None, "single"):
        settings.pop("labels")
        return imagenet.open_validation(tree, truth, **settings)
    return open_folder(tree, **settings)


def enter_only_folder(tree: Tree) -> Tree:
    """The folder that a zip or folder consists of, if that one holds tables or shards."""
    names = tree.list_names()
    if len(names) == 1 and names[0].endswith("/"):
        inner = tree.enter(names[0][:-1])
        if find_metadata(inner) or find_kaggle(inner) or imagenet.find_ground_truth(inner):
            return inner
        if find_shards(inner):
            return inner
    return tree


def has_tables(tree: Tree, columns: Columns) -> bool:
    """Whether the labels are in tables, whose columns have names."""
    return bool(find_tables(enter_only_folder(tree), columns))


def find_tables(tree: Tree, columns: Columns) -> list[Table]:
    """The tables with the labels of the images; none if class folders have them."""
    found = find_metadata(tree) or find_kaggle(tree)
    if not found or columns != Columns():
        return found
    labelled = all(columns.label in read_header(tree, table.name) for table in found)
    return [] if not labelled and has_class_folders(tree) else found


def find_metadata(tree: Tree) -> list[Table]:
    """Hugging Face's `metadata.csv` or `.jsonl`: one for all images, or one in each split."""
    names = tree.list_names()
    if here := pick_metadata(names, ""):
        return [Table(here, by_folder=True)]
    splits = [name[:-1] for name in names if name[:-1].casefold() in SPLIT_ALIASES]
    tables = {split: pick_metadata(tree.list_names(split), split) for split in splits}
    return [
        Table(name, split=SPLIT_ALIASES[split.casefold()]) for split, name in tables.items() if name
    ]


def pick_metadata(names: Sequence[str], folder: str) -> str:
    found = [name for name in METADATA if name in names]
    if len(found) > 1:
        where = f" in {folder}" if folder else ""
        raise UserError(f"both {' and '.join(found)} exist{where}; remove one of them")
    return posixpath.join(folder, found[0]) if found else ""


def find_kaggle(tree: Tree) -> list[Table]:
    """Kaggle's `train.csv`, if `train/` beside it holds images and not class folders."""
    names = tree.list_names()
    if "train.csv" not in names or "train/" not in names or not has_images(tree, "train"):
        return []
    return [Table("train.csv")]


def has_images(tree: Tree, folder: str) -> bool:
    """Whether images are directly in a folder."""
    return any(posixpath.splitext(name)[1].lower() in SUFFIXES for name in tree.list_names(folder))


def has_class_folders(tree: Tree) -> bool:
    """Whether images are in folders that are not splits."""
    return any(
        folder.names and any(part.casefold() not in SPLIT_ALIASES for part in folder.parts)
        for folder in tree.scan({})
    )
