"""Parquet files with a column of images, as data sets on the Hugging Face hub have them.

Rows of a parquet file cannot be read one by one, so its images are copied to a tar shard once. The
names of columns and classes come from the JSON that the file carries; nothing is executed.
"""

import io
import json
import logging
import posixpath
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.data.config import Columns, LabelKind
from vitrail.data.image import SUFFIXES, detect_format
from vitrail.decoding import parse_json
from vitrail.errors import UserError

ROWS_AT_ONCE = 64
UNLABELLED = -1  # the index of a class that is not published, as in the test set of a contest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParquetColumns:
    image: str
    label: str
    classes: tuple[str, ...]  # the names of class indices; empty if the labels are names


def import_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            "parquet files need the package pyarrow; pip install 'vitrail[parquet]'"
        ) from error
    return pyarrow.parquet


def convert_parquet(
    file: Path, name: str, shard: Path, columns: Columns, labels: LabelKind | None
) -> tuple[str, ...] | None:
    """Writes the images and labels of a parquet file, called `name` in messages, to a tar shard.

    Returns the names of the class indices, if any; None if no row has a label: nothing is written.
    """
    parquet = import_parquet()
    import pyarrow

    try:
        with parquet.ParquetFile(file) as opened:
            chosen = choose_columns(opened.schema_arrow, columns, name)
            check_label_kind(opened.schema_arrow.field(chosen.label).type, chosen, labels, name)
            if is_unlabelled(opened, chosen):
                log.warning("%s has no labels, so it is left out", name)
                return None
            with tarfile.open(shard, "w") as archive:
                for row, image, label in iterate_rows(opened, chosen, name):
                    add_pair(archive, f"{row:08d}", image, label)
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{name} cannot be read: {reason}") from error
    return chosen.classes


def choose_columns(schema: Any, columns: Columns, name: str) -> ParquetColumns:
    """The columns of images and labels: the given ones, else the only ones that the file has."""
    features = read_features(schema)
    images = [field.name for field in schema if is_image(field, features)]
    listed = ", ".join(map(repr, schema.names)) or "none"
    if columns.path != Columns().path:
        images = [column for column in schema.names if column == columns.path]
    if len(images) != 1:
        problem = f"has {len(images)} columns of images" if images else "has no column of images"
        advice = "set `data.columns.path` to the right one" if schema.names else "use another file"
        raise UserError(f"{name} {problem}; its columns are {listed}: {advice}")
    label = columns.label
    items = {key: item_feature(feature) for key, feature in features.items()}
    classes = {key: item for key, item in items.items() if item.get("_type") == "ClassLabel"}
    if label == Columns().label and label not in schema.names and len(classes) == 1:
        label = next(iter(classes))
    if label not in schema.names:
        raise UserError(
            f"{name} has no column {label!r} for the label; its columns are {listed}: "
            f"set `data.columns.label` to the right one"
        )
    names = classes.get(label, {}).get("names", [])
    return ParquetColumns(images[0], label, tuple(map(str, names)))


def read_features(schema: Any) -> dict[str, Any]:
    """What the `datasets` library wrote about each column; empty for other files."""
    text = (schema.metadata or {}).get(b"huggingface", b"{}")
    try:
        stored = parse_json(text)
    except UserError:
        return {}
    info = stored.get("info") if isinstance(stored, dict) else None
    features = info.get("features") if isinstance(info, dict) else None
    if not isinstance(features, dict):
        return {}
    return {key: value for key, value in features.items() if isinstance(value, dict | list)}


def item_feature(feature: Any) -> Mapping[str, Any]:
    """What is known about a column or, of a column of lists, about what they hold.

    Older files write a list of what it holds: [{"_type": "ClassLabel"}].
    """
    if isinstance(feature, dict):
        feature = feature.get("feature", feature)
    elif len(feature) == 1:
        feature = feature[0]
    return feature if isinstance(feature, dict) else {}


def is_list(kind: Any) -> bool:
    import pyarrow

    types = pyarrow.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def check_label_kind(
    kind: Any, chosen: ParquetColumns, labels: LabelKind | None, name: str
) -> None:
    """Raises if a column has lists of labels and single ones are wanted, or the other way round."""
    import pyarrow

    if is_list(kind) and labels not in ("multi", "none"):
        raise UserError(
            f"{name}: column {chosen.label!r} has a list of labels for each image; set "
            f"`data.labels='multi'`, or set `data.columns.label` to a column of single labels"
        )
    is_text = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
    if labels == "multi" and not is_list(kind) and not is_text:
        raise UserError(
            f"{name}: column {chosen.label!r} has one label for each image; omit `data.labels`, "
            f"or set `data.columns.label` to a column of lists"
        )


def is_image(field: Any, features: Mapping[str, Any]) -> bool:
    """Whether a column holds encoded images: declared, or stored as images are."""
    import pyarrow

    if field.name in features:
        feature = features[field.name]
        return isinstance(feature, dict) and feature.get("_type") == "Image"
    kind = field.type
    if pyarrow.types.is_struct(kind):
        return {kind.field(number).name for number in range(kind.num_fields)} >= {"bytes", "path"}
    return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))


def is_unlabelled(opened: Any, chosen: ParquetColumns) -> bool:
    """Whether the file is that of a test set whose labels are not published."""
    import pyarrow

    column = opened.read(columns=[chosen.label]).column(0)
    if is_list(column.type):
        return not any(column.to_pylist())
    if pyarrow.types.is_nested(column.type):
        return False
    labels = column.unique().to_pylist()
    return bool(labels) and set(map(repr, labels)) <= {repr(UNLABELLED), repr(None)}


def iterate_rows(
    opened: Any, chosen: ParquetColumns, name: str
) -> Iterator[tuple[int, bytes, str]]:
    """The number, the encoded image and the label of each row."""
    row = 0
    for batch in opened.iter_batches(ROWS_AT_ONCE, columns=[chosen.image, chosen.label]):
        images, labels = (batch.column(key).to_pylist() for key in (chosen.image, chosen.label))
        for image, label in zip(images, labels, strict=True):
            content = image.get("bytes") if isinstance(image, dict) else image
            if not isinstance(content, bytes):
                raise UserError(f"{name}, row {row}: {chosen.image!r} is not an encoded image")
            yield row, content, label_text(label, chosen.classes, f"{name}, row {row}")
            row += 1


def label_text(label: object, classes: Sequence[str], where: str) -> str:
    if label is None or label == UNLABELLED or label == "":
        raise UserError(f"{where}: the label is missing, but other rows have one")
    if isinstance(label, list):  # of objects in the image, say, so one may occur twice
        texts = dict.fromkeys(label_text(one, classes, where) for one in label)
        return json.dumps(list(texts), ensure_ascii=False)
    if not isinstance(label, str | int):
        raise UserError(f"{where}: label {label!r:.60} is neither a string nor an integer")
    if classes and not (isinstance(label, int) and 0 <= label < len(classes)):
        raise UserError(f"{where}: label {label!r:.60}, but there are {len(classes)} classes")
    return str(int(label)) if isinstance(label, bool) else str(label)


def add_pair(archive: tarfile.TarFile, key: str, image: bytes, label: str) -> None:
    """Adds an image and its label to a shard in WebDataset layout."""
    format = detect_format(image)
    suffix = next((suffix for suffix, kind in SUFFIXES.items() if kind == format), ".png")
    for name, content in ((f"{key}{suffix}", image), (f"{key}.cls", label.encode())):
        member = tarfile.TarInfo(posixpath.basename(name))
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
