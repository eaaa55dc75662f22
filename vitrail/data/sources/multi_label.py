"""Several labels per image: parsed from the cells of a table, or from copies in several folders."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vitrail.data.reading.contents import ContentBuffer
from vitrail.data.sources.folder import FileSource
from vitrail.data.sources.names import PackedNames, normalise_name
from vitrail.data.split import hash_items
from vitrail.errors import UserError

SEPARATORS = (";", "|", ",")  # the first that occurs in a table separates the labels of a cell
SURE_SEPARATORS = (";", "|")  # in a single-label table they are a mistake; a comma may be a name's
TRUE, FALSE = {"1", "1.0", "true"}, {"0", "0.0", "false", ""}

MultiHot = NDArray[np.uint8]  # (images, classes)
ASK_FOR_MULTI = (
    "if it lists several labels, set `data.labels='multi'`; if it is one name, "
    "`data.labels='single'`"
)


def check_single_labels(labels: Mapping[str, str]) -> None:
    """Raises if labels, each with the place where it occurs first, look like lists of labels."""
    for label, where in labels.items():
        if found := next((sign for sign in SURE_SEPARATORS if sign in label), None):
            raise UserError(f"{where}: label {label!r} contains {found!r}; {ASK_FOR_MULTI}")
        if label.startswith("[") and label.endswith("]"):
            raise UserError(f"{where}: label {label!r:.60} looks like a list; {ASK_FOR_MULTI}")
    parts = {label: split_cell(label, ",") for label in labels if "," in label}
    if not parts:
        return
    uses = Counter(part for label in labels for part in set(parts.get(label, [label])))
    shared = [part for found in parts.values() for part in found if uses[part] > 1]
    if 2 * len(shared) >= sum(map(len, parts.values())):
        label = next(iter(parts))
        raise UserError(
            f"{labels[label]}: label {label!r} contains ',', and its parts occur in other "
            f"labels too; {ASK_FOR_MULTI}"
        )


class LabelCells:
    """The label cells of a multi-label table or of shards, all of the same kind."""

    def __init__(self, separator: str | None):
        self.separator = separator
        self.kind = ""
        self.places: list[str] = []  # where each cell is: "row 3"
        self.cells: list[str | list[str]] = []  # a string is separated when all cells are known

    def add(self, place: str, cell: object) -> None:
        kind, value = parse_cell(cell)
        self.kind = self.kind or kind
        if kind != self.kind:
            raise UserError(
                f"the labels are {kind}, but {self.kind} in {self.places[0]}; "
                f"use one kind in all rows"
            )
        self.places.append(place)
        self.cells.append(value)

    def split(self) -> list[list[str]]:
        """The labels of each image."""
        separator = self.separator or self.find_separator()
        rows = []
        for place, cell in zip(self.places, self.cells, strict=True):
            labels = split_cell(cell, separator) if isinstance(cell, str) else cell
            if not labels and self.kind != COLUMNS:
                raise UserError(
                    f"{place}: the list of labels is empty; name at least one label, or use a "
                    f"column of 0 and 1 for each class, where an image may have none"
                )
            if len(set(labels)) < len(labels):
                repeated = next(name for name, times in Counter(labels).items() if times > 1)
                raise UserError(f"{place}: label {repeated!r} occurs twice; remove one")
            rows.append(labels)
        return rows

    def find_separator(self) -> str | None:
        texts = [cell for cell in self.cells if isinstance(cell, str)]
        found = [sign for sign in SEPARATORS if any(sign in text for text in texts)]
        if set(SURE_SEPARATORS) <= set(found):
            raise UserError(
                "the labels contain both ';' and '|'; set `data.columns.separator` to one of them"
            )
        return found[0] if found else None


TEXT, LIST, COLUMNS = "text", "JSON lists", "columns of 0 and 1"


def parse_cell(cell: object) -> tuple[str, str | list[str]]:
    """The kind of a cell, and its text or its labels."""
    if isinstance(cell, dict):
        return COLUMNS, [name for name, value in cell.items() if is_positive(name, value)]
    if isinstance(cell, str) and cell.strip().startswith("["):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError) as error:
            raise UserError(f"label {cell!r:.60} is not a valid JSON list") from error
    if isinstance(cell, list):
        if not all(isinstance(part, str | int) and not isinstance(part, bool) for part in cell):
            raise UserError(f"label {cell!r:.60} is not a list of strings or integers")
        return LIST, [normalise_name(str(part)) for part in cell]
    if isinstance(cell, int) and not isinstance(cell, bool):
        return TEXT, str(cell)
    if cell is None:
        return TEXT, ""
    if not isinstance(cell, str):
        raise UserError(f"label {cell!r:.60} is neither text nor a list")
    return TEXT, cell


def is_positive(name: str, value: object) -> bool:
    text = str(value).strip().casefold() if value is not None else ""
    if text in TRUE:
        return True
    if text in FALSE:
        return False
    raise UserError(f"column {name!r} has {value!r:.40}; class columns hold 0 or 1")


def looks_binary(values: Iterable[object]) -> bool:
    """Whether the values of a row could be those of class columns."""
    texts = [str(value).strip().casefold() for value in values]
    return bool(texts) and all(text in TRUE | FALSE - {""} for text in texts)


def split_cell(cell: str, separator: str | None) -> list[str]:
    parts = cell.split(separator) if separator else [cell]
    return [name for part in parts if (name := normalise_name(part))]


def encode_labels(
    rows: Sequence[Sequence[str]], index: Mapping[str, int], classes: int
) -> MultiHot:
    """A row of 0 and 1 for each image, from its labels and the class index of each label."""
    hot = np.zeros((len(rows), classes), np.uint8)
    for number, labels in enumerate(rows):
        hot[number, [index[label] for label in labels]] = 1
    return hot


def merge_copies(source: FileSource, progress: bool) -> FileSource:
    """One item for the copies of an image in several class folders, with all of their labels.

    Copies have the same content; those in different splits stay apart.
    """
    hashes = hash_items(source, progress=progress)
    keys = [(row.tobytes(), split) for row, split in zip(hashes, source.splits, strict=True)]
    position: dict[tuple[bytes, str], int] = {}
    kept: list[int] = []
    for number, key in enumerate(keys):
        if key not in position:
            position[key] = len(kept)
            kept.append(number)
    hot = np.zeros((len(kept), len(source.classes)), np.uint8)
    hot[[position[key] for key in keys], source.labels] = 1
    return replace(
        source,
        labels=hot,
        splits=source.splits[kept],
        ids=PackedNames(source.ids[number] for number in kept),
        sizes=source.sizes[kept],
        mtimes=source.mtimes[kept],
        members=None if source.members is None else source.members.select(kept),
        contents=ContentBuffer(),
    )
