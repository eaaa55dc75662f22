"""Images and labels given as Python objects become a data set that training accepts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail import files
from vitrail.data.image import load_image, read_file
from vitrail.data.source import Item
from vitrail.data.split import find_boundaries, hash_items
from vitrail.errors import UserError
from vitrail.inference.prediction import ImageInput


@dataclass(frozen=True, eq=False)
class ImageList:
    """Images and labels given in Python, as a data set."""

    name: str
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    splits: NDArray[np.str_]
    ids: Sequence[str]
    images: Sequence[str | Path | bytes | np.ndarray]
    path: None = None
    ignored: dict[str, str] = field(default_factory=dict)

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.array([_size_in_bytes(image) for image in self.images], np.int64)

    @property
    def mtimes(self) -> NDArray[np.int64]:
        return np.zeros(len(self), np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Item:
        image = self.images[index]
        content = read_file(image) if isinstance(image, str | Path) else image
        return Item(content, int(self.labels[index]), self.ids[index])


def list_images(X: Any) -> list[ImageInput]:
    """The samples of `X` as a list of images; `UserError` if they cannot be images."""
    if hasattr(X, "tocsr"):
        raise UserError("X is a sparse matrix; give images: paths, PIL images or arrays")
    if isinstance(X, str | Path | bytes | Image.Image):
        raise UserError("X is a single image; give a list of images")
    if hasattr(X, "iloc"):  # a pandas Series, or a DataFrame with one column
        X = X.to_numpy()
    if isinstance(X, np.ndarray):
        if X.dtype.kind in "OUS":
            X = X.ravel() if X.ndim == 2 and X.shape[1] == 1 else X
            wanted = X.ndim == 1
        else:
            wanted = X.ndim in (3, 4)
        if not wanted:
            raise UserError(
                f"X is an array of shape {X.shape}; give (n, height, width) or "
                f"(n, height, width, channels), for example X.reshape(-1, 8, 8)"
            )
    elif not isinstance(X, Iterable):
        raise UserError(f"X is a {type(X).__name__}; give a list of images")
    images: list[ImageInput] = [str(one) if isinstance(one, np.str_) else one for one in X]
    if not images:
        raise UserError("X holds 0 images (0 samples), while a minimum of 1 is required")
    return images


def make_source(
    images: Sequence[ImageInput], labels: NDArray[np.int64], classes: tuple[str, ...]
) -> ImageList:
    """An in-memory data set for training; paths are read when their images are needed."""
    contents: list[str | Path | bytes | np.ndarray] = []
    ids: list[str] = []
    for number, image in enumerate(images):
        ids.append(f"sample {number}")
        if isinstance(image, str | Path):
            ids[-1] += f" ({image})"
            contents.append(files.expand_user(image))
        elif isinstance(image, np.ndarray | bytes):
            contents.append(image)
        else:
            try:
                contents.append(load_image(image, None, None))
            except UserError as error:
                raise UserError(f"sample {number}: {error}") from error
    return ImageList(
        name="images",
        classes=classes,
        labels=labels,
        splits=np.full(len(images), "train", "<U5"),
        ids=ids,
        images=contents,
    )


def hold_out_validation(source: ImageList) -> ImageList:
    """Moves about a tenth of each class to the validation split, by the hash of each image.

    A class with a single distinct image stays in the training split as a whole, and so does one
    whose images all have copies in the validation split.
    """
    indices = np.arange(len(source))
    hashes = hash_items(source, indices, progress=False)[:, :8].copy().view(">u8")[:, 0]
    members = [hashes[source.labels == number] for number in range(len(source.classes))]
    held_out: set[int] = set()
    for own in members:
        distinct = np.unique(own).astype(np.uint64)
        if len(distinct) > 1:
            held_out |= set(distinct[: find_boundaries(distinct, 1)[0]].tolist())
    for own in members:
        if held_out.issuperset(own.tolist()):
            held_out -= set(own.tolist())
    if not held_out:
        raise UserError(
            f"X has {len(source)} samples, too few to hold one out for validation; "
            f"give at least 2 different images of one class"
        )
    chosen = np.isin(hashes, np.array(sorted(held_out), np.uint64))
    return replace(source, splits=np.where(chosen, "val", "train").astype("<U5"))


def class_names(classes: NDArray[Any]) -> tuple[str, ...]:
    """The labels as distinct strings."""
    names = [str(one) for one in classes.tolist()]
    return tuple(names if len(set(names)) == len(names) else map(repr, classes.tolist()))


def _size_in_bytes(image: str | Path | bytes | np.ndarray) -> int:
    if isinstance(image, str | Path):
        path = Path(image)
        return path.stat().st_size if path.is_file() else 0
    return len(image) if isinstance(image, bytes) else image.nbytes
