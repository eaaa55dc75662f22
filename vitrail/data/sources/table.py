"""Tables of images: CSV, TSV or JSON lines with a path, a label and optionally a split.

Paths are relative to the folder of the table and must stay inside it, also through links. If a file
does not exist there, its path is relative to a folder with the name of the table, as in Kaggle's
`train.csv` beside `train/`, and may lack the extension.
"""

import csv
import io
import json
import os
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.config import Columns, LabelKind
from vitrail.data.image import SUFFIXES
from vitrail.data.source import UNLABELLED
from vitrail.data.sources.folder import FileSource
from vitrail.data.sources.multi_label import (
    LabelCells,
    check_single_labels,
    encode_labels,
    looks_binary,
)
from vitrail.data.sources.names import PackedNames, match_labels, normalise_name
from vitrail.data.sources.store import URL, Location
from vitrail.data.sources.store_tree import StoreTree
from vitrail.data.sources.tree import File, FolderTree, MissingFile, Tree
from vitrail.data.split import SPLIT_ALIASES, assign_splits
from vitrail.errors import UserError

SEPARATORS = {".csv": ",", ".tsv": "\t"}
# Where the column of paths has no other name given: Hugging Face's name, then Kaggle's.
PATH_COLUMNS = ("path", "file_name", "filename", "image_id", "image", "id")


class MissingLabel(UserError):
    """A row has no label."""


@dataclass(frozen=True)
class Table:
    """A table in a tree of files."""

    name: str  # its path; paths in its cells are relative to its folder
    split: str = ""  # of all rows; "" if the rows say
    by_folder: bool = False  # the first folder of a path may be a split: `train/cat1.jpg`


def open_table(path: Location, **settings: Any) -> FileSource:
    """All rows of a table on disk, or in a store."""
    tree = StoreTree(path.parent) if isinstance(path, URL) else FolderTree(path.parent)
    tree.name = path.stem
    return open_tables(tree, [Table(path.name)], path=path.absolute(), **settings)


def open_tables(
    tree: Tree,
    tables: Sequence[Table],
    *,
    path: Location | None = None,
    columns: Columns,
    classes: Sequence[str] | None,
    labels: LabelKind | None,
    split: bool,
    progress: bool,
) -> FileSource:
    """All rows of the tables; their labels are the classes, unless classes are given."""
    reader = TableReader(tree, LabelCells(columns.separator) if labels == "multi" else None)
    unlabelled = 0
    for table in tables:
        for row, (file, label, part) in read_rows(tree, table.name, columns, labels):
            if labels == "partial" and is_empty(label):
                unlabelled += 1
                continue
            try:
                reader.add(table, row, file, UNLABELLED if labels == "none" else label, part)
            except UserError as error:
                if isinstance(error, MissingLabel) and not has_any_label(tree, tables, columns):
                    raise UserError(describe_unlabelled(tree, tables)) from error
                kind = MissingLabel if isinstance(error, MissingLabel) else UserError
                raise kind(f"{table.name}, row {row}: {error}") from error
    title = join_names(tables)
    if not reader.paths:
        where = tree.path / title
        if unlabelled:
            raise UserError(f"{describe_unlabelled(tree, tables)}, if `data.labels` is omitted")
        raise UserError(f"{where} has no rows; expected a path and a label in each row")
    if "" in reader.splits and any(reader.splits):
        row = list(reader.paths.values())[reader.splits.index("")]
        raise UserError(f"{title}, row {row}: the split is missing, but other rows have one")
    try:
        names, numbers = reader.encode_labels(title, classes, sure=labels is not None)
    except UserError as error:
        known = str(error).startswith(title)
        raise UserError(str(error) if known else f"{title}, {error}") from error
    ids = PackedNames(reader.paths)
    source = FileSource(
        name=tree.name,
        path=path or tree.path,
        root=tree.path,
        classes=names,
        labels=numbers,
        splits=np.array(reader.splits, "<U5"),
        ids=ids,
        sizes=np.array(reader.sizes, np.int64),
        mtimes=np.array(reader.mtimes, np.int64),
        ignored={},
        members=tree.locate(ids),
        columns=columns,
        requested_labels=labels,
    )
    return assign_splits(source, split=split, progress=progress)


