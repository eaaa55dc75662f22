"""Splits follow from the bytes of the images alone, and nothing leaks."""

import os
from collections import Counter

import numpy as np
import pytest

from tests.data.samples import class_folders, write
from vitrail.data import split as module
from vitrail.data.open import open_data
from vitrail.data.split import hash_content, hash_items, split_by_hash
from vitrail.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def by_name(source) -> dict[str, str]:
    return dict(zip(source.ids, source.splits.tolist(), strict=True))


def number(content: bytes) -> float:
    return int.from_bytes(hash_content(content)[:8], "big") / 2**64


def test_the_hash_of_the_bytes_decides(tmp_path):
    source = open_data(class_folders(tmp_path / "data", {"a": 60, "b": 60}))
    for index in range(len(source)):
        place = number(source[index].content)
        expected = "test" if place < 0.1 else "val" if place < 0.2 else "train"
        assert source.splits[index] == expected


def test_names_and_order_do_not_matter(tmp_path):
    first = open_data(class_folders(tmp_path / "data", {"a": 40, "b": 40}))
    contents = {first[index].content: first.splits[index] for index in range(len(first))}
    for path in sorted((tmp_path / "data").rglob("*.png")):
        path.rename(path.with_name(f"x{99 - int(path.stem)}.png"))
    second = open_data(tmp_path / "data")
    assert all(contents[second[i].content] == second.splits[i] for i in range(len(second)))


def test_adding_images_moves_none_that_were_there(tmp_path):
    before = by_name(open_data(class_folders(tmp_path / "data", {"a": 50, "b": 50})))
    for seed in range(200, 240):
        write(tmp_path / "data" / "a" / f"new{seed}.png", seed)
    after = by_name(open_data(tmp_path / "data"))
    assert {name: after[name] for name in before} == before


def test_copies_stay_together_even_in_another_class(tmp_path):
    root = class_folders(tmp_path / "data", {"a": 60, "b": 60})
    for path in sorted((root / "a").iterdir()):
        (root / "b" / f"copy of {path.name}").write_bytes(path.read_bytes())
    splits = by_name(open_data(root))
    for path in (root / "a").iterdir():
        assert splits[f"a/{path.name}"] == splits[f"b/copy of {path.name}"]


@pytest.mark.parametrize("count", [3, 4, 5])
def test_a_small_class_still_has_every_split(tmp_path, count):
    names = {f"class {number}": count for number in range(8)}
    source = open_data(class_folders(tmp_path / "data", names))
    for label in range(8):
        assert set(source.splits[source.labels == label]) == {"train", "val", "test"}


def test_a_class_without_test_images_gives_its_lowest_hash():
    hashes = np.array([[5, 9, 4], [8, 6, 7]], np.uint64).ravel() << np.uint64(60)
    labels = np.repeat([0, 1], 3)
    found = split_by_hash(hashes, labels, ("a", "b"), ("test", "val"))
    assert found.tolist() == ["val", "train", "test", "train", "test", "val"]


def test_a_class_of_test_images_only_keeps_its_highest_hash_to_train():
    labels = np.zeros(4, np.int64)
    found = split_by_hash(np.array([4, 1, 3, 2], np.uint64), labels, ("a",), ("test", "val"))
    assert found.tolist() == ["train", "test", "val", "test"]


def test_what_val_has_stays_when_test_takes_the_lowest():
    tenth = 2**64 // 10
    hashes = np.array([tenth + n for n in range(4)] + [9 * tenth] * 2, np.uint64)
    found = split_by_hash(hashes, np.zeros(6, np.int64), ("a",), ("test", "val"))
    assert found.tolist() == ["test", "val", "val", "val", "train", "train"]


def test_a_rescued_copy_takes_its_twin_along():
    high = np.uint64(2**63)
    hashes = np.array([high, high + 1, high + 2, high, high + 3, high + 4, high + 5], np.uint64)
    labels = np.array([0, 0, 0, 1, 1, 1, 1])
    found = split_by_hash(hashes, labels, ("a", "b"), ("test", "val"))
    assert found[0] == found[3] == "test"


def test_classes_that_share_too_much_cannot_be_split():
    hashes = np.array([3, 4, 5, 5, 6, 7], np.uint64) + np.uint64(2**63)
    with pytest.raises(UserError, match="class 'a' shares too many of its images"):
        split_by_hash(hashes, np.array([0, 0, 0, 1, 1, 1]), ("a", "b"), ("test", "val"))


@pytest.mark.parametrize(("count", "words"), [(2, "2 different images"), (1, "1 different image;")])
def test_a_class_of_fewer_than_three_is_named(tmp_path, count, words):
    root = class_folders(tmp_path / "data", {"many": 5, "few": count})
    with pytest.raises(UserError, match=f"class 'few' has {words}"):
        open_data(root)


def test_three_copies_of_one_image_are_one_image(tmp_path):
    root = class_folders(tmp_path / "data", {"many": 5})
    for number in range(3):
        write(root / "few" / f"{number}.png", 99)
    with pytest.raises(UserError, match="class 'few' has 1 different image;"):
        open_data(root)


