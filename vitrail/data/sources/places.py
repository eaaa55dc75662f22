"""Where caches and built-in data sets live on this machine."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail import files
from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.data.source import Source


def cache_folder() -> Path:
    """`VITRAIL_CACHE`, else `vitrail` in the user's cache folder. It may be deleted at any time."""
    if chosen := os.environ.get("VITRAIL_CACHE"):
        return files.expanded(chosen).absolute()
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user).absolute() / "vitrail"


def data_folder() -> Path:
    """`VITRAIL_DATA`, else `data` in the cache folder: each built-in set has a folder in it."""
    if chosen := os.environ.get("VITRAIL_DATA"):
        return files.expanded(chosen).absolute()
    return cache_folder() / "data"


def keep_out(source: "Source", target: Path, flag: str) -> None:
    """Refuses to write among the user's images, or over one of them; `flag` chose the target."""
    if source.path is None:
        return
    full, root = files.expanded(target).resolve(), source.path.resolve()
    if root.is_dir() and full.is_relative_to(root):
        raise UserError(
            f"{target} lies in the data, which is never written to; give {flag} elsewhere"
        )
    if not root.is_dir() and full.is_relative_to(root.parent):
        inside = str(full.relative_to(root.parent))
        if full == root or inside in source.ids:
            raise UserError(
                f"{target} is part of the data, which is never changed; give {flag} elsewhere"
            )
