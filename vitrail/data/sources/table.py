"""A table of images: CSV, TSV or JSON lines with a path, a label and optionally a split.

Paths are relative to the folder of the table and must stay inside it, also through links.
"""

import csv
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.config import Columns, LabelKind
from vitrail.data.source import UNLABELLED
from vitrail.data.sources.folder import FileSource, is_inside
from vitrail.data.sources.multi_label import (
    LabelCells,
    check_single_labels,
    encode_labels,
    looks_binary,
)
from vitrail.data.sources.names import PackedNames, match_labels, normalise_name
from vitrail.data.sources.places import modification_time
from vitrail.data.split import SPLIT_ALIASES, assign_splits
from vitrail.errors import UserError

SEPARATORS = {".csv": ",", ".tsv": "\t"}


def open_table(
    path: Path,
    *,
    columns: Columns,
    classes: Sequence[str] | None,
    labels: LabelKind | None,
    split: bool,
    progress: bool,
) -> FileSource:
    """All rows of a table; their labels are the classes, unless classes are given."""
    path = path.absolute()
    multi, unlabelled = labels == "multi", labels == "none"
    reader = TableReader(path.parent, LabelCells(columns.separator) if multi else None)
    for row, (file, label, part) in read_rows(path, columns, labels):
        if labels == "partial" and label in (None, ""):
            continue
        try:
            reader.add(row, file, UNLABELLED if unlabelled else label, part)
        except UserError as error:
            raise UserError(f"{path.name}, row {row}: {error}") from error
    if not reader.paths:
        raise UserError(f"{path} has no rows; expected a path and a label in each row")
    if "" in reader.splits and any(reader.splits):
        row = list(reader.paths.values())[reader.splits.index("")]
        raise UserError(f"{path.name}, row {row}: the split is missing, but other rows have one")
    try:
        names, numbers = reader.encode_labels(path.name, classes, sure=labels is not None)
    except UserError as error:
        known = str(error).startswith(path.name)
        raise UserError(str(error) if known else f"{path.name}, {error}") from error
    source = FileSource(
        name=path.stem,
        path=path,
        root=path.parent,
        classes=names,
        labels=numbers,
        splits=np.array(reader.splits, "<U5"),
        ids=PackedNames(reader.paths),
        sizes=np.array(reader.sizes, np.int64),
        mtimes=np.array(reader.mtimes, np.int64),
        ignored={},
    )
    return assign_splits(source, split=split, progress=progress)


class TableReader:
    """Collects rows and checks each of them."""

    def __init__(self, root: Path, cells: LabelCells | None):
        self.root = os.path.realpath(root)  # resolved, for comparisons
        self.cells = cells  # of a multi-label table
        self.class_columns: list[str] = []  # of a table with a column of 0 and 1 for each class
        self.real_folders: dict[str, str] = {}  # the real path of each folder
        self.paths: dict[str, int] = {}  # the row of each path
        self.first_rows: dict[str, int] = {}  # the first row of each label
        self.labels: list[str] = []
        self.splits: list[str] = []
        self.sizes: list[int] = []
        self.mtimes: list[int] = []

    def add(self, row: int, path: object, label: object, split: object) -> None:
        name = self.add_path(path)
        if name in self.paths:
            raise UserError(f"{name} is already in row {self.paths[name]}; remove one of the rows")
        self.paths[name] = row
        if self.cells is not None:
            self.cells.add(row, label)
            if isinstance(label, dict):
                self.class_columns = list(label)
        else:
            self.labels.append(parse_label(label))
            self.first_rows.setdefault(self.labels[-1], row)
        self.splits.append(parse_split(split))

    def encode_labels(
        self, table: str, classes: Sequence[str] | None, sure: bool
    ) -> tuple[tuple[str, ...], NDArray[Any]]:
        """Class names, and the class of each row; for multi-label tables a row of 0 and 1.

        `sure`: the caller has said that each image has a single label.
        """
        if self.cells is None:
            if not sure:
                check_single_labels(self.first_rows)
            where = {label: f"{table}, row {row}" for label, row in self.first_rows.items()}
            names, index = match_labels(where, classes)
            return names, np.array([index[label] for label in self.labels], np.int64)
        rows = self.cells.split()
        where = {normalise_name(name): f"{table}, column {name!r}" for name in self.class_columns}
        for labels, row in zip(rows, self.cells.rows, strict=True):
            for label in labels:
                where.setdefault(label, f"{table}, row {row}")
        return encode_labels(rows, where, classes)

    def add_path(self, path: object) -> str:
        """Checks that the path is a regular file below the root; returns its relative path."""
        if not isinstance(path, str) or not path:
            raise UserError("the path is missing")
        if not is_valid_path(path):
            raise UserError(f"{path!r} is not a valid path")
        full = os.path.normpath(os.path.join(self.root, path))
        if not is_inside(full, self.root):
            raise UserError(
                f"{path} is outside the folder of the table; move the table to a parent folder"
            )
        folder = os.path.dirname(full)
        if folder not in self.real_folders:
            self.real_folders[folder] = os.path.realpath(folder)
        try:
            status = os.lstat(full)
            if stat.S_ISLNK(status.st_mode):
                status, real = os.stat(full), os.path.realpath(full)
            else:
                real = os.path.join(self.real_folders[folder], os.path.basename(full))
        except OSError as error:
            raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from error
        if not is_inside(real, self.root):
            raise UserError(f"{path} is a link to a file outside the folder of the table")
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a regular file")
        self.sizes.append(status.st_size)
        self.mtimes.append(modification_time(status))
        return full[len(self.root.rstrip(os.sep)) + 1 :].replace(os.sep, "/")


