"""Names of images and classes: packed into little memory, sorted, matched with labels."""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import UserError

IMAGENET_CLASSES = 1000


class PackedNames(Sequence[str]):
    """A sequence of strings in one block of bytes: a tenth of a list's memory, fast to pickle."""

    def __init__(self, texts: Iterable[str]):
        encoded = [os.fsencode(text) for text in texts]
        self.block = b"".join(encoded)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        self.starts = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])

    @property
    def array(self) -> NDArray[np.uint8]:
        """The block, for saving beside `starts`."""
        return np.frombuffer(self.block, np.uint8)

    @classmethod
    def unpack(cls, array: NDArray[np.uint8], starts: NDArray[np.int64]) -> "PackedNames":
        """The names whose `array` and `starts` were saved."""
        names = cls(())
        names.block, names.starts = array.tobytes(), starts
        return names

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} names")
        index = int(index) % len(self)
        return os.fsdecode(self.block[self.starts[index] : self.starts[index + 1]])

    def __iter__(self):  # type: ignore[no-untyped-def]
        for start, end in pairwise(self.starts.tolist()):
            yield os.fsdecode(self.block[start:end])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedNames):
            return NotImplemented
        return self.block == other.block and np.array_equal(self.starts, other.starts)

    __hash__ = None  # type: ignore[assignment]


def natural_key(name: str) -> tuple[list[tuple[int, str]], str]:
    """A sort key that orders numbers inside a name by value: "img2" before "img10"."""
    parts = re.split(r"([0-9]+)", name.casefold())
    # a number sorts by its length without leading zeros, then by its digits
    numbers = [(len(part.lstrip("0")), part.lstrip("0")) for part in parts[1::2]]
    texts = [(0, part) for part in parts[::2]]
    mixed = [pair for both in zip(texts, [*numbers, (0, "")], strict=True) for pair in both]
    return mixed, name


def normalise_name(name: str) -> str:
    """One spelling for names that look the same: Unicode NFC, without surrounding white space."""
    return unicodedata.normalize("NFC", name).strip()


def make_unique(classes: Sequence[str]) -> tuple[str, ...]:
    """Class names; those that occur more than once get their index appended: "crane 134"."""
    count = Counter(classes)
    names = [f"{name} {index}" if count[name] > 1 else name for index, name in enumerate(classes)]
    if len(set(names)) < len(names):
        repeated = next(name for name, times in Counter(names).items() if times > 1)
        raise UserError(f"two classes are called {repeated!r}; give each class its own name")
    return tuple(names)


def is_wnid(name: str) -> bool:
    """Whether a name is a WordNet identifier, as ImageNet's folders have it: "n02056570"."""
    return re.fullmatch(r"n[0-9]{8}", name) is not None


@cache
def imagenet_wnids() -> tuple[str, ...]:
    """The identifiers of the thousand classes of ILSVRC 2012, in the order of their indices."""
    text = files("vitrail.data.sources").joinpath("imagenet_wnids.txt").read_text("utf-8")
    return tuple(text.split())


def match_labels(
    labels: Mapping[str, str], classes: Sequence[str] | None
) -> tuple[tuple[str, ...], dict[str, int]]:
    """All class names in order, and the class index of each label.

    `labels` maps each label to where it occurs, for error messages. Without `classes` the labels
    themselves are the classes, in natural order. With them, all labels are class names, or all are
    class indices, or, for a model with the thousand classes of ImageNet, WordNet identifiers.
    """
    for label, where in labels.items():
        if label != label.encode(errors="replace").decode():  # an unpaired surrogate
            raise UserError(f"{where!r}: label {label!r} is not valid Unicode; rename it")
    if classes is None:
        names = tuple(sorted(labels, key=natural_key))
        return names, {name: index for index, name in enumerate(names)}
    names = make_unique([normalise_name(name) for name in classes])
    index = {name: number for number, name in enumerate(names)}
    unknown = [label for label in labels if label not in index]
    if not unknown:
        return names, {label: index[label] for label in labels}
    if len(names) == IMAGENET_CLASSES and all(map(is_wnid, labels)):
        wnids = {wnid: number for number, wnid in enumerate(imagenet_wnids())}
        if all(label in wnids for label in labels):
            return names, {label: wnids[label] for label in labels}
    if all(re.fullmatch(r"[0-9]{1,9}", label) for label in labels):
        for label in labels:
            if int(label) >= len(names):
                raise UserError(
                    f"{labels[label]}: label {label}, but the indices of the {len(names)} classes "
                    f"are 0 to {len(names) - 1}"
                )
        return names, {label: int(label) for label in labels}
    if not names:
        raise UserError("`classes` is empty; give the class names of the model")
    label = unknown[0]
    near = get_close_matches(label, names, n=1, cutoff=0.5)
    hint = f"; the nearest is {near[0]!r}" if near else f", such as {names[0]!r}"
    raise UserError(
        f"{labels[label]}: label {label!r} is not one of the {len(names)} classes{hint}"
    )
