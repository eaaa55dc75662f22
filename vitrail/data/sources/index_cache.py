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
from vitrail.data.sources.store import Location, is_url
from vitrail.errors import UserError

# What reading a damaged .npz raises: NotImplementedError for an unknown zip version or compression,
# RuntimeError for an encrypted entry.
DAMAGED_ARCHIVE = (
    *(OSError, ValueError, KeyError, EOFError, NotImplementedError, RuntimeError),
    *(zlib.error, zipfile.BadZipFile, OverflowError, MemoryError),
)

log = logging.getLogger(__name__)


def save_arrays(kind: str, path: Location, arrays: dict[str, np.ndarray]) -> None:
    """Caches arrays about the file or folder at `path`; only warns if that fails."""
    try:
        files.write_file(cache_path(kind, path), pack_arrays(arrays))
    except UserError as error:
        log.warning("cannot cache the index of %s: %s", path, error)


def load_arrays(kind: str, path: Location) -> dict[str, np.ndarray]:
    """The arrays cached about `path`; an empty dictionary if there are none or they are damaged."""
    try:
        return unpack_arrays(cache_path(kind, path).read_bytes())
    except DAMAGED_ARCHIVE:
        return {}


def pack_arrays(arrays: dict[str, np.ndarray]) -> bytes:
    """The content of an .npz file, always the same for the same arrays."""
    stream = io.BytesIO()
    np.savez(stream, **arrays)  # type: ignore[arg-type]
    return stream.getvalue()


def unpack_arrays(content: bytes) -> dict[str, np.ndarray]:
    """The arrays in an .npz file; raises one of `DAMAGED_ARCHIVE` if it is not one."""
    with np.load(io.BytesIO(content), allow_pickle=False) as saved:
        return dict(saved)


def cache_path(kind: str, path: Location) -> Path:
    real = str(path) if is_url(path) else os.path.realpath(path)
    name = hashlib.sha256(os.fsencode(real)).hexdigest()[:32]
    return cache_folder() / kind / f"{name}.npz"
