"""Several labels per image: every way to write them, and every mistake in one line."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from vitrail.data.open import open_data
from vitrail.data.source import count_labels, label_names
from vitrail.errors import UserError

LABELS = [["cat"], ["cat", "dog"], ["dog", "bird"], ["bird"]]


@pytest.fixture
def images(tmp_path):
    """48 different images, of which every fourth has the same labels."""
    for number in range(48):
        pixels = np.full((8, 8, 3), number, np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    return tmp_path


def rows(count=48):
    return [(f"{number}.png", LABELS[number % 4]) for number in range(count)]


def write_csv(folder, cells, header=("path", "label")):
    with open(folder / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows([header, *cells])
    return folder / "table.csv"


def write_jsonl(folder, entries):
    (folder / "table.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder / "table.jsonl"


def why(*arguments, **settings):
    with pytest.raises(UserError) as error:
        open_data(*arguments, **settings)
    return str(error.value)


def by_separator(folder, sign=";"):
    return write_csv(folder, [(path, sign.join(labels)) for path, labels in rows()])


def by_json_cells(folder):
    return write_csv(folder, [(path, json.dumps(labels)) for path, labels in rows()])


def by_lists(folder):
    return write_jsonl(folder, [{"path": path, "label": labels} for path, labels in rows()])


def by_columns(folder):
    names = ("bird", "cat", "dog")
    cells = [(path, *(int(name in labels) for name in names)) for path, labels in rows()]
    return write_csv(folder, cells, ("path", *names))


@pytest.mark.parametrize("write", [by_separator, by_json_cells, by_lists, by_columns])
def test_every_way_to_write_them_gives_the_same_labels(images, write):
    source = open_data(write(images), labels="multi")
    assert source.classes == ("bird", "cat", "dog")
    expected = [[int(name in labels) for name in source.classes] for _, labels in rows()]
    assert source.labels.tolist() == expected
    assert label_names(source, 1) == "cat, dog"


def test_the_separator_is_found_or_given(images):
    for sign in ("|", ","):
        assert open_data(by_separator(images, sign), labels="multi").classes == (
            *("bird", "cat", "dog"),
        )
    spaces = by_separator(images, " ")
    assert open_data(spaces, labels="multi", columns={"separator": " "}).classes == (
        *("bird", "cat", "dog"),
    )
    both = write_csv(images, [("0.png", "a;b"), ("1.png", "a|b")])
    assert "both ';' and '|'; set `data.columns.separator`" in why(both, labels="multi")


def test_copies_of_an_image_in_several_folders_have_several_labels(images):
    for path, labels in rows():
        for label in labels:
            (images / "folders" / label).mkdir(parents=True, exist_ok=True)
            target = images / "folders" / label / f"{label}-{path}"
            target.write_bytes((images / path).read_bytes())
    source = open_data(images / "folders", labels="multi")
    assert len(source) == 48
    assert count_labels(source, np.arange(48)).tolist() == [24, 24, 24]
    assert sorted(source.labels.sum(axis=1).tolist()) == [1] * 24 + [2] * 24


def test_a_separator_in_a_single_label_table_is_an_error_that_names_both_ways_out(images):
    message = why(by_separator(images))
    assert "row 3: label 'cat;dog' contains ';'" in message
    assert "`data.labels='multi'`" in message and "`data.labels='single'`" in message
    assert len(open_data(by_separator(images), labels="single").classes) == 4


def test_a_comma_is_an_error_only_if_its_parts_are_labels_too(images):
    assert "its parts occur in other labels too" in why(by_separator(images, ","))
    names = ["tench, Tinca tinca", "crane", "maillot, tank suit", "crane, bird"]
    table = write_csv(images, [(f"{n}.png", names[n % 4]) for n in range(48)])
    assert len(open_data(table).classes) == 4  # as ImageNet's names have it


def test_lists_and_class_columns_are_offered_by_name(images):
    assert "is a list; for several labels set `data.labels='multi'`" in why(by_lists(images))
    message = why(by_columns(images))
    assert "columns of 0 and 1; if each of them is a class, set `data.labels='multi'`" in message


def test_labels_of_two_kinds_in_one_table_are_refused(images):
    table = write_jsonl(
        images, [{"path": "0.png", "label": ["a"]}, {"path": "1.png", "label": "a;b"}]
    )
    message = why(table, labels="multi")
    assert message == (
        "table.jsonl, row 2: the labels are text, but JSON lists in row 1; use one kind in all rows"
    )


def test_an_empty_list_of_labels_is_refused_but_a_row_of_zeros_is_not(images):
    table = write_jsonl(images, [{"path": "0.png", "label": []}])
    assert "row 1: the list of labels is empty" in why(table, labels="multi")
    cells = [(path, *(int(name in labels) for name in "ab")) for path, labels in rows()]
    cells = [(f"{n}.png", n % 2, int(n % 3 == 0)) for n in range(48)]
    source = open_data(write_csv(images, cells, ("path", "a", "b")), labels="multi")
    assert (source.labels.sum(axis=1) == 0).any()
    assert label_names(source, 2) == "none"


def test_a_class_with_no_positive_is_refused(images):
    cells = [(f"{n}.png", n % 2, 0) for n in range(48)]
    table = write_csv(images, cells, ("path", "a", "b"))
    assert "class 'b' of table has no training images" in why(table, labels="multi")


def test_a_class_column_holds_0_or_1(images):
    table = write_csv(images, [("0.png", 1, 0), ("1.png", 2, 0)], ("path", "a", "b"))
    assert "no column 'label'" in why(table, labels="multi") or "0 or 1" in why(
        table, labels="multi"
    )


def test_a_label_twice_in_a_row_is_refused(images):
    table = write_csv(images, [("0.png", "a;a")])
    assert "row 2: label 'a' occurs twice" in why(table, labels="multi")


def test_every_split_has_every_class_and_copies_stay_together(images):
    cells = [(path, ";".join(labels)) for path, labels in rows()]
    (images / "copy.png").write_bytes((images / "1.png").read_bytes())
    cells += [("copy.png", "cat;dog")]
    cells[5] = ("5.png", "cat;dog;rare")
    cells[9] = ("9.png", "cat;dog;rare")
    cells[13] = ("13.png", "cat;dog;rare")
    source = open_data(write_csv(images, cells), labels="multi")
    for split in ("train", "val", "test"):
        assert count_labels(source, np.flatnonzero(source.splits == split)).all()
    names = list(source.ids)
    assert source.splits[names.index("copy.png")] == source.splits[names.index("1.png")]


def test_a_class_too_small_to_be_split_is_refused(images):
    cells = [(path, ";".join(labels)) for path, labels in rows()]
    cells[5] = ("5.png", "cat;dog;rare")
    message = why(write_csv(images, cells), labels="multi")
    assert "class 'rare' has 1 different positive image; it needs at least 3" in message


def test_built_in_sets_and_balanced_sampling_have_one_label():
    assert why("digits", labels="multi") == "digits has one label per image; omit `data.labels`"