class TableReader:
    """Collects rows and checks each of them."""

    def __init__(self, tree: Tree, cells: LabelCells | None):
        self.tree = tree
        self.cells = cells  # of a multi-label table
        self.class_columns: list[str] = []  # of a table with a column of 0 and 1 for each class
        self.stems: dict[str, dict[str, list[str]]] = {}  # images without extension, by folder
        self.paths: dict[str, int] = {}  # the row of each path
        self.first_rows: dict[str, int] = {}  # the first row of each label
        self.labels: list[str] = []
        self.splits: list[str] = []
        self.sizes: list[int] = []
        self.mtimes: list[int] = []

    def add(self, table: Table, row: int, path: object, label: object, split: object) -> None:
        name = self.add_path(table, path)
        if name in self.paths:
            raise UserError(f"{name} is already in row {self.paths[name]}; remove one of the rows")
        self.paths[name] = row
        if self.cells is not None:
            self.cells.add(f"row {row}", label)
            if isinstance(label, dict):
                self.class_columns = list(label)
        else:
            self.labels.append(parse_label(label))
            self.first_rows.setdefault(self.labels[-1], row)
        given = parse_split(split) or table.split
        if not given and table.by_folder:
            given = SPLIT_ALIASES.get(name.partition("/")[0].casefold(), "")
        self.splits.append(given)

    def encode_labels(
        self, table: str, classes: Sequence[str] | None, sure: bool
    ) -> tuple[tuple[str, ...], NDArray[Any]]:
        """Class names, and the class of each row; for multi-label tables a row of 0 and 1.

        `sure`: the caller has said that each image has a single label.
        """
        if self.cells is None:
            if not sure:
                check_single_labels({name: f"row {row}" for name, row in self.first_rows.items()})
            where = {label: f"{table}, row {row}" for label, row in self.first_rows.items()}
            names, index = match_labels(where, classes)
            return names, np.array([index[label] for label in self.labels], np.int64)
        rows = self.cells.split()
        where = {normalise_name(name): f"{table}, column {name!r}" for name in self.class_columns}
        for labels, place in zip(rows, self.cells.places, strict=True):
            for label in labels:
                where.setdefault(label, f"{table}, {place}")
        names, index = match_labels(where, classes)
        return names, encode_labels(rows, index, len(names))

    def add_path(self, table: Table, path: object) -> str:
        """Checks that the path is a regular file below the root; returns its relative path."""
        if not isinstance(path, str) or not path:
            raise UserError("the path is missing")
        if not is_valid_path(path):
            raise UserError(f"{path!r} is not a valid path")
        file = self.find_file(table, path)
        self.sizes.append(file.size)
        self.mtimes.append(file.mtime)
        return file.name

    def find_file(self, table: Table, path: str) -> File:
        """The file that a cell names, beside the table or in the folder of the table's name."""
        beside = posixpath.dirname(table.name)
        folders = (beside, posixpath.splitext(table.name)[0])
        missing: list[MissingFile] = []
        for folder in folders:
            try:
                return self.tree.find(posixpath.join(folder, path))
            except MissingFile as error:
                missing.append(error)
        for folder in folders:
            found = self.find_stem(posixpath.join(folder, path))
            if len(found) > 1:
                raise UserError(f"{path} is {' and '.join(found)}; write the extension")
            if found:
                return self.tree.find(found[0])
        raise missing[0]

    def find_stem(self, path: str) -> list[str]:
        """The images whose path without extension this is."""
        folder, stem = posixpath.split(path)
        if folder not in self.stems:
            try:
                names = self.tree.list_names(folder)
            except MissingFile:
                names = []
            stems = self.stems[folder] = {}
            for name in names:
                if posixpath.splitext(name)[1].lower() in SUFFIXES:
                    stems.setdefault(posixpath.splitext(name)[0], []).append(name)
        return [posixpath.join(folder, name) for name in self.stems[folder].get(stem, [])]


