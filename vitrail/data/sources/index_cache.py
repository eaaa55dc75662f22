"""A cache of indices and content hashes, so that a data set opens faster the next time."""

import hashlib
import io
import logging
import os
import zipfile
import zlib
from pathlib import Path

import numpy as np

from vitrail import files
from vitrail.data.sources.places import cache_folder
from vitrail.errors import UserError

# What reading a damaged .npz raises: NotImplementedError for an unknown zip version or compression,
# RuntimeError for an encrypted entry.
DAMAGED_ARCHIVE = (
    *(OSError, ValueError, KeyError, EOFError, NotImplementedError, RuntimeError),
    *(zlib.error, zipfile.BadZipFile, OverflowError, MemoryError),
)

log = logging.getLogger(__name__)


def save_arrays(kind: str, path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Caches arrays about the file or folder at `path`; only warns if that fails."""
    stream = io.BytesIO()
    np.savez(stream, **arrays)  # type: ignore[arg-type]
    try:
        files.write_file(cache_path(kind, path), stream.getvalue())
    except UserError as error:
        log.warning("cannot cache the index of %s: %s", path, error)


def load_arrays(kind: str, path: Path) -> dict[str, np.ndarray]:
    """The arrays cached about `path`; an empty dictionary if there are none or they are damaged."""
    try:
        content = cache_path(kind, path).read_bytes()
        with np.load(io.BytesIO(content), allow_pickle=False) as saved:
            return dict(saved)
    except DAMAGED_ARCHIVE:
        return {}


def cache_path(kind: str, path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    return cache_folder() / kind / f"{name}.npz"
