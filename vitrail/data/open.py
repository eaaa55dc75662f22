"""Opens a data set by its path or name: a folder, a table, tar shards, or a built-in set."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vitrail import files
from vitrail.data.config import Columns
from vitrail.data.source import Source
from vitrail.data.sources import builtin, folder, shards, table
from vitrail.data.sources.catalogue import SETS
from vitrail.errors import UserError

TABLES = (".csv", ".tsv", ".jsonl")
USUAL = Columns()


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
