"""Opens public data sets by name: packaged, below `VITRAIL_DATA`, or downloaded there.

Reads their official binary files, never pickles. The official test images are "test", even if the
data set calls them validation images, as ImageNet does; "val" is a tenth of the training images.
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
    DATASETS,
    IMAGENET10,
    IMAGENETTE,
    MNIST_PARTS,
    find_dataset,
    find_variant,
    required_files,
)
from vitrail.data.sources.download import download_file, lock_downloads
from vitrail.data.sources.folder import FileSource, merge_folders
from vitrail.data.sources.names import PackedNames, match_labels
from vitrail.data.sources.places import data_folder
from vitrail.data.sources.tree import scan_folders
from vitrail.data.split import assign_splits
from vitrail.errors import UserError

Pixels = NDArray[np.uint8]
Labels = NDArray[np.uint8]
Part = tuple[Pixels, Labels]  # the images and labels of the official train or test split

IDX_UINT8 = 8  # the code of unsigned bytes in an IDX file
CIFAR_SIDE = 32  # pixels
MAX_MEMBER_BYTES = 2**28  # of a file in CIFAR's archive; the official ones have at most 154 MB


@dataclass(frozen=True, eq=False)
class ArraySource:
    """A data set whose images are all in one array."""

    name: str
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    splits: NDArray[np.str_]
    ids: PackedNames
    pixels: Pixels  # all images: count x height x width x channels
    path: None = None
    ignored: dict[str, str] = field(default_factory=dict)

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.full(len(self), math.prod(self.pixels.shape[1:]), np.int64)

    @property
    def mtimes(self) -> NDArray[np.int64]:
        return np.zeros(len(self), np.int64)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Item:
        return Item(self.pixels[index], int(self.labels[index]), self.ids[index])


def open_builtin(
    name: str, *, classes: Sequence[str] | None, split: bool, progress: bool
) -> Source:
    """The data set called `name`, downloaded first if it is not present."""
    names, order = match_classes(name, classes)
    if name == "digits":
        source: ArraySource | FileSource = read_digits(names, order)
    elif name in ("imagenette", "imagenet10"):
        wnids = IMAGENETTE if name == "imagenette" else IMAGENET10
        folder = find_or_download(name, progress)
        source = list_photos(name, folder, list(wnids), names, order)
    else:
        read = read_mnist if "mnist" in name else read_cifar
        parts = read(name, find_or_download(name, progress))
        source = combine_parts(name, dict(zip(("train", "test"), parts, strict=True)), names, order)
    with_splits: Source = assign_splits(source, split=split, progress=progress)
    return with_splits


def match_classes(
    name: str, classes: Sequence[str] | None
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """The class names to use, and the index among them of each official class."""
    official = DATASETS[name].classes
    if classes is None:
        return official, np.arange(len(official))
    names, index = match_labels({label: name for label in official}, classes)
    return names, np.array([index[label] for label in official])


def find_or_download(name: str, progress: bool) -> Path:
    """The folder or archive of a data set, downloaded and extracted if necessary."""
    path, spec, folder = find_dataset(name), DATASETS[name], data_folder() / name
    if path is None and not spec.downloads:
        raise UserError(
            f"{name} needs the ImageNet folders train/ and val/ with class folders such as "
            f"{next(iter(IMAGENET10))}; copy or link them to {data_folder() / spec.folders[1]}, "
            f"or set VITRAIL_DATA"
        )
    if path is not None and not (path.is_file() and name == "imagenette"):
        return path
    with lock_downloads(folder):
        path = find_dataset(name)  # another process may have downloaded it meanwhile
        if path is None:
            downloaded = [download_file(file, folder, progress=progress) for file in spec.downloads]
            if spec.archives:
                extract_archive(downloaded[0], name)
                downloaded[0].unlink()
        elif path.is_file():
            extract_archive(path, name)
    path = find_dataset(name)
    if path is None or path.is_file():
        raise UserError(f"files of {name} are missing in {folder}; remove it and try again")
    return path


def extract_archive(archive: Path, name: str) -> None:
    """Extracts the required files into the data set's folder, all or nothing."""
    inner = archive.name.removesuffix(".tgz")
    if name != "imagenette":
        inner = archive_folder(name)
    target = data_folder() / name / inner
    required = tuple(f"{inner}/{file}" for file in required_files(name))
    try:
        with tarfile.open(archive, "r:gz") as tar, files.atomic_write(target) as folder:
            for member in tar:
                if member.isreg() and member.name.startswith(required):
                    tar.extract(member, folder.parent, filter="data")
            if not folder.exists():
                raise UserError(f"{archive} does not contain {required[0]}; download it again")
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise UserError(f"cannot extract {archive}: {error}") from error


def archive_folder(name: str) -> str:
    """The folder inside CIFAR's official archive."""
    return DATASETS[name].folders[-1]


