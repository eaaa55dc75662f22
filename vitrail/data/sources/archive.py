"""A zip of images, read in place: nothing is unpacked to disk, and hostile zips are refused.

Refused as a whole: encrypted files, paths that lead outside, two files of one path, files that
overlap and zip bombs. Every file is checked against its size and checksum when it is read.
"""

import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from vitrail.data.image import MAX_BYTES, check_file_size, read_error
from vitrail.data.sources.index_cache import DAMAGED_ARCHIVE
from vitrail.data.sources.places import modification_time
from vitrail.data.sources.tree import File, ListedTree, Place, is_hidden
from vitrail.errors import UserError

LOCAL_HEADER = 30  # bytes before the name and the extra field of a file
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
BOMB_BYTES, BOMB_RATIO = 2**30, 100  # of a zip bomb when unpacked, and to the size of the zip


class ZipTree(ListedTree):
    """The visible files of a zip, below a folder in it."""

    def __init__(self, path: Path):
        self.path, self.name = path.absolute(), path.stem
        self.entries = {
            info.filename: info
            for info in read_directory(self.path)
            if not any(map(is_hidden, info.filename.rstrip("/").split("/")))
        }
        mtime = modification_time(path.stat())
        listed = {
            name: None if info.is_dir() else File(name, info.file_size, mtime)
            for name, info in self.entries.items()
        }
        super().__init__(listed, [name for name, info in self.entries.items() if is_link(info)])

    def enter(self, folder: str) -> "ZipTree":
        inner = ZipTree.__new__(ZipTree)
        inner.path, inner.name, start = self.path, self.name, f"{folder}/"
        inner.entries = {
            name.removeprefix(start): info
            for name, info in self.entries.items()
            if name.startswith(start)
        }
        inner.links = {name.removeprefix(start) for name in self.links if name.startswith(start)}
        inner.listed = self.list_below(folder)
        return inner

    def open_file(self, name: str) -> BinaryIO:
        size = self.entries[name].file_size
        return io.BytesIO(read_member(self.path, size, locate_member(self.entries[name])))

    def find_bytes(self, name: str) -> Place:
        info = self.entries[name]
        if info.compress_type != zipfile.ZIP_STORED:
            raise UserError(
                f"{self.path} compresses {name}, so that single images in it cannot be read; "
                f"unpack it and give the folder, or zip it again without compression (zip -0)"
            )
        with open(self.path, "rb") as file:
            seek_content(file, info.header_offset)
            return self.path, file.tell(), file.tell() + info.file_size

    def locate(self, names: Sequence[str]) -> "ZipMembers":
        places = [locate_member(self.entries[name]) for name in names]
        return ZipMembers(self.path, np.array(places, np.int64))


@dataclass(frozen=True, eq=False)
class ZipMembers:
    """Images in a zip, each with its place there."""

    path: Path
    places: NDArray[np.int64]  # see `locate_member`

    def read(self, index: int, size: int) -> bytes:
        return read_member(self.path, size, self.places[index])

    def select(self, indices: Sequence[int]) -> "ZipMembers":
        return ZipMembers(self.path, self.places[indices])


def is_link(info: zipfile.ZipInfo) -> bool:
    return stat.S_ISLNK(info.external_attr >> 16)


def locate_member(info: zipfile.ZipInfo) -> tuple[int, int, int, int]:
    """Where a zip has a file: offset, compressed size, method and checksum."""
    return info.header_offset, info.compress_size, info.compress_type, info.CRC


def read_directory(path: Path) -> list[zipfile.ZipInfo]:
    """All entries of a zip, checked; reads no file in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        size = path.stat().st_size
    except DAMAGED_ARCHIVE as error:
        raise UserError(f"{path} is not a valid zip: {error}") from error
    names: dict[str, zipfile.ZipInfo] = {}
    for info in entries:
        if problem := describe_problem(info, names):
            raise UserError(f"{path} {problem}")
        names[info.filename] = info
    total = sum(info.file_size for info in entries)
    if total > BOMB_BYTES and total > BOMB_RATIO * size:
        raise UserError(
            f"{path} looks like a zip bomb: {size / 2**20:.1f} MB would become "
            f"{total / 2**30:.1f} GB; if it is not, unpack it and give the folder"
        )
    ends = 0
    for info in sorted(entries, key=lambda info: info.header_offset):
        if info.header_offset < ends:
            raise UserError(
                f"{path} looks like a zip bomb: {info.filename!r} overlaps another file"
            )
        ends = info.header_offset + LOCAL_HEADER + info.compress_size
    return entries


def describe_problem(info: zipfile.ZipInfo, names: Mapping[str, object]) -> str | None:
    """Why a zip with this entry is refused; None if the entry is fine."""
    name = info.filename
    if info.flag_bits & 0x1:
        return "is encrypted; unpack it and give the folder"
    absolute = name.startswith("/") or name[1:2] == ":"
    if absolute or "\\" in name or "\0" in info.orig_filename or ".." in name.split("/"):
        return f"contains the path {info.orig_filename!r}, which is not below the zip; zip it again"
    if name in names:
        return f"contains {name!r} twice; zip it again"
    if info.compress_type not in METHODS:
        return f"is compressed by method {info.compress_type}; zip it again with deflate"
    return None


def read_member(path: Path, size: int, place: Sequence[int]) -> bytes:
    """The content of a file in a zip; a `UserError` gives the reason without the file's name."""
    offset, packed, method, checksum = map(int, place)
    check_file_size(size, MAX_BYTES)
    check_file_size(packed, MAX_BYTES)
    try:
        with open(path, "rb") as file:
            seek_content(file, offset)
            content = file.read(packed)
    except OSError as error:
        raise read_error(error) from error
    if len(content) < packed:
        raise UserError("truncated")
    if method == zipfile.ZIP_DEFLATED:
        content = inflate(content, size)
    if len(content) != size or zlib.crc32(content) != checksum:
        raise UserError("damaged: the zip has another checksum for it")
    return content


def seek_content(file: BinaryIO, offset: int) -> None:
    """Moves to the content of the file whose header is at `offset`."""
    file.seek(offset)
    header = file.read(LOCAL_HEADER)
    if len(header) < LOCAL_HEADER or not header.startswith(b"PK\x03\x04"):
        raise UserError("damaged, or the zip changed since it was listed")
    file.seek(sum(struct.unpack("<HH", header[26:30])), 1)


def inflate(content: bytes, size: int) -> bytes:
    """Decompresses no more than one byte beyond the declared size."""
    try:
        data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, size + 1)
    except zlib.error as error:
        raise UserError(f"damaged: {error}") from error
    if len(data) > size:
        raise UserError(f"a zip bomb: it has more than the {size} bytes that the zip declares")
    return data
