"""Suggests published weights to start from, and finds them on this machine or on the hub."""

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from vitrail import files
from vitrail.errors import UserError
from vitrail.zoo.files.find import STANDARD_FILES, WEIGHT_SUFFIXES
from vitrail.zoo.hub import fetch_from_hub, find_cached, inspect_hub_file
from vitrail.zoo.weights import PublishedWeights, find_published

VARIABLE = "VITRAIL_WEIGHTS"  # a weight file, a folder of one, a folder of such, or hf:owner/name

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    device: str  # cpu or gpu
    minutes: float  # shortest training for which it is suggested
    name: str  # in the table of published weights
    reason: str


# The first row that fits wins. Only permissive licences: what is trained from weights for
# non-commercial use (MAE, SWAG) may not be used freely either.
SUGGESTIONS = [
    Suggestion(
        device="cpu",
        minutes=0,
        name="Ti/16 augreg-in21k-in1k",
        reason="the smallest: a core trains it on 5 to 8 images per second, S/16 on 2",
    ),
    Suggestion(
        device="gpu",
        minutes=20,
        name="B/16 augreg2-in21k-in1k",
        reason="the most accurate that a GPU fine-tunes in tens of minutes",
    ),
    Suggestion(
        device="gpu",
        minutes=0,
        name="S/16 augreg-in21k-in1k",
        reason="four times cheaper than B/16, for a short time on a GPU",
    ),
]


@dataclass(frozen=True, kw_only=True)
class FoundWeights:
    """Weights on this machine, or on the hub if `size` is not 0."""

    weights: str  # path, or hf:owner/name
    published: PublishedWeights | None  # None: a file that the table does not list
    reason: str  # which weights, where they are, and why these
    size: int = 0  # bytes to download; 0 if they are on this machine


class Unreachable(UserError):
    """The suggested weights are not on this machine, and the hub does not deliver them."""


def suggest(device: str, minutes: float | None) -> Suggestion:
    """The row for this type of device and training time; no time means a long one."""
    kind = "cpu" if device == "cpu" else "gpu"
    return next(
        row
        for row in SUGGESTIONS
        if row.device == kind and (minutes is None or minutes >= row.minutes)
    )


def find_weights(device: str, minutes: float | None, *, download: bool) -> FoundWeights:
    """The weights to start from: of `VITRAIL_WEIGHTS`, in Hugging Face's cache, or on the hub.

    With `download`, those on the hub are downloaded into the cache. Raises `Unreachable` if they
    are neither here nor there.
    """
    row = suggest(device, minutes)
    if (requested := os.environ.get(VARIABLE)) is not None:
        return find_requested(requested, row)
    published = find_row(row.name)
    name, head = f"hf:{published.hub}", f"weights {row.name}: {row.reason}"
    try:
        if find_cached(published.hub) is not None:
            reason = f"{head}; in Hugging Face's cache as {published.hub}"
            return FoundWeights(weights=name, published=published, reason=reason)
        size = inspect_hub_file(published.hub).size
        reason = f"{head}; {size / 1e6:.0f} MB from {name}, licence {published.licence}"
        found = FoundWeights(weights=name, published=published, reason=reason, size=size)
        if not download:
            return found
        log.info(f"downloading {reason}")
        fetch_from_hub(published.hub)
        return replace(found, size=0)
    except UserError as error:
        raise Unreachable(
            f"{error}; to bring the weights, download model.safetensors and config.json of "
            f"huggingface.co/{published.hub} into a folder and set {VARIABLE} to it"
        ) from error


def find_row(name: str) -> PublishedWeights:
    published = find_published(name)
    assert published is not None, name
    return published


def find_requested(value: str, row: Suggestion) -> FoundWeights:
    """The weights of `VITRAIL_WEIGHTS`; of a folder with several, those that the table suggests."""
    where = f"from {VARIABLE}"
    if value.startswith("hf:") or (find_published(value) is not None and not Path(value).exists()):
        return FoundWeights(weights=value, published=None, reason=f"weights {value}: {where}")
    path = files.expand_user(value)
    if not value or not path.exists():
        raise UserError(
            f"{VARIABLE} is {value!r}, which does not exist; set it to a weight file or folder, "
            f"or unset it"
        )
    found = select_weights(path, row)
    return FoundWeights(weights=str(found), published=None, reason=f"weights {found.name}: {where}")


def select_weights(path: Path, row: Suggestion) -> Path:
    """The path itself if it holds weights, else one of the folders and files in it."""
    if path.is_file() or holds_weights(path):
        return path
    found = [entry for entry in sorted(path.iterdir()) if is_weights(entry)]
    wanted = [entry for entry in found if find_published(entry.name) == find_row(row.name)]
    if not wanted and len(found) > 1:
        names = ", ".join(entry.name for entry in found[:4])
        raise UserError(
            f"{VARIABLE} is {path}, which has several weights ({names}) but not {row.name}; "
            f"set it to one of them"
        )
    if not found:
        raise UserError(
            f"{VARIABLE} is {path}, which has no weight file ({', '.join(WEIGHT_SUFFIXES)}); "
            f"set it to a weight file or folder, or unset it"
        )
    return (wanted or found)[0]


def holds_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in STANDARD_FILES)


def is_weights(path: Path) -> bool:
    return path.suffix in WEIGHT_SUFFIXES if path.is_file() else holds_weights(path)
