"""The files that hold the weights of a model, and their checksum. Free of torch."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from vitrail.errors import UserError
from vitrail.exporting.engine import ENGINE_SUFFIXES
from vitrail.files import check_regular, expand_user
from vitrail.zoo.files.find import collect_weight_files

CHUNK = 2**20  # bytes that are hashed at once


def is_exported(path: str | Path) -> bool:
    """Whether this is a file that `vitrail export` wrote for an engine."""
    return Path(path).suffix.lower() in ENGINE_SUFFIXES


def collect_model_files(path: str | Path) -> list[Path]:
    """The files that hold the weights; torch is not imported for files on this machine."""
    place = expand_user(path)
    if is_exported(place):
        beside = place.with_suffix(".bin")  # the weights of OpenVINO
        return [place, *([beside] if place.suffix == ".xml" and beside.is_file() else [])]
    if not place.exists():  # a name on the hub or in the table of published weights
        from vitrail.zoo.locate import locate_checkpoint

        place = locate_checkpoint(path).weights
    return collect_weight_files(place)


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
