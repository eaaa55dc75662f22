"""Opens a data set by path, URL or name: folder, table, zip, tar shards, hub, or built-in set."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import numpy as np

from vitrail import files
from vitrail.arguments import check_arguments
from vitrail.data.config import Columns, LabelKind
from vitrail.data.source import UNLABELLED, Source
from vitrail.data.sources import builtin, layouts, shards, table
from vitrail.data.sources.archive import ZipTree
from vitrail.data.sources.catalogue import DATASETS
from vitrail.data.sources.hub_dataset import PREFIX, open_hub_dataset
from vitrail.data.sources.store import URL, Location, is_url, parse_url
from vitrail.data.sources.store_tree import StoreTree
from vitrail.data.sources.tree import FolderTree, Tree
from vitrail.errors import UserError

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl")
ZIP_SUFFIX = ".zip"
DEFAULT_COLUMNS = Columns()


@check_arguments
def open_data(
    data: str | Path,
    *,
    columns: Mapping[str, str] | Columns | None = None,
    classes: Sequence[str] | None = None,
    labels: LabelKind | None = None,
    split: bool = True,
    progress: bool = True,
) -> Source:
    """Opens a data set: a folder of class folders, a table, tar shards or a built-in set.

    Args:
        data: a path, a URL such as "s3://bucket/photos", "hf:owner/name" for a data set of the
            Hugging Face hub, or the name of a built-in set such as "cifar10". The name takes
            precedence over a folder of the same name, which opens as "./cifar10". A zip of a folder
            opens like the folder.
        columns: names of the columns of a table, such as `{"label": "species"}`.
        classes: class names of a model, in its order. Labels must be among them, or be their
            indices from 0. By default the labels found are the classes, in natural order.
        labels: "multi" if an image may have any number of labels: in a table label cells with a
            separator, JSON lists or a column of 0 and 1 for each class; in a folder the same image
            in several class folders; on the hub a column of lists. "single" accepts class names
            that contain a separator. "none" opens images without labels, in any tree of folders;
            "partial" opens the rows of a table that have a label; a pretraining uses all rows.
        split: assign images without a given split to train, val and test. If false, they all
            become "test" and any number of images and classes is valid, as for evaluation.
        progress: show a progress bar on stderr if it is a terminal.

    Returns:
        A `Source`: `source[0].content` is an encoded file or an array of pixels; `labels`,
        `splits` and `ids` have one entry per image.

    Example:
        >>> source = vitrail.open_data("digits")
        >>> len(source), source.classes[:3]
        (1797, ('0', '1', '2'))
    """
    names = make_columns(columns)
    if labels not in (None, *get_args(LabelKind)):
        raise UserError(f"`labels` is {labels!r}; choose single, multi, partial or none")
    settings: dict[str, Any] = {"classes": classes, "split": split, "progress": progress}
    if not str(data):
        raise UserError(describe_unknown("", False, tuple(DATASETS)))
    path, is_hub, is_builtin = locate(data), is_hub_dataset(data), data in DATASETS
    try:
        is_table = is_file(path) and path.suffix.lower() in TABLE_SUFFIXES
        tree = None if is_hub or is_builtin or is_table else make_tree(path)
        inner = layouts.enter_only_folder(tree) if tree is not None else None
        tars = shards.find_shards(inner) if inner is not None else []
    except OSError as error:
        raise UserError(f"cannot open {data}: {files.describe_os_error(error)}") from error
    if labels == "multi" and is_builtin:
        raise UserError(f"{data} has one label per image; omit `data.labels`")
    if labels == "partial" and (is_builtin or tars or is_hub):
        raise UserError(f"{data} is not a table, whose labels may be missing; omit `data.labels`")
    if is_hub:
        return open_hub_dataset(str(data), columns=names, labels=labels, **settings)
    if is_table:
        return table.open_table(path, columns=names, labels=labels, **settings)
    if (is_builtin or tars) and names != DEFAULT_COLUMNS:
        raise UserError(f"{data} is not a table; omit `data.columns`")
    if is_builtin:
        opened = builtin.open_builtin(str(data), **settings)
        return drop_labels(opened) if labels == "none" else opened
    if inner is not None and tars:
        return shards.open_shards(inner, tars, labels=labels, **settings)
    if tree is None:
        exists = isinstance(path, URL) or path.exists()
        raise UserError(describe_unknown(str(data), exists, tuple(DATASETS)))
    return layouts.open_tree(tree, columns=names, labels=labels, **settings)


def locate(data: str | Path) -> Location:
    """The path or URL of a data set."""
    return parse_url(data) if is_url(data) else files.expand_user(data)


def is_file(path: Location) -> bool:
    """Whether this is a file; of a URL, whether its name looks like one."""
    if isinstance(path, URL):
        return path.suffix.lower() in (*TABLE_SUFFIXES, ZIP_SUFFIX)
    return path.is_file()


def make_tree(path: Location) -> Tree | None:
    """The files of a folder, zip or URL; None for anything else."""
    if isinstance(path, URL):
        if is_file(path):
            raise UserError(f"{path} is a zip; unpack it there, or download it and give its path")
        return StoreTree(path)
    if path.is_dir():
        return FolderTree(path)
    return ZipTree(path) if path.is_file() and path.suffix.lower() == ZIP_SUFFIX else None


def is_hub_dataset(data: str | Path) -> bool:
    return isinstance(data, str) and data.startswith(PREFIX) and not is_url(data)


def has_columns(data: str | Path, columns: Columns) -> bool:
    """Whether the labels of a data set come from columns that have these names."""
    path = locate(data)
    if is_hub_dataset(data) or path.suffix.lower() in TABLE_SUFFIXES:
        return True
    tree = make_tree(path) if data not in DATASETS else None
    return tree is not None and layouts.has_tables(tree, columns)


def drop_labels(source: Any) -> Source:
    """The same images in the same splits, without labels."""
    labels = np.zeros(len(source), np.int64)
    unlabelled: Source = replace(source, labels=labels, classes=(UNLABELLED,))
    return unlabelled


def make_columns(columns: Mapping[str, str] | Columns | None) -> Columns:
    """Returns the names of all columns; those that are not given have their default names."""
    if isinstance(columns, Columns):
        return columns
    known = [field.name for field in fields(Columns)]
    for key in columns or {}:
        if key not in known:
            raise UserError(f"`columns` has the key {key!r}; the keys are {', '.join(known)}")
    return Columns(**(columns or {}))


def resolve_data(data: str | Path) -> str:
    """Returns the name of a built-in set or of the hub, else the absolute path or the URL."""
    known = data in DATASETS or is_hub_dataset(data)
    return str(data) if known else str(locate(data).resolve())


def describe_unknown(data: str, exists: bool, sets: Sequence[str]) -> str:
    wanted = (
        "wanted a folder of class folders or a .zip of it, a .csv, .tsv or .jsonl table, a folder "
        "of .tar shards"
    )
    if exists:
        return f"{data} is not a data set; {wanted}"
    near = get_close_matches(data.casefold(), sets, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{data!r} does not exist; {wanted}, hf:owner/name, or one of {', '.join(sets)}{hint}"