def is_valid_path(path: str) -> bool:
    """Whether a file can have this path: JSON can spell strings that file systems cannot store."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # an unpaired surrogate
        return False


def parse_label(label: object) -> str:
    if isinstance(label, int) and not isinstance(label, bool):
        return str(label)
    if label is None or label == "":
        raise UserError(
            "the label is missing; if images without labels should help, set "
            "`data.labels='partial'`"
        )
    if isinstance(label, list):
        raise UserError(
            f"label {label!r:.60} is a list; for several labels set `data.labels='multi'`"
        )
    if not isinstance(label, str):
        raise UserError(f"label {label!r} is neither a string nor an integer")
    if not normalise_name(label):
        raise UserError("the label is missing")
    return normalise_name(label)


def parse_split(split: object) -> str:
    if split is None or split == "":
        return ""
    if not isinstance(split, str) or split.strip().casefold() not in SPLIT_ALIASES:
        raise UserError(f"split {split!r} is unknown; expected train, val or test")
    return SPLIT_ALIASES[split.strip().casefold()]


Cells = tuple[object, object, object]  # path, label, split


def read_rows(
    path: Path, columns: Columns, labels: LabelKind | None
) -> Iterator[tuple[int, Cells]]:
    """The cells of each row, and its number as a spreadsheet or an editor shows it."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() == ".jsonl":
                yield from read_jsonl_rows(file, path, columns, labels)
            else:
                separator = SEPARATORS[path.suffix.lower()]
                yield from read_csv_rows(
                    csv.reader(file, delimiter=separator, strict=True), path, columns, labels
                )
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason}") from error
    except csv.Error as error:
        raise UserError(f"{path} is not a valid table: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def read_csv_rows(
    reader: Iterator[list[str]], path: Path, columns: Columns, labels: LabelKind | None
) -> Iterator[tuple[int, Cells]]:
    header = [name.strip() for name in next(reader, [])]
    others = [name for name in header if name not in (columns.path, columns.split or "split")]
    by_class = columns.label not in header
    position = {name: number for number, name in enumerate(header)}
    split = position.get(columns.split or "split")
    if columns.path not in header or not by_class:
        check_columns(header, path, columns, labels, binary=False)
    for row, cells in enumerate(reader, 2):
        if not cells:
            continue
        if by_class:
            values = [cells[position[name]] for name in others if position[name] < len(cells)]
            check_columns(header, path, columns, labels, looks_binary(values))
        if len(cells) != len(header):
            raise UserError(
                f"{path.name}, row {row}: {len(cells)} columns, but the header has {len(header)}"
            )
        yield (
            row,
            (
                cells[position[columns.path]],
                {name: cells[position[name]] for name in others}
                if by_class
                else cells[position[columns.label]],
                None if split is None else cells[split],
            ),
        )


def read_jsonl_rows(
    lines: Iterator[str], path: Path, columns: Columns, labels: LabelKind | None
) -> Iterator[tuple[int, Cells]]:
    by_class: bool | None = None  # whether each class has a column; the first row decides
    for row, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path.name}, row {row}: not valid JSON: {error}") from error
        if not isinstance(entry, dict):
            raise UserError(
                f'{path.name}, row {row}: expected an object such as {{"path": ..., "label": ...}}'
            )
        keys = (columns.path, columns.split or "split")
        others = {name: value for name, value in entry.items() if name not in keys}
        if by_class is None:
            by_class = columns.label not in entry
            check_columns(list(entry), path, columns, labels, looks_binary(others.values()))
        if columns.split and columns.split not in entry:
            raise UserError(f"{path.name}, row {row}: {columns.split!r} is missing")
        cells = (
            entry.get(columns.path),
            others if by_class else entry.get(columns.label),
            entry.get(columns.split or "split"),
        )
        yield row, cells


def check_columns(
    header: list[str], path: Path, columns: Columns, labels: LabelKind | None, binary: bool
) -> None:
    """Raises unless each named column occurs exactly once.

    `binary`: the other columns hold 0 or 1, as those of a multi-label table without a label column.
    """
    for kind, name in (("path", columns.path), ("label", columns.label), ("split", columns.split)):
        if kind == "label" and labels == "none":
            continue
        if kind == "label" and name not in header and binary:
            if labels == "multi":
                continue
            raise UserError(
                f"{path} has no column {name!r}, but columns of 0 and 1; if each of them is a "
                f"class, set `data.labels='multi'`"
            )
        if name is not None and header.count(name) != 1:
            problem = "more than one column" if name in header else "no column"
            raise UserError(
                f"{path} has {problem} {name!r} for the {kind}; "
                f"its columns are {', '.join(map(repr, header)) or 'none'}: "
                f"set `data.columns.{kind}` to the right one"
            )