def read_digits(classes: tuple[str, ...], order: NDArray[np.int64]) -> ArraySource:
    """scikit-learn's 1,797 handwritten digits (Alpaydin and Kaynak, 1998; CC BY 4.0).

    The file was created by: data = sklearn.datasets.load_digits(); numpy.savez_compressed(
    "digits.npz", images=(data.images * 255 / 16).round().astype("uint8"),
    labels=data.target.astype("uint8")).
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as packed:
        part = packed["images"][:, :, :, None], packed["labels"]
    return combine_parts("digits", {"": part}, classes, order)


def combine_parts(
    name: str, parts: dict[str, Part], classes: tuple[str, ...], order: NDArray[np.int64]
) -> ArraySource:
    """One source from the official splits; `order` maps official labels to class indices."""
    ids = (
        "/".join(filter(None, (name, split, f"{number:05d}")))
        for split, (pixels, _) in parts.items()
        for number in range(len(pixels))
    )
    labels = np.concatenate([labels for _, labels in parts.values()])
    if labels.max(initial=0) >= len(order):
        raise UserError(f"{name} has a label {labels.max()}; expected 0 to {len(order) - 1}")
    return ArraySource(
        name=name,
        classes=classes,
        labels=order[labels].astype(np.int64),
        splits=np.repeat(np.array(list(parts), "<U5"), [len(x) for x, _ in parts.values()]),
        ids=PackedNames(ids),
        pixels=np.concatenate([pixels for pixels, _ in parts.values()]),
    )


def read_mnist(name: str, folder: Path) -> list[Part]:
    parts = []
    for part in MNIST_PARTS:
        images = read_idx(folder, f"{part}-images-idx3-ubyte", dims=3)
        labels = read_idx(folder, f"{part}-labels-idx1-ubyte", dims=1)
        if len(images) != len(labels):
            raise UserError(f"{folder}: {len(images)} {part} images, but {len(labels)} labels")
        parts.append((images[:, :, :, None], labels))
    return parts


def read_idx(folder: Path, name: str, dims: int) -> Pixels:
    """Unsigned bytes in LeCun's IDX format: 0, 0, type, dimensions, their lengths, values."""
    path = find_variant(folder, name)
    assert path is not None
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            header = file.read(4 + 4 * dims)
            shape = [int.from_bytes(header[i : i + 4], "big") for i in range(4, len(header), 4)]
            if header[:4] != bytes([0, 0, IDX_UINT8, dims]) or len(shape) != dims:
                raise UserError(
                    f"{path} is not an IDX file of {dims} dimensions; download it again"
                )
            body = file.read(math.prod(shape) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if len(body) != math.prod(shape) or not body:
        raise UserError(
            f"{path} does not have the {math.prod(shape)} bytes that its header states; "
            "download it again"
        )
    return np.frombuffer(body, np.uint8).reshape(shape)


def read_cifar(name: str, path: Path) -> list[Part]:
    names, labels = required_files(name), 1 if name == "cifar10" else 2
    try:
        read = open_archive(path, name) if path.is_file() else lambda n: (path / n).read_bytes()
        train = [parse_records(read(file), labels, path / file) for file in names[:-1]]
        test = parse_records(read(names[-1]), labels, path / names[-1])
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    pixels, numbers = zip(*train, strict=True)
    return [(np.concatenate(pixels), np.concatenate(numbers)), test]


def open_archive(archive: Path, name: str) -> Callable[[str], bytes]:
    """Reads the members of an official archive without extracting it."""
    folder, contents = archive_folder(name), {}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = member.name.removeprefix(f"{folder}/")
            if member.isreg() and path in required_files(name) and member.size < MAX_MEMBER_BYTES:
                file = tar.extractfile(member)
                assert file is not None
                contents[path] = file.read()
    if missing := [file for file in required_files(name) if file not in contents]:
        raise UserError(f"{archive} does not contain {folder}/{missing[0]}; download it again")
    return contents.__getitem__


def parse_records(content: bytes, labels: int, path: Path) -> Part:
    """CIFAR's records: label bytes (the last is the fine label), then red, green and blue."""
    width = labels + 3 * CIFAR_SIDE * CIFAR_SIDE
    if not content or len(content) % width:
        raise UserError(
            f"{path} is truncated: it does not consist of records of {width} bytes; "
            "download it again"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, width)
    planes = rows[:, labels:].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE)
    return np.stack([planes[:, colour] for colour in range(3)], axis=3), rows[:, labels - 1]


def list_photos(
    name: str, root: Path, wnids: list[str], classes: tuple[str, ...], order: NDArray[np.int64]
) -> FileSource:
    """ImageNet's class folders in `train` and `val`; the latter become "test"."""
    ignored: dict[str, str] = {}
    parts = [
        (folder, split, int(order[number]))
        for split, top in (("train", "train"), ("test", "val"))
        for number, wnid in enumerate(wnids)
        for folder in scan_folders(root, ignored, start=(top, wnid))
    ]
    return merge_folders(root, name, classes, parts, ignored)
