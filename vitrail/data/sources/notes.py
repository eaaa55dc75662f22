"""What an earlier opening found out, kept in the cache folder; losing it costs only time."""

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

log = logging.getLogger(__name__)


def keep(kind: str, path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Remembers arrays about the file or folder at `path`."""
    stream = io.BytesIO()
    np.savez(stream, **arrays)  # type: ignore[arg-type]
    try:
        files.write(place(kind, path), stream.getvalue())
    except UserError as error:
        log.warning("%s will be read again next time: %s", path, error)


def recall(kind: str, path: Path) -> dict[str, np.ndarray]:
    """What was kept about `path`; nothing if there is nothing, or if it is damaged."""
    try:
        content = place(kind, path).read_bytes()
        with np.load(io.BytesIO(content), allow_pickle=False) as saved:
            return dict(saved)
    except (OSError, ValueError, KeyError, EOFError, zlib.error, zipfile.BadZipFile):
        return {}


def place(kind: str, path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    return cache_folder() / kind / f"{name}.npz"
