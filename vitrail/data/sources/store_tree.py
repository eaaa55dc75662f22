"""The files below a URL as a tree: listed once, read through the local copy."""

import hashlib
import io
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from vitrail.data.image import MAX_BYTES, check_file_size
from vitrail.data.sources.names import PackedNames
from vitrail.data.sources.store import URL, StoreError, StoreFile, list_files
from vitrail.data.sources.store_cache import Range, read_range
from vitrail.data.sources.tree import File, ListedTree, Place, is_hidden


class StoreTree(ListedTree):
    """The visible files below a folder of a store."""

    def __init__(self, path: URL, files: dict[str, StoreFile] | None = None):
        self.path, self.name = path, path.name
        self.files = {
            name: file
            for name, file in (list_files(path) if files is None else files).items()
            if not any(map(is_hidden, name.split("/")))
        }
        super().__init__(
            {name: File(name, file.size, version_number(file)) for name, file in self.files.items()}
        )

    def enter(self, folder: str) -> "StoreTree":
        start = f"{folder}/"
        inside = {
            name.removeprefix(start): file
            for name, file in self.files.items()
            if name.startswith(start)
        }
        return StoreTree(self.path / folder, inside)

    def open_file(self, name: str) -> BinaryIO:
        file = self.files.get(posixpath.normpath(name))
        if file is None:
            raise StoreError(f"{self.path / name} does not exist; check the bucket and the path")
        return io.BytesIO(read_range(file, 0, file.size))

    def find_bytes(self, name: str) -> Place:
        return self.files[name], 0, self.files[name].size

    def locate(self, names: Sequence[str]) -> "StoreMembers":
        files = [self.files[name] for name in names]
        versions = PackedNames(file.version for file in files)
        return StoreMembers(PackedNames(file.url for file in files), versions)


@dataclass(frozen=True, eq=False)
class StoreMembers:
    """Images that are files of a store."""

    urls: PackedNames
    versions: PackedNames

    def read(self, index: int, size: int) -> bytes:
        check_file_size(size, MAX_BYTES)
        return read_range(*self.stored_range(index, size))

    def stored_range(self, index: int, size: int) -> Range:
        return StoreFile(self.urls[index], size, self.versions[index]), 0, size

    def select(self, indices: Sequence[int]) -> "StoreMembers":
        urls = PackedNames(self.urls[index] for index in indices)
        return StoreMembers(urls, PackedNames(self.versions[index] for index in indices))


def version_number(file: StoreFile) -> int:
    """A number that changes with the version, where files on disk have a modification time."""
    digest = hashlib.sha256(f"{file.version}\n{file.size}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
