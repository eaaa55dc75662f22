"""Tar shards give the same images as folders, by random access, and damage is never overlooked."""

import io
import pickle
import tarfile

import pytest

from tests.data.samples import class_folders, encoded, tar
from vitrail.data.open import open_data
from vitrail.data.sources import shards as module
from vitrail.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pairs(start: int, count: int, classes: int = 2) -> dict[str, bytes]:
    found = {}
    for number in range(start, start + count):
        found[f"{number:04d}.png"] = encoded(number)
        found[f"{number:04d}.cls"] = str(number % classes).encode()
    return found


@pytest.fixture
def folder(tmp_path):
    for shard in range(3):
        tar(tmp_path / "x" / f"{shard:03d}.tar", pairs(shard * 20, 20))
    return tmp_path / "x"


def why(path, **settings):
    with pytest.raises(UserError) as error:
        open_data(path, **settings)
    return str(error.value)


def test_every_image_is_found_with_its_label(folder):
    source = open_data(folder)
    assert (source.name, len(source), source.classes) == ("x", 60, ("0", "1"))
    for index in range(60):
        item = source[index]
        assert item.content == encoded(index)
        assert item.label == index % 2
        assert item.id == source.ids[index] == f"{index // 20:03d}.tar:{index:04d}"


def test_the_split_is_that_of_the_same_images_in_a_folder(folder, tmp_path):
    for number in range(60):
        path = tmp_path / "flat" / str(number % 2) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(number))
    flat, packed = open_data(tmp_path / "flat"), open_data(folder)
    by_content = {flat[index].content: flat.splits[index] for index in range(60)}
    assert all(by_content[packed[i].content] == packed.splits[i] for i in range(60))


@pytest.mark.parametrize(
    "names",
    [
        "train-000.tar val-000.tar test-000.tar",
        "a-train-1.tar a-valid-1.tar a_testing_1.tar",
        "train/0.tar val/0.tar test/0.tar",
    ],
)
def test_names_of_shards_or_folders_give_the_split(tmp_path, names):
    for number, name in enumerate(names.split()):
        tar(tmp_path / "x" / name, pairs(number * 4, 4))
    source = open_data(tmp_path / "x")
    expected = {"train": ["train"] * 4, "val": ["val"] * 4, "test": ["test"] * 4}
    found = {str(split): source.splits[source.splits == split].tolist() for split in expected}
    assert found == expected


def test_a_shard_without_a_split_among_others_is_named(folder):
    tar(folder / "train-000.tar", pairs(100, 4))
    assert "shard 000.tar has no split in its name, but others do" in why(folder)
    tar(folder / "train-val.tar", pairs(100, 4))
    assert "the name of shard train-val.tar contains two splits" in why(folder)


def test_class_names_come_from_a_file(folder):
    (folder / "classes.txt").write_text("cat\ndog\n")
    source = open_data(folder)
    assert source.classes == ("cat", "dog")
    assert source[1].label == 1


def test_labels_may_be_names_in_that_file(tmp_path):
    members = {
        key: value.replace(b"0", b"dog").replace(b"1", b"cat") if key.endswith("cls") else value
        for key, value in pairs(0, 20).items()
    }
    tar(tmp_path / "x" / "0.tar", members)
    (tmp_path / "x" / "classes.txt").write_text("cat\ndog\n")
    assert open_data(tmp_path / "x")[0].label == 1


def test_labels_follow_the_classes_of_a_model(folder):
    (folder / "classes.txt").write_text("cat\ndog\n")
    source = open_data(folder, classes=["dog", "emu", "cat"], split=False)
    assert (source[0].label, source[1].label) == (2, 0)


def test_a_label_beyond_the_classes_is_named(folder):
    (folder / "classes.txt").write_text("cat\n")
    assert "000.tar:0001: label 1, but the indices of the 1 classes are 0 to 0" in why(folder)


