"""Folders of caches and built-in data sets, and a check that protects the user's images."""

import os
import tempfile
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
    root = os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache"
    return Path(root).absolute() / "vitrail"


def home_folder() -> Path:
    """The user's home folder; a folder for temporary files if the user has none."""
    try:
        return Path.home()
    except RuntimeError:  # neither HOME nor an entry in passwd, as in some containers
        return Path(tempfile.gettempdir()) / f"vitrail-{os.getuid()}"


def modification_time(status: os.stat_result) -> int:
    """In nanoseconds since 1970, within the 64 bits that arrays have: until the year 2262."""
    return max(-(2**63), min(status.st_mtime_ns, 2**63 - 1))


def data_folder() -> Path:
    """`VITRAIL_DATA`, else `data` in the cache folder: a folder for each built-in data set."""
    if path := os.environ.get("VITRAIL_DATA"):
        return files.expand_user(path).absolute()
    return cache_folder() / "data"


def check_output_path(source: "Source", path: Path, argument: str) -> None:
    """Raises if `path`, the value of `argument`, is inside the data folder or one of its files."""
    if not isinstance(source.path, Path):  # in memory, or in a store
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
