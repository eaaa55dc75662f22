"""Tables of paths and labels, and every way a row can be wrong."""

import json
import os

import pytest

from tests.data.samples import encoded, write
from vitrail.data.config import Columns
from vitrail.data.open import open_data
from vitrail.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    for number in range(8):
        write(tmp_path / "x" / "images" / f"{number}.png", number)
    return tmp_path / "x"


ROWS = [(f"images/{number}.png", "dog" if number % 2 else "cat") for number in range(8)]


def table(folder, text, name="table.csv"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def csv(rows=ROWS, header="path,label", delimiter=","):
    return "\n".join([header.replace(",", delimiter), *(delimiter.join(row) for row in rows)])


def why(path, **settings):
    with pytest.raises(UserError) as error:
        open_data(path, **settings)
    return str(error.value)


def test_csv_tsv_and_jsonl_are_the_same_data(folder):
    lines = (json.dumps({"path": path, "label": label}) for path, label in ROWS)
    sources = [
        open_data(table(folder, csv())),
        open_data(table(folder, csv(delimiter="\t"), "table.tsv")),
        open_data(table(folder, "\n".join(lines), "table.jsonl")),
    ]
    for source in sources:
        assert (source.name, source.classes) == ("table", ("cat", "dog"))
        assert list(source.ids) == [path for path, _ in ROWS]
        assert source.labels.tolist() == [0, 1] * 4
        assert source.splits.tolist() == sources[0].splits.tolist()
        assert source[3].content == encoded(3)


def test_a_table_can_be_reached_through_dots(folder, monkeypatch):
    table(folder, csv())
    (folder / "deep").mkdir()
    monkeypatch.chdir(folder / "deep")
    assert len(open_data("../images/../table.csv")) == len(ROWS)


def test_the_split_column_is_followed_if_it_is_there(folder):
    splits = ["train"] * 4 + ["valid", "Validation", "test", "testing"]
    rows = [(*row, split) for row, split in zip(ROWS, splits, strict=True)]
    source = open_data(table(folder, csv(rows, "path,label,split")))
    assert source.splits.tolist() == ["train"] * 4 + ["val"] * 2 + ["test"] * 2


def test_columns_can_be_named(folder):
    rows = [("0", "train", label, path) for path, label in ROWS]
    path = table(folder, csv(rows, "id,fold,species,file"))
    source = open_data(
        path, columns=Columns(path="file", label="species", split="fold"), split=False
    )
    assert source.classes == ("cat", "dog")
    assert set(source.splits) == {"train"}


def test_other_columns_do_not_matter(folder):
    rows = [(*row, "x", "") for row in ROWS]
    assert len(open_data(table(folder, csv(rows, "path,label,comment,more")))) == 8


def test_byte_order_marks_quotes_and_blank_lines_are_read(folder):
    odd = folder / "images" / 'a "b", c\nd é.png'
    odd.write_bytes(encoded(50))
    cell = '"images/a ""b"", c\nd é.png"'
    text = "\ufeff" + csv() + f"\r\n\r\n{cell}, cat \r\n"
    source = open_data(table(folder, text))
    assert source.ids[8] == 'images/a "b", c\nd é.png'
    assert source.classes == ("cat", "dog")


def test_labels_of_a_table_may_be_class_indices(folder):
    rows = [(path, str(number)) for number, (path, _) in enumerate(ROWS)]
    names = [f"class {number}" for number in range(10)]
    source = open_data(table(folder, csv(rows)), classes=names, split=False)
    assert source.classes == tuple(names)
    assert source.labels.tolist() == list(range(8))
    assert set(source.splits) == {"test"}


def test_labels_of_jsonl_may_be_numbers(folder):
    lines = (json.dumps({"path": path, "label": len(label)}) for path, label in ROWS)
    assert open_data(table(folder, "\n".join(lines), "t.jsonl"), split=False).classes == ("3",)


def test_a_real_table_counts_the_thousand_classes(shared):
    names = json.loads((shared / "data" / "imagenet-classes.json").read_text())
    path = shared / "data" / "imagenet-val-300" / "labels.csv"
    source = open_data(path, classes=names, split=False)
    assert (len(source), len(source.classes)) == (300, 1000)
    assert source.classes[source[1].label] == "hammerhead"
    by_name = open_data(path, columns=Columns(label="wnid"), split=False)
    assert len(by_name.classes) == 300


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("images/9.png,cat", "row 10: images/9.png: no such file or directory"),
        ("images,cat", "row 10: images is not a regular file"),
        (",cat", "row 10: the path is missing"),
        ("images/0.png,", "row 10: images/0.png is already in row 2"),
        ("images/new.png,", "row 10: the label is missing"),
        ("images/new.png,  ", "row 10: the label is missing"),
        ("../outside.png,cat", "row 10: ../outside.png is outside the folder of the table"),
        ("images/../../outside.png,cat", "is outside the folder of the table"),
        ("/etc/passwd,cat", "row 10: /etc/passwd is outside the folder of the table"),
        ("images/leak.png,cat", "row 10: images/leak.png is a link to a file outside the folder"),
        (
            "images/away/1.png,cat",
            "row 10: images/away/1.png is a link to a file outside the folder",
        ),
        ("images/new.png", "row 10: 1 columns, but the header has 2"),
        ("images/new.png,cat,x", "row 10: 3 columns, but the header has 2"),
        ("images/n\0w.png,cat", "row 10: 'images/n\\x00w.png' is not a valid path"),
        ("images/pipe.png,cat", "row 10: images/pipe.png is not a regular file"),
    ],
)
def test_a_wrong_row_is_named(folder, tmp_path, row, words):
    write(folder / "images" / "new.png", 30)
    outside = write(tmp_path / "outside.png", 31)
    write(tmp_path / "elsewhere" / "1.png", 32)
    (folder / "images" / "leak.png").symlink_to(outside)
    (folder / "images" / "away").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / "images" / "pipe.png")
    assert words in why(table(folder, csv() + "\n" + row))