def test_a_long_and_an_odd_name_are_read(tmp_path):
    members = pairs(0, 20)
    members |= {f"{'deep/' * 40}é ü.v2.jpg": b"ignored", f"{'deep/' * 40}é ü.PNG": encoded(90)}
    members[f"{'deep/' * 40}é ü.cls"] = b" 1\n"
    tar(tmp_path / "x" / "0.tar", members)
    source = open_data(tmp_path / "x")
    assert source.ids[20] == f"0.tar:{'deep/' * 40}é ü"
    assert source[20].content == encoded(90)


def test_links_devices_and_hidden_members_are_skipped(tmp_path):
    path = tar(tmp_path / "x" / "0.tar", pairs(0, 20))
    with tarfile.open(path, "a") as archive:
        for kind, name in (
            (tarfile.SYMTYPE, "evil.png"),
            (tarfile.LNKTYPE, "evil2.png"),
            (tarfile.CHRTYPE, "evil3.png"),
            (tarfile.FIFOTYPE, "evil.cls"),
            (tarfile.DIRTYPE, "folder.png"),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
        for name in ("._0001.png", ".hidden.cls"):
            archive.addfile(tarfile.TarInfo(name))
    assert len(open_data(tmp_path / "x")) == 20


def test_members_that_are_neither_image_nor_label_do_not_matter(tmp_path):
    tar(tmp_path / "x" / "0.tar", pairs(0, 20) | {"0001.json": b"{}", "0001.seg.png": b"mask"})
    assert len(open_data(tmp_path / "x")) == 20


def test_a_name_with_dots_in_front_is_only_a_name(tmp_path):
    (tmp_path / "up.png").write_bytes(b"outside")
    members = pairs(0, 20) | {"../up.png": encoded(70), "../up.cls": b"1"}
    tar(tmp_path / "x" / "0.tar", members)
    source = open_data(tmp_path / "x")
    assert source.ids[20] == "0.tar:../up" and source[20].content == encoded(70)


def test_images_whose_key_has_a_dot_are_left_out_by_name(tmp_path):
    beside = {f"{name.partition('.')[0]}.seg.png": b"a mask" for name in pairs(0, 20)}
    dotted = {"a/b.v2.JPG": b"x", "a/b.v2.cls": b"1"}
    tar(tmp_path / "x" / "0.tar", pairs(0, 20) | beside | dotted)
    for _ in range(2):  # from the tar file, then from the index that was kept
        assert list(open_data(tmp_path / "x").ignored) == ["0.tar:a/b.v2.JPG"]


def test_the_suffix_of_a_name_is_kept(tmp_path):
    tar(tmp_path / "x" / "0.tar", pairs(0, 20) | {"a.JPG": encoded(90), "a.cls": b"1"})
    for _ in range(2):
        source = open_data(tmp_path / "x")
        assert (source[0].suffix, source[20].suffix) == (".png", ".jpg")


def test_an_index_of_another_version_is_rebuilt(folder, monkeypatch):
    open_data(folder)
    read, again = module.build_index, []
    monkeypatch.setattr(module, "INDEX_VERSION", 0)
    monkeypatch.setattr(module, "build_index", lambda *place: again.append(place) or read(*place))
    assert len(open_data(folder)) == 60 and len(again) == 3


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"a.png": b"x"}, "a has no .cls"),
        ({"a.cls": b"1"}, "a has no image"),
        ({"a.png": b"x", "a.jpg": b"y", "a.cls": b"1"}, "two images are called a"),
        ({"a.png": b"x", "a.cls": b" \n"}, "a.cls is empty"),
        ({"a.png": b"x", "a.cls": b"1" * 20_000}, "a.cls has 20000 bytes"),
        ({"a.png": b"x", "a.cls": b"\xff\xfe"}, "can't decode byte"),
        ({}, "no images in the shards"),
    ],
)
def test_a_wrong_member_is_named(tmp_path, members, words):
    tar(tmp_path / "x" / "0.tar", members)
    assert words in why(tmp_path / "x")


