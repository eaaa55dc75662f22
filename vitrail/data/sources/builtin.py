"""Small public sets by name: packaged, found under `VITRAIL_DATA`, or downloaded there.

Read from their official binary layouts, never from pickles. The official test images are "test";
where a set calls them validation, as ImageNet does, they are "test" here too, and "val" is a tenth
of the training images.
"""

import gzip
import math
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail import files
from vitrail.data.source import Item, Source
from vitrail.data.sources.catalogue import (
    IMAGENET10,
    IMAGENETTE,
    PARTS,
    SETS,
    find,
    variant,
    wanted_files,
)
from vitrail.data.sources.download import fetch, locked
from vitrail.data.sources.folder import Files, gather, walk
from vitrail.data.sources.names import Names, match
from vitrail.data.sources.places import data_folder
from vitrail.data.split import settle
from vitrail.errors import UserError

Pixels = NDArray[np.uint8]
Labels = NDArray[np.uint8]
Part = tuple[Pixels, Labels]  # the images and labels of the official train or test split


@dataclass(frozen=True, eq=False)
class Arrays:
    """A set whose pixels all fit into one array."""

    name: str
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    splits: NDArray[np.str_]
    ids: Names
    pixels: Pixels  # all images: number x height x width x channels
    path: None = None
    ignored: dict[str, str] = field(default_factory=dict)

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.full(len(self), math.prod(self.pixels.shape[1:]), np.int64)

    @property
    def dates(self) -> NDArray[np.int64]:
        return np.zeros(len(self), np.int64)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Item:
        return Item(self.pixels[index], int(self.labels[index]), self.ids[index])


def open_builtin(
    name: str, *, classes: Sequence[str] | None, split: bool, progress: bool
) -> Source:
    """The set called `name`, downloaded first if it is nowhere."""
    theirs, order = class_order(name, classes)
    if name == "digits":
        source: Arrays | Files = digits(theirs, order)
    elif name in ("imagenette", "imagenet10"):
        wnids = IMAGENETTE if name == "imagenette" else IMAGENET10
        source = photos(name, find_or_fetch(name, progress), list(wnids), theirs, order)
    else:
        read = mnist if "mnist" in name else cifar
        parts = read(name, find_or_fetch(name, progress))
        source = arrays(name, dict(zip(("train", "test"), parts, strict=True)), theirs, order)
    settled: Source = settle(source, split=split, progress=progress)
    return settled


