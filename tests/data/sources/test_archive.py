"""Zips are read in place like the folders they were made from, and hostile ones are refused."""

import pickle
import shutil
import struct
import zipfile

import numpy as np
import pytest

from tests.data.samples import class_folders, encoded, tar, write
from vitrail.data.open import open_data
from vitrail.data.source import fingerprint
from vitrail.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def pets(tmp_path):
    return class_folders(tmp_path / "pets", {"cat": 5, "dog": 5})


def pack(root, outer="", method=zipfile.ZIP_DEFLATED):
    path = root.with_suffix(".zip")
    with zipfile.ZipFile(path, "w", method) as archive:
        for file in sorted(root.rglob("*")):
            if file.is_file():
                archive.write(file, f"{outer}{file.relative_to(root)}")
    return path


@pytest.mark.parametrize("outer", ["", "pets/"])
def test_a_zip_opens_like_its_folder(pets, tmp_path, outer):
    folder, archive = open_data(pets), open_data(pack(pets, outer))
    assert (archive.name, archive.classes) == (folder.name, folder.classes)
    assert list(archive.ids) == list(folder.ids) and list(archive.splits) == list(folder.splits)
    assert fingerprint(archive) == fingerprint(folder)
    copied = pickle.loads(pickle.dumps(archive))
    assert [copied[n].content for n in range(10)] == [folder[n].content for n in range(10)]
    assert not list(tmp_path.glob("**/[0-9].png.*"))  # nothing was unpacked


def test_a_zip_inside_one_more_folder_is_evaluated_too(pets):
    path = pack(pets, "pets/")
    assert list(open_data(path, classes=("dog", "cat"), split=False).labels) == [1] * 5 + [0] * 5


def test_tables_in_a_zip_are_found(tmp_path):
    root = tmp_path / "leaves"
    for number in range(8):
        write(root / "train" / f"{number}.png", number)
    text = "".join(f"{n},{'cat' if n % 2 else 'dog'}\n" for n in range(8))
    (root / "train.csv").write_text(f"id,label\n{text}")
    path = pack(root, "leaves/")
    assert list(open_data(path).labels) == list(open_data(root).labels)
    assert open_data(path)[3].content == encoded(3)
    (root / "train.csv").rename(root / "train" / "metadata.csv")
    source = open_data(pack(root))
    assert source.classes == ("cat", "dog") and source[3].content == encoded(3)


def test_several_labels_come_from_copies_in_a_zip(tmp_path):
    root = class_folders(tmp_path / "x", {"a": 5, "b": 5})
    for number in (0, 1, 2, 3):
        shutil.copy(root / "a" / f"{number}.png", root / "b" / f"{9 + number}.png")
    source = open_data(pack(root), labels="multi")
    assert source.labels.sum(axis=0).tolist() == [5, 9]
    assert [source[n].content for n in range(5)] == [encoded(n) for n in range(5)]


@pytest.mark.parametrize("outer", ["", "shards/"])
def test_shards_in_a_zip_are_read_in_place(tmp_path, outer):
    root = tmp_path / "shards"
    for shard in range(2):
        pairs = {}
        for number in range(8):
            pairs[f"{number}.png"] = encoded(8 * shard + number)
            pairs[f"{number}.cls"] = str(number % 2).encode()
        tar(root / f"{shard}.tar", pairs)
    (root / "classes.txt").write_text("cat\ndog\n")
    path = pack(root, outer, method=zipfile.ZIP_STORED)
    folder, archive = open_data(root), open_data(path)
    assert fingerprint(archive) == fingerprint(folder) and archive.classes == ("cat", "dog")
    copied = pickle.loads(pickle.dumps(open_data(path)))  # from the cached index
    assert [copied[n].content for n in range(16)] == [encoded(n) for n in range(16)]
    advice = r"unpack it and give the folder, or zip it again without compression \(zip -0\)"
    with pytest.raises(UserError, match=f"compresses 0.tar, so that .* cannot be read; {advice}"):
        open_data(pack(root, outer))


def test_hidden_files_and_links_in_a_zip_are_not_images(pets):
    path = pack(pets)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("__MACOSX/cat/._0.png", b"x")
        archive.writestr("cat/.DS_Store", b"x")
        link = zipfile.ZipInfo("cat/link.png")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    source = open_data(path)
    assert len(source) == 10 and "a link" in source.ignored["cat/link.png"]


@pytest.mark.parametrize(
    "name", ["../evil.png", "/etc/evil.png", "cat/../../x.png", "C:/x.png", "cat\\x.png"]
)
def test_paths_that_lead_outside_are_refused(pets, name):
    path = pack(pets)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, encoded(1))
    with pytest.raises(UserError, match=r"contains the path .* which is not below the zip"):
        open_data(path)


def patch_directory(path, offset, value, kind="<I"):
    """Changes a field in each entry of the central directory."""
    data = bytearray(path.read_bytes())
    at = data.find(b"PK\x01\x02")
    while at >= 0:
        data[at + offset : at + offset + struct.calcsize(kind)] = struct.pack(kind, value)
        at = data.find(b"PK\x01\x02", at + 4)
    path.write_bytes(data)


def test_an_encrypted_zip_is_refused(pets):
    path = pack(pets)
    patch_directory(path, 8, 1, "<H")
    with pytest.raises(UserError, match="is encrypted; unpack it"):
        open_data(path)


def test_another_compression_is_refused(pets):
    path = pack(pets)
    patch_directory(path, 10, 14, "<H")
    with pytest.raises(UserError, match=r"is compressed by method 14; zip it again with deflate"):
        open_data(path)


def test_a_zip_bomb_is_refused(pets):
    path = pack(pets)
    patch_directory(path, 24, 2**30)  # the size of each file
    with pytest.raises(UserError, match=r"looks like a zip bomb: 0.0 MB would become 10.0 GB"):
        open_data(path)


def test_files_that_overlap_are_refused(pets):
    path = pack(pets)
    patch_directory(path, 42, 0)  # the offset of each file
    with pytest.raises(UserError, match="overlaps another file"):
        open_data(path)


def test_a_file_with_more_bytes_than_declared_is_not_inflated(tmp_path):
    root = tmp_path / "x"
    for label in ("a", "b"):
        (root / label).mkdir(parents=True)
        for number in range(4):
            np.save(root / label / f"{number}.npy", np.full((500, 500), number, np.uint8))
    path = pack(root)
    patch_directory(path, 24, 100)
    source = open_data(path, split=False)
    with pytest.raises(UserError, match="a zip bomb: it has more than the 100 bytes"):
        source[0]


def test_damage_in_a_zip_is_reported_for_the_image_it_hits(pets):
    path = pack(pets)
    data = bytearray(path.read_bytes())
    data[30 + len("cat/0.png") + 20] ^= 1
    path.write_bytes(data)
    source = open_data(path, split=False)
    with pytest.raises(UserError, match="damaged"):
        source[0]
    assert source[1].content == encoded(1)
    path.write_bytes(data[:-30])
    with pytest.raises(UserError, match="is not a valid zip"):
        open_data(path)
