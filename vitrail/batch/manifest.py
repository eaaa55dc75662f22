"""What a job computes, stored beside its parts: a restart continues only the same job."""

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from vitrail import __version__
from vitrail.batch.folder import PartFolder
from vitrail.data.config import Preprocess
from vitrail.decoding import decode_table, parse_json
from vitrail.display.text import format_count
from vitrail.errors import UserError

Kind = Literal["predictions", "features"]

NAME = "_manifest.json"  # readers of Parquet folders ignore names that begin with _
PART = re.compile(r"part-(\d{5,})\.parquet")
MIN_PART, MAX_PART = 256, 4096  # images per part, unless it is given
FEW_PARTS = 16  # that even a small data set is divided into, for as many workers


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that the content of the parts depends on."""

    kind: Kind
    model: str  # absolute path, or name
    sha256: str  # of its weights
    options: dict[str, Any]  # how the model is loaded, and what is written about each image
    preprocess: dict[str, Any]  # how images become the input of the model
    data: str  # absolute path, URL or name; empty for a data set of Python objects
    fingerprint: str  # of the data: ids and sizes
    images: int
    part: int  # rows of every part except the last
    width: int | None = None  # of the features
    dtype: str | None = None  # of the features
    classes: tuple[str, ...] = ()  # of the predictions
    vitrail: str = __version__
    errors: int | None = None  # images without a result; None until it is complete

    @property
    def parts(self) -> int:
        return -(-self.images // self.part)

    def rows(self, number: int) -> range:
        """The items of a part."""
        return range(number * self.part, min(self.images, (number + 1) * self.part))

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n").encode()


def part_name(number: int) -> str:
    return f"part-{number:05d}.parquet"


def choose_part(images: int) -> int:
    """Images per part, from their number alone, so that every engine writes the same files."""
    return min(MAX_PART, max(MIN_PART, -(-images // FEW_PARTS)))


def read_manifest(folder: PartFolder) -> Manifest:
    """The manifest of a folder that `vitrail features` or `vitrail predict` wrote."""
    if not folder.exists(NAME):
        raise UserError(f"{folder} has no {NAME}; give a folder that `vitrail features` wrote")
    try:
        manifest = decode_table(Manifest, parse_json(folder.read(NAME)))
        if manifest.part < 1 or manifest.images < 0:
            raise UserError(f"{manifest.images} images in parts of {manifest.part}")
        Preprocess.from_dict(manifest.preprocess)
    except UserError as error:
        raise UserError(f"{folder}/{NAME} is damaged: {error}") from error
    return manifest


def finished_parts(folder: PartFolder) -> set[int]:
    """The numbers of the parts that are stored."""
    found = (PART.fullmatch(name) for name in folder.list_names())
    return {int(match[1]) for match in found if match}


def check_same_job(folder: PartFolder, stored: Manifest, wanted: Manifest) -> None:
    """Raises if a folder holds the results of another job."""
    reasons = {
        "kind": f"{stored.kind}, not {wanted.kind}",
        "sha256": f"those of another model (sha256 {stored.sha256:.12}, not {wanted.sha256:.12})",
        "fingerprint": f"those of other data ({format_count(stored.images, 'image')} of "
        f"{stored.data or 'memory'}, or files that changed)",
        "preprocess": "those of another preprocessing",
        "part": f"parts of {stored.part} images, not {wanted.part}",
    }
    changed = sorted(
        name
        for name in stored.options.keys() | wanted.options.keys()
        if stored.options.get(name) != wanted.options.get(name)
    )
    reasons["options"] = f"those of other settings: {', '.join(f'`{name}`' for name in changed)}"
    for name, reason in reasons.items():
        if getattr(stored, name) != getattr(wanted, name):
            raise UserError(
                f"{folder} already has results of another job: {reason}; choose another `out`"
            )
