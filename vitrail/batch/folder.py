"""Where the parts of a job are stored: a folder, or a URL of any store that fsspec writes to.

A file appears complete or not at all: by a rename in a folder, by a single put in a store.
"""

import io
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail import files
from vitrail.data.sources import store
from vitrail.data.sources.store_cache import StoreReader
from vitrail.errors import UserError

LOCAL = "file://"


class PartFolder(ABC):
    """Files by name, in a folder or a store. Safe to pickle: workers get a copy."""

    @abstractmethod
    def list_names(self) -> set[str]:
        """The names of all files; none if the folder does not exist."""

    @abstractmethod
    def exists(self, name: str) -> bool: ...

    @abstractmethod
    def read(self, name: str) -> bytes: ...

    @abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Writes a file completely, or not at all."""

    @abstractmethod
    def open(self, name: str) -> Any:
        """A path or an open file that pyarrow reads."""

    def clean(self) -> None:  # noqa: B027
        """Removes what interrupted writes left."""


@dataclass(frozen=True)
class LocalFolder(PartFolder):
    path: Path

    def list_names(self) -> set[str]:
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file, not a folder; choose another `out`")
        return {one.name for one in self.path.iterdir()} if self.path.is_dir() else set()

    def exists(self, name: str) -> bool:
        return (self.path / name).is_file()

    def read(self, name: str) -> bytes:
        return files.read_regular(self.path / name)

    def write(self, name: str, content: bytes) -> None:
        files.write_file(self.path / name, content)

    def open(self, name: str) -> str:
        return str(self.path / name)

    def clean(self) -> None:
        files.remove_temporary(self.path, "*")

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class RemoteFolder(PartFolder):
    url: store.URL  # such as s3://bucket/features

    def list_names(self) -> set[str]:
        return store.list_names(self.url)

    def exists(self, name: str) -> bool:
        try:
            store.find_file(f"{self.url}/{name}")
        except store.NotStored:
            return False
        return True

    def read(self, name: str) -> bytes:
        return store.read_whole(f"{self.url}/{name}")

    def write(self, name: str, content: bytes) -> None:
        store.put_bytes(f"{self.url}/{name}", content)

    def open(self, name: str) -> Any:
        return io.BufferedReader(StoreReader(store.find_file(f"{self.url}/{name}")))

    def __str__(self) -> str:
        return str(self.url)


def open_part_folder(out: str | Path) -> PartFolder:
    """The folder or store at a path or URL; nothing is created yet."""
    text = str(out)
    if text.startswith(LOCAL):
        return LocalFolder(Path(text.removeprefix(LOCAL)).absolute())
    if store.is_url(text):
        return RemoteFolder(store.parse_url(text))
    return LocalFolder(files.expand_user(out).absolute())
