"""Where caches and built-in data sets live on this machine."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`VITRAIL_CACHE`, else `vitrail` in the user's cache folder. It may be deleted at any time."""
    if chosen := os.environ.get("VITRAIL_CACHE"):
        return Path(chosen).expanduser().absolute()
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user).absolute() / "vitrail"


def data_folder() -> Path:
    """`VITRAIL_DATA`, else `data` in the cache folder: each built-in set has a folder in it."""
    if chosen := os.environ.get("VITRAIL_DATA"):
        return Path(chosen).expanduser().absolute()
    return cache_folder() / "data"