def test_a_truncated_shard_is_an_error(folder):
    whole = (folder / "001.tar").read_bytes()
    end = len(whole.rstrip(b"\0"))
    for cut in (end - 1, end // 2, end // 2 + 700, 100, 0):
        (folder / "001.tar").write_bytes(whole[:cut])
        assert "001.tar" in why(folder)


def test_a_shard_cut_between_two_images_is_truncated(folder):
    path = folder / "001.tar"
    with tarfile.open(path) as archive:
        pair = archive.getmembers()[20].offset
        end = archive.offset
    whole = path.read_bytes()
    for cut in (pair, end, end + 100):
        path.write_bytes(whole[:cut])
        assert "001.tar: truncated" in why(folder)
    path.write_bytes(whole[: end + tarfile.BLOCKSIZE])
    assert len(open_data(folder)) == 60


def test_a_damaged_header_is_not_taken_for_the_end(folder):
    path = folder / "002.tar"
    with tarfile.open(path) as archive:
        middle = archive.getmembers()[17].offset
    content = bytearray(path.read_bytes())
    content[middle + 3] ^= 255
    path.write_bytes(bytes(content))
    assert f"002.tar: damaged at byte {middle}" in why(folder)


def test_the_second_opening_reads_no_header(folder, monkeypatch):
    first = open_data(folder)
    monkeypatch.setattr(module, "build_index", None)
    second = open_data(folder)
    assert second.splits.tolist() == first.splits.tolist()
    assert second[7] == first[7]


def test_a_changed_shard_is_indexed_again(folder):
    open_data(folder)
    tar(folder / "001.tar", pairs(20, 25))
    source = open_data(folder)
    assert len(source) == 65
    assert source[44].content == encoded(44)


def test_a_shard_that_shrinks_is_an_error_of_that_image(folder):
    source = open_data(folder)
    content = (folder / "002.tar").read_bytes()
    (folder / "002.tar").write_bytes(content[: int(source.offsets[59]) + 10])
    with pytest.raises(UserError, match="truncated"):
        source[59]
    (folder / "002.tar").unlink()
    with pytest.raises(UserError, match="no such file"):
        source[59]


def test_an_archive_beside_class_folders_is_just_a_file(tmp_path):
    class_folders(tmp_path / "x", {"a": 3, "b": 3})
    tar(tmp_path / "x" / "original.tar", pairs(0, 4))
    source = open_data(tmp_path / "x")
    assert source.classes == ("a", "b")
    assert source.ignored == {"original.tar": "does not have the extension of an image"}


def test_shards_can_be_pickled(folder):
    source = open_data(folder)
    assert pickle.loads(pickle.dumps(source))[31] == source[31]


def test_a_header_with_a_negative_size_does_not_loop(tmp_path):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("a.png"))
        archive.addfile(tarfile.TarInfo("b.png"))
    content = bytearray(stream.getvalue())
    header = content[512:1024]
    header[124:136] = b"\xff" * 10 + b"\xfe\x00"  # -512: the next header is this one again
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    content[512:1024] = header
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "0.tar").write_bytes(bytes(content))
    assert "0.tar: truncated in b.png" in why(tmp_path / "x")


def test_several_labels_are_asked_for_never_assumed(tmp_path):
    cells = [b"cat;dog", b"dog", b"cat"]
    members = {}
    for number in range(24):
        members |= {f"{number:02d}.png": encoded(number), f"{number:02d}.cls": cells[number % 3]}
    tar(tmp_path / "x" / "0.tar", members)
    line = why(tmp_path / "x")
    assert line.startswith(
        "0.tar:00: label 'cat;dog' contains ';'; if it lists several labels, set"
    )
    source = open_data(tmp_path / "x", labels="multi")
    assert source.classes == ("cat", "dog")
    assert source.labels[:3].tolist() == [[1, 1], [0, 1], [1, 0]]
    assert open_data(tmp_path / "x", labels="single").classes == ("cat", "cat;dog", "dog")
