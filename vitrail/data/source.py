"""What every data set looks like from outside, and how one is opened by its path or name."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from vitrail import files
from vitrail.data.config import Columns
from vitrail.errors import UserError

Split = Literal["train", "val", "test"]
TABLES = (".csv", ".tsv", ".jsonl")
USUAL = Columns()
SAMPLE = 64  # images that stand for all


@dataclass(frozen=True, slots=True)
class Item:
    """One labelled image as the data set holds it; `load_image` makes pixels of its content."""

    content: bytes | np.ndarray  # an encoded file, or pixels (height, width, channels)
    label: int
    id: str  # a stable name: "cat/1.jpg", "train-000.tar:0007", "cifar10/train/00017"
    suffix: str = ""  # of the file's name, in small letters: ".jpg"; none where there is no file


class Source(Protocol):
    """A data set: indexable, safe to pickle, and cheap to copy: it holds no open file."""

    @property
    def name(self) -> str:
        """Short, for run names: "flowers", "cifar10"."""

    @property
    def path(self) -> Path | None:
        """The folder or table it was opened from; None if it holds its pixels."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def labels(self) -> NDArray[np.int64]: ...

    @property
    def splits(self) -> NDArray[np.str_]:
        """ "train", "val" or "test" for each item."""

    @property
    def ids(self) -> Sequence[str]:
        """A stable and unique name for each item."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each item."""

    @property
    def dates(self) -> NDArray[np.int64]:
        """When each item's file was changed, in nanoseconds since 1970; 0 if it has none."""

    @property
    def ignored(self) -> Mapping[str, str]:
        """What lies in the folder and is no part of the set, and why."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item:
        """Reads one item; `UserError` says why it cannot be read, without naming it."""


def open_data(
    data: str | Path,
    *,
    columns: Columns = USUAL,
    classes: Sequence[str] | None = None,
    split: bool = True,
    progress: bool = True,
) -> Source:
    """Opens a folder of class folders, a table, a folder of tar shards, or a built-in set by name.

    A built-in name wins over a folder of that name, which is reached as "./mnist".
    `classes` are those of a model, in its order: labels must be among them, or count them from 0.
    With `split` false, for evaluation, images without a given split are all "test", and neither
    the number of images nor of classes matters. `progress` draws a bar on a terminal's stderr.
    """
    from vitrail.data import builtin, folder, shards, table
    from vitrail.data.catalogue import SETS

    settings: dict[str, Any] = {"classes": classes, "split": split, "progress": progress}
    if not str(data):
        raise UserError(unknown("", False, tuple(SETS)))
    path = files.expanded(data)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
        tars = shards.find_shards(path) if is_folder else []
    except OSError as error:
        raise UserError(f"cannot look at {data}: {error.strerror}") from error
    if is_file and path.suffix.lower() in TABLES:
        return table.open_table(path, columns=columns, **settings)
    if columns != USUAL:
        raise UserError(f"{data} is no table, so it has no columns to name; leave them out")
    if isinstance(data, str) and data in SETS:
        return builtin.open_builtin(data, **settings)
    if not is_folder:
        raise UserError(unknown(str(data), path.exists(), tuple(SETS)))
    if tars:
        return shards.open_shards(path, tars, **settings)
    return folder.open_folder(path, **settings)


def address(data: str | Path) -> str:
    """What the data is called from any folder: the name of a built-in set, else a whole path."""
    from vitrail.data.catalogue import SETS

    return str(data) if data in SETS else str(files.expanded(data).resolve())


def unknown(data: str, exists: bool, sets: Sequence[str]) -> str:
    wanted = (
        "wanted a folder of class folders, a .csv, .tsv or .jsonl table, a folder of .tar shards"
    )
    if exists:
        return f"{data} is no data set; {wanted}"
    near = get_close_matches(data.casefold(), sets, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"there is no {data!r}; {wanted}, or one of {', '.join(sets)}{hint}"


def indices(source: Source, split: Split | Literal["all"]) -> NDArray[np.int64]:
    """The positions of one split's items in the source, in order."""
    if split == "all":
        return np.arange(len(source))
    return np.flatnonzero(source.splits == split)


def sample(source: Source) -> NDArray[np.int64]:
    """Some training images, always the same ones, whose sizes and channels stand for all."""
    return np.random.default_rng(0).permutation(indices(source, "train"))[:SAMPLE]


def fingerprint(source: Source, *, dates: bool = False) -> str:
    """A checksum that notices added, removed, renamed, relabelled or resized items.

    With `dates` also edited ones of the same size, but then the same data copied to another
    machine differs too: right for a cache, too strict for a resume.
    """
    checksum = hashlib.sha256()
    for text in (*source.classes, "", *source.ids):
        checksum.update(text.encode("utf-8", "surrogateescape") + b"\0")
    arrays = [source.labels, source.sizes, *([source.dates] if dates else [])]
    for numbers in arrays:
        checksum.update(np.ascontiguousarray(numbers, "<i8").tobytes())
    for name in ("val", "test"):
        checksum.update(np.packbits(source.splits == name).tobytes())
    return checksum.hexdigest()