def test_validation_is_taken_from_train_where_only_test_is_given(tmp_path):
    class_folders(tmp_path / "data" / "train", {"a": 40, "b": 40})
    class_folders(tmp_path / "data" / "test", {"a": 5, "b": 5}, start=500)
    source = open_data(tmp_path / "data")
    for index, name in enumerate(source.ids):
        if name.startswith("test/"):
            assert source.splits[index] == "test"
        else:
            expected = "val" if number(source[index].content) < 0.1 else "train"
            assert source.splits[index] == expected


def test_a_given_validation_split_leaves_no_test(tmp_path):
    class_folders(tmp_path / "data" / "train", {"a": 1, "b": 2})
    class_folders(tmp_path / "data" / "valid", {"a": 1, "b": 1}, start=9)
    assert Counter(open_data(tmp_path / "data").splits.tolist()) == {"train": 3, "val": 2}


def test_given_splits_are_never_read(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "hash_items", None)
    for name in ("train", "val", "test"):
        class_folders(tmp_path / "data" / name, {"a": 1, "b": 1})
    assert len(open_data(tmp_path / "data")) == 6


def test_a_lone_train_folder_is_split_as_if_it_were_not_there(tmp_path):
    class_folders(tmp_path / "data" / "train", {"a": 60, "b": 60})
    class_folders(tmp_path / "flat", {"a": 60, "b": 60})
    nested, flat = open_data(tmp_path / "data"), open_data(tmp_path / "flat")
    assert nested.splits.tolist() == flat.splits.tolist()
    assert set(nested.splits.tolist()) == {"train", "val", "test"}


def test_a_class_without_training_images_is_named(tmp_path):
    class_folders(tmp_path / "data" / "train", {"a": 3, "b": 3})
    class_folders(tmp_path / "data" / "test", {"a": 3, "c": 3}, start=50)
    with pytest.raises(UserError, match="class 'c' of data has no training images"):
        open_data(tmp_path / "data")


def test_a_test_set_alone_cannot_train_but_can_be_opened(tmp_path):
    class_folders(tmp_path / "data" / "test", {"a": 2, "b": 1})
    with pytest.raises(UserError, match="no training images, only test"):
        open_data(tmp_path / "data")
    assert set(open_data(tmp_path / "data", split=False).splits) == {"test"}


def test_without_splitting_all_is_test_and_counts_do_not_matter(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "hash_items", None)
    source = open_data(class_folders(tmp_path / "data", {"a": 1}), split=False)
    assert source.splits.tolist() == ["test"]


def test_the_second_opening_reads_nothing(tmp_path, monkeypatch):
    root = class_folders(tmp_path / "data", {"a": 20, "b": 20})
    first = open_data(root)
    monkeypatch.setattr(module, "hash_item", None)
    assert open_data(root).splits.tolist() == first.splits.tolist()


def test_a_changed_file_is_read_again_and_only_that(tmp_path, monkeypatch):
    root = class_folders(tmp_path / "data", {"a": 20, "b": 20})
    open_data(root)
    write(root / "a" / "7.png", 999)
    os.utime(root / "a" / "7.png", ns=(1, 1))
    read = []
    original = module.hash_item
    monkeypatch.setattr(
        module, "hash_item", lambda source, i: read.append(source.ids[i]) or original(source, i)
    )
    open_data(root)
    assert read == ["a/7.png"]


def test_a_damaged_cache_is_made_again(tmp_path, cache):
    root = class_folders(tmp_path / "data", {"a": 20, "b": 20})
    first = open_data(root)
    (saved,) = (cache / "digests").iterdir()
    for content in (b"", b"nonsense", saved.read_bytes()[:-60]):
        saved.write_bytes(content)
        assert open_data(root).splits.tolist() == first.splits.tolist()


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, cache, caplog):
    cache.write_text("a file where a folder should be")
    open_data(class_folders(tmp_path / "data", {"a": 20, "b": 20}))
    assert "cannot cache the index" in caplog.text


def test_what_was_read_before_an_interruption_is_kept(tmp_path, monkeypatch):
    root = class_folders(tmp_path / "data", {"a": 200, "b": 200})
    original, count = module.hash_item, []

    def interrupted(source, index):
        if index == 300:
            raise KeyboardInterrupt
        return original(source, index)

    monkeypatch.setattr(module, "hash_item", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_data(root)
    monkeypatch.setattr(module, "hash_item", lambda s, i: count.append(i) or original(s, i))
    count.clear()
    open_data(root)
    assert 0 < len(count) < 400


def test_nothing_is_written_into_the_users_data(tmp_path):
    root = class_folders(tmp_path / "data", {"a": 5, "b": 5})
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("data*"))
    open_data(root)
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("data*")) == before


def test_an_unreadable_image_is_split_by_its_name_and_reported_when_read(tmp_path, monkeypatch):
    root = class_folders(tmp_path / "data", {"a": 20, "b": 20})
    source = open_data(root)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "another"))
    (root / "a" / "3.png").unlink()
    index = list(source.ids).index("a/3.png")
    found = hash_items(source, np.array([index, index + 1]))
    assert found[0].tobytes() == hash_content(b"a/3.png")
    with pytest.raises(UserError, match="no such file"):
        source[index]


def test_empty_files_are_items_too(tmp_path):
    root = class_folders(tmp_path / "data", {"a": 20, "b": 20})
    (root / "a" / "empty.jpg").touch()
    source = open_data(root)
    index = list(source.ids).index("a/empty.jpg")
    with pytest.raises(UserError, match="empty file"):
        source[index]
