"""ImageNet's validation images in one folder, with one of the files that list their classes.

The devkit numbers the classes in an order of its own, which only its `meta.mat` knows: without that
file its ground truth is refused, since any other order would give wrong labels without an error.
"""

import csv
import io
import posixpath
import re
from collections.abc import Sequence

import numpy as np

from vitrail.data.sources.folder import FileSource
from vitrail.data.sources.names import (
    IMAGENET_CLASSES,
    PackedNames,
    imagenet_wnids,
    is_wnid,
    match_labels,
)
from vitrail.data.sources.tree import Tree
from vitrail.data.split import assign_splits
from vitrail.errors import UserError

IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG", re.IGNORECASE)
DEVKIT, META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
GROUND_TRUTHS = (
    "LOC_val_solution.csv",  # Kaggle's: ImageId,PredictionString, which begins with the wnid
    "imagenet_2012_validation_synset_labels.txt",  # TensorFlow's: a wnid for each image
    "val.txt",  # Caffe's: the name and the class index from 0 of each image
    DEVKIT,  # ImageNet's: a number for each image, whose meaning is in meta.mat
)
FOLDERS = ("", "data", "ILSVRC2012_devkit_t12/data")


def find_ground_truth(tree: Tree) -> str:
    """The path of a known ground-truth file, if the tree has validation images; else ""."""
    present = [
        posixpath.join(folder, name) for folder in FOLDERS for name in list_folder(tree, folder)
    ]
    known = (path for name in GROUND_TRUTHS for path in present if posixpath.basename(path) == name)
    truth = next(known, "")
    return truth if truth and any(map(IMAGE.fullmatch, list_top_names(tree))) else ""


def list_folder(tree: Tree, folder: str) -> Sequence[str]:
    """The names in a folder; none if it does not exist."""
    for part in filter(None, folder.split("/")):
        if f"{part}/" not in tree.list_names():
            return []
        tree = tree.enter(part)
    return tree.list_names()


def list_top_names(tree: Tree) -> list[str]:
    """The names of the files at the top and in the folders there."""
    return [
        posixpath.basename(name)
        for folder in ("", *(name[:-1] for name in tree.list_names() if name.endswith("/")))
        for name in list_folder(tree, folder)
    ]


def open_validation(
    tree: Tree, truth: str, *, classes: Sequence[str] | None, split: bool, progress: bool
) -> FileSource:
    """The validation images of ImageNet; wnids are their classes, unless classes are given."""
    ignored: dict[str, str] = {}
    rows: list[tuple[str, int, int, int]] = []  # name, size, modification time, number
    for folder in tree.scan(ignored):
        for name, size, mtime in zip(folder.names, folder.sizes, folder.mtimes, strict=True):
            if match := IMAGE.fullmatch(posixpath.basename(name)):
                rows.append((name, size, mtime, int(match[1])))
            else:
                ignored[name] = "not a validation image of ImageNet"
    wnids = read_ground_truth(tree, truth)
    for name, *_, number in rows:
        if number not in wnids:
            raise UserError(f"{truth} has no class for {name}; is it complete?")
    labels = [wnids[number] for *_, number in rows]
    names, index = match_labels(dict.fromkeys(sorted(set(labels)), truth), classes)
    ids = PackedNames(name for name, *_ in rows)
    source = FileSource(
        name=tree.name,
        path=tree.path,
        root=tree.path,
        classes=names,
        labels=np.array([index[label] for label in labels], np.int64),
        splits=np.full(len(rows), "", "<U5"),
        ids=ids,
        sizes=np.array([size for _, size, _, _ in rows], np.int64),
        mtimes=np.array([mtime for _, _, mtime, _ in rows], np.int64),
        ignored=ignored,
        members=tree.locate(ids),
    )
    return assign_splits(source, split=split, progress=progress)


def read_ground_truth(tree: Tree, truth: str) -> dict[int, str]:
    """The wnid of each image by its number, which begins at 1."""
    with tree.open_file(truth) as file:
        lines = file.read().decode("utf-8-sig", "replace").split("\n")
    lines = [line.strip() for line in lines if line.strip()]
    if truth.endswith(".csv"):
        return read_kaggle(truth, lines)
    if all(map(is_wnid, lines)):
        return dict(enumerate(lines, 1))
    if all(line.isdecimal() for line in lines):
        order = read_devkit_order(tree, truth)
        return {number: pick(order, line, 1, truth) for number, line in enumerate(lines, 1)}
    pairs = [IMAGE.match(line) for line in lines]
    if not all(pairs):
        raise UserError(
            f"{truth} is not a ground truth of ImageNet; expected a wnid such as n01440764 in each "
            f"line, or the name of an image and its class index from 0"
        )
    return {
        int(match[1]): pick(imagenet_wnids(), line[match.end() :].strip(), 0, truth)
        for match, line in zip(pairs, lines, strict=True)
        if match
    }


def read_kaggle(truth: str, lines: Sequence[str]) -> dict[int, str]:
    wnids = {}
    for row, cells in enumerate(csv.DictReader(lines), 2):
        match = IMAGE.fullmatch(f"{cells.get('ImageId')}.JPEG")
        wnid = str(cells.get("PredictionString")).partition(" ")[0]
        if not match or not is_wnid(wnid):
            raise UserError(f"{truth}, row {row}: expected ImageId and PredictionString")
        wnids[int(match[1])] = wnid
    return wnids


def pick(order: Sequence[str], text: str, first: int, truth: str) -> str:
    """The wnid at a place that counts from `first`."""
    if not text.isdecimal() or not first <= int(text) < len(order) + first:
        last = len(order) + first - 1
        raise UserError(f"{truth}: {text!r} is not a class from {first} to {last}")
    return order[int(text) - first]


def read_devkit_order(tree: Tree, truth: str) -> Sequence[str]:
    """The wnids in the order of the devkit's numbers, from its `meta.mat`."""
    path = posixpath.join(posixpath.dirname(truth), META)
    if META not in list_folder(tree, posixpath.dirname(truth)):
        raise UserError(
            f"{truth} numbers the classes in an order that only the devkit's {META} knows; "
            f"put {META} beside it, or use a file of wnids such as {GROUND_TRUTHS[1]}"
        )
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise UserError(
            f"{META} needs the package scipy; pip install 'vitrail[heads]', "
            f"or use a file of wnids such as {GROUND_TRUTHS[1]}"
        ) from error
    try:
        with tree.open_file(path) as file:
            synsets = loadmat(io.BytesIO(file.read()), squeeze_me=True)["synsets"]
        order = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    except Exception as error:  # a damaged file can make scipy raise anything
        raise UserError(f"{path} is not the devkit's {META}: {type(error).__name__}") from error
    wnids = [order.get(number, "") for number in range(1, IMAGENET_CLASSES + 1)]
    if sorted(wnids) != sorted(imagenet_wnids()):
        raise UserError(f"{path} does not list the {IMAGENET_CLASSES} classes of ILSVRC 2012")
    return wnids