def test_paths_may_contain_dots_inside_the_folder(folder):
    rows = [(f"./images/../{path}", label) for path, label in ROWS[:4]]
    rows += [(str(folder / path), label) for path, label in ROWS[4:]]
    assert list(open_data(table(folder, csv(rows))).ids) == [path for path, _ in ROWS]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"path": "images/9.png"', "row 9: not valid JSON"),
        ("[1, 2]", "row 9: expected an object"),
        ('{"label": "cat"}', "row 9: the path is missing"),
        ('{"path": "images/new.png"}', "row 9: the label is missing"),
        ('{"path": "images/new.png", "label": null}', "row 9: the label is missing"),
        ('{"path": "images/new.png", "label": 1.5}', "row 9: label 1.5 is neither"),
        ('{"path": "images/new.png", "label": true}', "row 9: label True is neither"),
        ('{"path": 3, "label": "cat"}', "row 9: the path is missing"),
        (
            '{"path": "images/new.png", "label": "cat", "split": "dev"}',
            "row 9: split 'dev' is unknown",
        ),
        ("[" * 100_000, "row 9: not valid JSON"),
        ('{"path": "\\ud800.jpg", "label": "cat"}', r"row 9: '\ud800.jpg' is not a valid path"),
        ('{"path": "\\ud800/1.jpg", "label": "cat"}', r"row 9: '\ud800/1.jpg' is not a valid path"),
    ],
)
def test_a_wrong_line_of_json_is_named(folder, row, words):
    write(folder / "images" / "new.png", 30)
    lines = [json.dumps({"path": path, "label": label}) for path, label in ROWS]
    assert words in why(table(folder, "\n".join([*lines, row]), "t.jsonl"))


def test_a_split_in_some_rows_only_is_an_error(folder):
    rows = [(*row, "train" if number else "") for number, row in enumerate(ROWS)]
    found = why(table(folder, csv(rows, "path,label,split")))
    assert "row 2: the split is missing, but other rows have one" in found


def test_a_missing_column_is_named_with_those_there_are(folder):
    found = why(table(folder, csv(header="file,label")))
    assert "no column 'path' for the path; its columns are 'file', 'label'" in found
    assert "no column 'fold' for the split" in why(
        table(folder, csv()), columns=Columns(split="fold")
    )
    assert "more than one column 'label'" in why(
        table(folder, csv([(*row, "x") for row in ROWS], "path,label,label"))
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no column 'path'"),
        ("path,label\n", "has no rows"),
        (b"path,label\n\xff\xfe,cat", "is not UTF-8 text"),
        ('path,label\n"images/0.png,cat', "is not a valid table"),
        ("path,label\n" + "x" * 200_000 + ",cat", "is not a valid table"),
        ("path;label\nimages/0.png;cat", "its columns are 'path;label'"),
    ],
)
def test_an_invalid_table_is_an_error(folder, text, words):
    assert words in why(table(folder, text))


def test_a_partial_table_without_any_label_is_for_pretraining(folder):
    path = table(folder, csv([(name, "") for name, *_ in ROWS], "path,label"))
    assert "has a label; `vitrail pretrain` learns without them" in why(path, labels="partial")
    assert why(path).endswith("table.csv has a label; `vitrail pretrain` learns without them")
    path = table(folder, csv([(ROWS[0][0], ""), (ROWS[1][0], "cat")], "path,label"))
    assert "set `data.labels='partial'`" in why(path)


def test_the_row_of_an_unknown_label_is_named(folder):
    found = why(table(folder, csv()), classes=["cat", "cow"], split=False)
    assert "table.csv, row 3: label 'dog' is not one of the 2 classes" in found


def test_a_class_of_fewer_than_three_rows_is_an_error_for_training_only(folder):
    path = table(folder, csv(ROWS[:5]))
    assert "class 'dog' has 2 different images" in why(path)
    assert len(open_data(path, split=False)) == 5


def test_columns_are_for_tables_only(folder):
    assert "is not a table" in why(folder, columns=Columns(label="species"))


def test_a_missing_column_is_an_error_that_names_the_setting(folder):
    path = table(folder, csv(header="path,species"))
    assert why(path).endswith(
        "its columns are 'path', 'species': set `data.columns.label` to the right one"
    )


@pytest.mark.parametrize("wrong", [{"path": ""}, {"label": None}, {"split": 3}])
def test_a_column_name_must_be_a_string(wrong):
    with pytest.raises(UserError, match="give the name of a column"):
        Columns(**wrong)
