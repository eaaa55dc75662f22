"""Folders of caches and built-in data sets, and a check that protects the user's images."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail import files
from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.data.source import Source


def cache_folder() -> Path:
    """`VITRAIL_CACHE`, else `vitrail` in the user's cache folder; may be deleted at any time."""
    if path := os.environ.get("VITRAIL_CACHE"):
        return files.expand_user(path).absolute()
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root).absolute() / "vitrail"


def data_folder() -> Path:
    """`VITRAIL_DATA`, else `data` in the cache folder: a folder for each built-in data set."""
    if path := os.environ.get("VITRAIL_DATA"):
        return files.expand_user(path).absolute()
    return cache_folder() / "data"


def check_output_path(source: "Source", path: Path, argument: str) -> None:
    """Raises if `path`, the value of `argument`, is inside the data folder or one of its files."""
    if source.path is None:
        return
    output, root = files.expand_user(path).resolve(), source.path.resolve()
    if root.is_dir():
        inside = output.is_relative_to(root)
    else:  # a table: other files in its folder are fine, but not the table or its images
        below = output.is_relative_to(root.parent)
        inside = below and (
            output == root or output.relative_to(root.parent).as_posix() in source.ids
        )
    if inside:
        raise UserError(
            f"{path} is part of the data, which Vitrail never changes; choose another `{argument}`"
        )