def class_order(
    name: str, classes: Sequence[str] | None
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """The classes to use, and the position among them of each official one."""
    known = SETS[name].classes
    if classes is None:
        return known, np.arange(len(known))
    theirs, index = match({label: name for label in known}, classes)
    return theirs, np.array([index[label] for label in known])


def find_or_fetch(name: str, progress: bool) -> Path:
    place, known, folder = find(name), SETS[name], data_folder() / name
    if place is None and not known.downloads:
        raise UserError(
            f"{name} needs the ImageNet folders train/ and val/ with class folders such as "
            f"{next(iter(IMAGENET10))}; put or link them into {data_folder() / known.folders[1]}, "
            f"or set VITRAIL_DATA"
        )
    if place is not None and not (place.is_file() and name == "imagenette"):
        return place
    with locked(folder):
        place = find(name)  # another process may have brought it by now
        if place is None:
            fetched = [fetch(download, folder, progress=progress) for download in known.downloads]
            if known.archives:
                unpack(fetched[0], name)
                fetched[0].unlink()
        elif place.is_file():
            unpack(place, name)
    place = find(name)
    if place is None or place.is_file():
        raise UserError(f"the set unpacked in {folder} lacks files; remove it and try again")
    return place


def unpack(archive: Path, name: str) -> None:
    """Writes the archive's wanted members into the set's folder, all or nothing."""
    inner = archive.name.removesuffix(".tgz")
    if name != "imagenette":
        inner = known_folder(name)
    target = data_folder() / name / inner
    wanted = tuple(f"{inner}/{file}" for file in wanted_files(name))
    try:
        with tarfile.open(archive, "r:gz") as tar, files.replacing(target) as folder:
            for member in tar:
                if member.isreg() and member.name.startswith(wanted):
                    tar.extract(member, folder.parent, filter="data")
            if not folder.exists():
                raise UserError(f"{archive} holds no {wanted[0]}")
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise UserError(f"cannot unpack {archive}: {error}") from error


def known_folder(name: str) -> str:
    """The folder inside CIFAR's official archive."""
    return SETS[name].folders[-1]


def digits(classes: tuple[str, ...], order: NDArray[np.int64]) -> Arrays:
    """scikit-learn's 1,797 handwritten digits (Alpaydin and Kaynak, 1998; CC BY 4.0).

    The file was made by: data = sklearn.datasets.load_digits(); numpy.savez_compressed(
    "digits.npz", images=(data.images * 255 / 16).round().astype("uint8"),
    labels=data.target.astype("uint8")).
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as packed:
        part = packed["images"][:, :, :, None], packed["labels"]
    return arrays("digits", {"": part}, classes, order)


def arrays(
    name: str, parts: dict[str, Part], classes: tuple[str, ...], order: NDArray[np.int64]
) -> Arrays:
    """One source of the official splits; `order` gives each official label its class."""
    ids = (
        "/".join(filter(None, (name, split, f"{number:05d}")))
        for split, (pixels, _) in parts.items()
        for number in range(len(pixels))
    )
    labels = np.concatenate([labels for _, labels in parts.values()])
    if labels.max(initial=0) >= len(order):
        raise UserError(f"{name} has a label {labels.max()}; wanted 0 to {len(order) - 1}")
    return Arrays(
        name=name,
        classes=classes,
        labels=order[labels].astype(np.int64),
        splits=np.repeat(np.array(list(parts), "<U5"), [len(x) for x, _ in parts.values()]),
        ids=Names(ids),
        pixels=np.concatenate([pixels for pixels, _ in parts.values()]),
    )


def mnist(name: str, folder: Path) -> list[Part]:
    parts = []
    for part in PARTS:
        images = idx(folder, f"{part}-images-idx3-ubyte", dims=3)
        labels = idx(folder, f"{part}-labels-idx1-ubyte", dims=1)
        if len(images) != len(labels):
            raise UserError(f"{folder}: {len(images)} {part} images, but {len(labels)} labels")
        parts.append((images[:, :, :, None], labels))
    return parts


def idx(folder: Path, name: str, dims: int) -> Pixels:
    """Unsigned bytes in LeCun's IDX format: 0, 0, type, dimensions, their lengths, numbers."""
    path = variant(folder, name)
    assert path is not None
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            head = file.read(4 + 4 * dims)
            shape = [int.from_bytes(head[at : at + 4], "big") for at in range(4, len(head), 4)]
            if head[:4] != bytes([0, 0, 8, dims]) or len(shape) != dims:
                raise UserError(f"{path} is no IDX file of {dims} dimensions")
            body = file.read(math.prod(shape) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if len(body) != math.prod(shape) or not body:
        raise UserError(f"{path} is truncated or too long; wanted {math.prod(shape)} bytes")
    return np.frombuffer(body, np.uint8).reshape(shape)


def cifar(name: str, place: Path) -> list[Part]:
    names, labels = wanted_files(name), 1 if name == "cifar10" else 2
    try:
        read = archived(place, name) if place.is_file() else lambda n: (place / n).read_bytes()
        train = [records(read(file), labels, place / file) for file in names[:-1]]
        test = records(read(names[-1]), labels, place / names[-1])
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {place}: {error}") from error
    pixels, numbers = zip(*train, strict=True)
    return [(np.concatenate(pixels), np.concatenate(numbers)), test]


def archived(archive: Path, name: str) -> Callable[[str], bytes]:
    """Reads members of an official archive without unpacking it."""
    folder, contents = known_folder(name), {}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            short = member.name.removeprefix(f"{folder}/")
            if member.isreg() and short in wanted_files(name) and member.size < 2**28:
                file = tar.extractfile(member)
                assert file is not None
                contents[short] = file.read()
    if missing := [file for file in wanted_files(name) if file not in contents]:
        raise UserError(f"{archive} holds no {folder}/{missing[0]}")
    return contents.__getitem__


def records(content: bytes, labels: int, path: Path) -> Part:
    """CIFAR's rows: label bytes, the last of which is the fine one, then red, green and blue."""
    width = labels + 3 * 32 * 32
    if not content or len(content) % width:
        raise UserError(f"{path} is truncated; wanted rows of {width} bytes")
    rows = np.frombuffer(content, np.uint8).reshape(-1, width)
    planes = rows[:, labels:].reshape(-1, 3, 32, 32)
    return np.stack([planes[:, colour] for colour in range(3)], axis=3), rows[:, labels - 1]


def photos(
    name: str, root: Path, wnids: list[str], classes: tuple[str, ...], order: NDArray[np.int64]
) -> Files:
    """Class folders of ImageNet under `train` and `val`; the latter are "test" here."""
    ignored: dict[str, str] = {}
    parts = [
        (folder, given, int(order[number]))
        for given, top in (("train", "train"), ("test", "val"))
        for number, wnid in enumerate(wnids)
        for folder in walk(root, ignored, start=(top, wnid))
    ]
    return gather(root, name, classes, parts, ignored)
