"""The files that hold the weights of a model, and their checksum. Free of torch."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from vitrail.errors import UserError
from vitrail.exporting.engine import ENGINE_SUFFIXES
from vitrail.files import check_regular, expand_user

CHUNK = 2**20  # bytes that are hashed at once


def is_exported(path: str | Path) -> bool:
    """Whether this is a file that `vitrail export` wrote for an engine."""
    return Path(path).suffix.lower() in ENGINE_SUFFIXES


def collect_weight_files(path: str | Path) -> list[Path]:
    """The files that hold the weights."""
    if is_exported(path):
        main = expand_user(path)
        beside = main.with_suffix(".bin")  # the weights of OpenVINO
        return [main, *([beside] if main.suffix == ".xml" and beside.is_file() else [])]
    from vitrail.zoo.files.open import INDEX_SUFFIX, read_shard_index
    from vitrail.zoo.locate import locate_checkpoint

    main = locate_checkpoint(path).weights
    if not main.name.endswith(INDEX_SUFFIX):
        return [main]
    return [main, *(main.parent / name for name in sorted(set(read_shard_index(main).values())))]


def hash_files(paths: Sequence[Path]) -> str:
    """The SHA-256 of one file, or of several one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        check_regular(path)
        try:
            with path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()
