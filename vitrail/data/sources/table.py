"""A table of images: CSV, TSV or JSON lines with a path, a label and perhaps a split in each row.

Paths count from the folder of the table and must stay inside, also through links.
"""

import csv
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from vitrail.data.config import Columns
from vitrail.data.sources.folder import Files, within
from vitrail.data.sources.names import Names, match, tidy
from vitrail.data.split import SPLITS, settle
from vitrail.errors import UserError

DELIMITERS = {".csv": ",", ".tsv": "\t"}


def open_table(
    path: Path,
    *,
    columns: Columns,
    classes: Sequence[str] | None,
    split: bool,
    progress: bool,
) -> Files:
    """All rows of a table; its labels are the classes, unless classes are given."""
    path = path.absolute()
    reader = Reader(path.parent)
    for row, cells in rows(path, columns):
        try:
            reader.add(row, *cells)
        except UserError as error:
            raise UserError(f"{path.name}, row {row}: {error}") from error
    if not reader.paths:
        raise UserError(f"{path} has no rows; wanted a path and a label in each")
    if "" in reader.splits and any(reader.splits):
        row = list(reader.paths.values())[reader.splits.index("")]
        raise UserError(f"{path.name}, row {row}: no split, though other rows have one")
    found = {label: f"{path.name}, row {row}" for label, row in reader.found.items()}
    names, index = match(found, classes)
    source = Files(
        name=path.stem,
        path=path,
        root=path.parent,
        classes=names,
        labels=np.array([index[label] for label in reader.labels], np.int64),
        splits=np.array(reader.splits, "<U5"),
        ids=Names(reader.paths),
        sizes=np.array(reader.sizes, np.int64),
        dates=np.array(reader.dates, np.int64),
        ignored={},
    )
    return settle(source, split=split, progress=progress)


class Reader:
    """Takes rows one by one, and checks each."""

    def __init__(self, root: Path):
        self.root = os.path.realpath(root)  # without dots, so that paths compare
        self.real: dict[str, str] = {}  # of each folder met
        self.paths: dict[str, int] = {}  # the row of each path
        self.found: dict[str, int] = {}  # the first row of each label
        self.labels: list[str] = []
        self.splits: list[str] = []
        self.sizes: list[int] = []
        self.dates: list[int] = []

    def add(self, row: int, path: object, label: object, split: object) -> None:
        name = self.add_path(path)
        if name in self.paths:
            raise UserError(f"{name} stands in row {self.paths[name]} already")
        self.paths[name] = row
        self.labels.append(text_of(label))
        self.found.setdefault(self.labels[-1], row)
        self.splits.append(split_of(split))

    def add_path(self, path: object) -> str:
        """The path from the root, of a regular file inside it."""
        if not isinstance(path, str) or not path:
            raise UserError("no path")
        if not possible(path):
            raise UserError(f"{path!r} is no path")
        full = os.path.normpath(os.path.join(self.root, path))
        if not within(full, self.root):
            raise UserError(f"{path} leaves the folder of the table; move the table further up")
        folder = os.path.dirname(full)
        if folder not in self.real:
            self.real[folder] = os.path.realpath(folder)
        try:
            status = os.lstat(full)
            if stat.S_ISLNK(status.st_mode):
                status, real = os.stat(full), os.path.realpath(full)
            else:
                real = os.path.join(self.real[folder], os.path.basename(full))
        except OSError as error:
            raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from error
        if not within(real, self.root):
            raise UserError(f"{path} is a link that leaves the folder of the table")
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is no regular file")
        self.sizes.append(status.st_size)
        self.dates.append(status.st_mtime_ns)
        return full[len(self.root.rstrip("/")) + 1 :]


def possible(path: str) -> bool:
    """Whether a file can have this path: JSON can spell more than a disk can hold."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half a character
        return False


def text_of(label: object) -> str:
    if isinstance(label, int) and not isinstance(label, bool):
        return str(label)
    if label is None or label == "":
        raise UserError("no label")
    if not isinstance(label, str):
        raise UserError(f"label {label!r} is neither text nor a whole number")
    if not tidy(label):
        raise UserError("no label")
    return tidy(label)


def split_of(split: object) -> str:
    if split is None or split == "":
        return ""
    if not isinstance(split, str) or split.strip().casefold() not in SPLITS:
        raise UserError(f"split {split!r} is unknown; write train, val or test")
    return SPLITS[split.strip().casefold()]


Cells = tuple[object, object, object]  # path, label, split


def rows(path: Path, columns: Columns) -> Iterator[tuple[int, Cells]]:
    """The number of each row, as a spreadsheet or an editor counts it, and what it holds."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() == ".jsonl":
                yield from json_rows(file, path, columns)
            else:
                delimiter = DELIMITERS[path.suffix.lower()]
                yield from csv_rows(
                    csv.reader(file, delimiter=delimiter, strict=True), path, columns
                )
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason}") from error
    except csv.Error as error:
        raise UserError(f"{path} is no table: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def csv_rows(
    reader: Iterator[list[str]], path: Path, columns: Columns
) -> Iterator[tuple[int, Cells]]:
    header = [name.strip() for name in next(reader, [])]
    check_columns(header, path, columns)
    place = {name: number for number, name in enumerate(header)}
    split = place.get(columns.split or "split")
    for row, cells in enumerate(reader, 2):
        if not cells:
            continue
        if len(cells) != len(header):
            raise UserError(
                f"{path.name}, row {row}: {len(cells)} columns, but the first row has {len(header)}"
            )
        yield (
            row,
            (
                cells[place[columns.path]],
                cells[place[columns.label]],
                None if split is None else cells[split],
            ),
        )


def json_rows(lines: Iterator[str], path: Path, columns: Columns) -> Iterator[tuple[int, Cells]]:
    for row, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path.name}, row {row}: no JSON: {error}") from error
        if not isinstance(entry, dict):
            raise UserError(
                f'{path.name}, row {row}: no object such as {{"path": ..., "label": ...}}'
            )
        if row == 1:
            check_columns(list(entry), path, columns)
        if columns.split and columns.split not in entry:
            raise UserError(f"{path.name}, row {row}: no {columns.split!r}")
        cells = (
            entry.get(columns.path),
            entry.get(columns.label),
            entry.get(columns.split or "split"),
        )
        yield row, cells


def check_columns(found: list[str], path: Path, columns: Columns) -> None:
    for kind, name in (("path", columns.path), ("label", columns.label), ("split", columns.split)):
        if name is not None and found.count(name) != 1:
            many = "more than one column" if name in found else "no column"
            raise UserError(
                f"{path} has {many} {name!r} for the {kind}; "
                f"it has {', '.join(map(repr, found)) or 'none'}: "
                f"name the right one with --data.columns.{kind}"
            )