def is_valid_path(path: str) -> bool:
    """Whether a file can have this path: JSON can spell strings that file systems cannot store."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # an unpaired surrogate
        return False


def parse_label(label: object) -> str:
    if isinstance(label, int) and not isinstance(label, bool):
        return str(label)
    if is_empty(label):
        raise MissingLabel(
            "the label is missing; if images without labels should help, set "
            "`data.labels='partial'`"
        )
    if isinstance(label, list):
        raise UserError(
            f"label {label!r:.60} is a list; for several labels set `data.labels='multi'`"
        )
    if not isinstance(label, str):
        raise UserError(f"label {label!r} is neither a string nor an integer")
    return normalise_name(label)


def has_any_label(tree: Tree, tables: Sequence[Table], columns: Columns) -> bool:
    """Whether a row of the tables has a label."""
    return any(
        not is_empty(label)
        for table in tables
        for _, (_, label, _) in read_rows(tree, table.name, columns, "partial")
    )


def join_names(tables: Sequence[Table]) -> str:
    return " or ".join(table.name for table in tables)


def describe_unlabelled(tree: Tree, tables: Sequence[Table]) -> str:
    where = tree.path / join_names(tables)
    return f"no row of {where} has a label; `vitrail pretrain` learns without them"


def is_empty(label: object) -> bool:
    return label is None or (isinstance(label, str) and not normalise_name(label))


def parse_split(split: object) -> str:
    if split is None or split == "":
        return ""
    if not isinstance(split, str) or split.strip().casefold() not in SPLIT_ALIASES:
        raise UserError(f"split {split!r} is unknown; expected train, val or test")
    return SPLIT_ALIASES[split.strip().casefold()]


Cells = tuple[object, object, object]  # path, label, split


def read_rows(
    tree: Tree, name: str, columns: Columns, labels: LabelKind | None
) -> Iterator[tuple[int, Cells]]:
    """The cells of each row, and its number as a spreadsheet or an editor shows it."""
    path = tree.path / name
    try:
        with io.TextIOWrapper(tree.open_file(name), encoding="utf-8-sig", newline="") as file:
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


def read_header(tree: Tree, name: str) -> list[str]:
    """The names of a table's columns; of JSON lines, those of the first one."""
    path = tree.path / name
    try:
        with io.TextIOWrapper(tree.open_file(name), encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() == ".jsonl":
                return list(next(iterate_objects(file, path), (0, {}))[1])
            return next(csv.reader(file, delimiter=SEPARATORS[path.suffix.lower()]), [])
    except (OSError, csv.Error, UnicodeDecodeError):
        return []  # `read_rows` says what is wrong


def choose_path_column(columns: Columns, header: Sequence[str]) -> Columns:
    """The columns with a usual name for the paths, if the table has no column `path`."""
    if columns.path != PATH_COLUMNS[0]:
        return columns
    usual = {name.casefold(): name for name in header if name not in (columns.label, columns.split)}
    found = next((usual[name] for name in PATH_COLUMNS if name in usual), columns.path)
    return replace(columns, path=columns.path if columns.path in header else found)


def read_csv_rows(
    reader: Iterator[list[str]], path: Location, columns: Columns, labels: LabelKind | None
) -> Iterator[tuple[int, Cells]]:
    header = [name.strip() for name in next(reader, [])]
    columns = choose_path_column(columns, header)
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
    lines: Iterator[str], path: Location, columns: Columns, labels: LabelKind | None
) -> Iterator[tuple[int, Cells]]:
    by_class: bool | None = None  # whether each class has a column; the first row decides
    for row, entry in iterate_objects(lines, path):
        if by_class is None:
            columns = choose_path_column(columns, list(entry))
        keys = (columns.path, columns.split or "split")
        others = {name: value for name, value in entry.items() if name not in keys}
        if by_class is None:
            first = {**entry, columns.label: None} if labels == "partial" else entry
            by_class = columns.label not in first
            check_columns(list(first), path, columns, labels, looks_binary(others.values()))
        if columns.split and columns.split not in entry:
            raise UserError(f"{path.name}, row {row}: {columns.split!r} is missing")
        cells = (
            entry.get(columns.path),
            others if by_class else entry.get(columns.label),
            entry.get(columns.split or "split"),
        )
        yield row, cells


def iterate_objects(lines: Iterator[str], path: Location) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of each line that is not empty, and its JSON object."""
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
        yield row, entry


def check_columns(
    header: list[str], path: Location, columns: Columns, labels: LabelKind | None, binary: bool
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
