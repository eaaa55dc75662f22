"""Where the parts of a job are stored: a folder, or a URL of any store that fsspec writes to.

A file appears complete or not at all: by a rename in a folder, by a single put in a store.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail import files
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
    url: str  # such as s3://bucket/features

    def list_names(self) -> set[str]:
        with self._connect() as (store, root):
            store.invalidate_cache()
            if not store.exists(root):
                return set()
            return {str(one).rpartition("/")[2] for one in store.ls(root, detail=False)}

    def exists(self, name: str) -> bool:
        with self._connect() as (store, root):
            store.invalidate_cache()
            return bool(store.exists(f"{root}/{name}"))

    def read(self, name: str) -> bytes:
        with self._connect() as (store, root):
            content: bytes = store.cat_file(f"{root}/{name}")
            return content

    def write(self, name: str, content: bytes) -> None:
        with self._connect() as (store, root):
            store.pipe_file(f"{root}/{name}", content)

    def open(self, name: str) -> Any:
        with self._connect() as (store, root):
            return store.open(f"{root}/{name}", "rb")

    @contextmanager
    def _connect(self) -> Iterator[tuple[Any, str]]:
        """The file system and the path in it; its errors in one line."""
        try:
            fsspec = importlib.import_module("fsspec")
        except ImportError as error:
            raise UserError(f"{self.url} needs fsspec; pip install 'vitrail[ray]'") from error
        try:
            store, root = fsspec.url_to_fs(self.url)
            yield store, str(root).rstrip("/")
        except UserError:
            raise
        except ImportError as error:  # the package for this kind of store
            raise UserError(f"{self.url}: {error}") from error
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"cannot read or write {self.url}: {reason:.200}") from error

    def __str__(self) -> str:
        return self.url


def open_part_folder(out: str | Path) -> PartFolder:
    """The folder or store at a path or URL; nothing is created yet."""
    text = str(out)
    if text.startswith(LOCAL):
        return LocalFolder(Path(text.removeprefix(LOCAL)).absolute())
    if "://" in text:
        return RemoteFolder(text.rstrip("/"))
    return LocalFolder(files.expand_user(out).absolute())
