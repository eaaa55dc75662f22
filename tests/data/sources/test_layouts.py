"""Layouts that people download: Hugging Face's metadata, Kaggle's tables, ImageNet's validation."""

import json
import sys

import numpy as np
import pytest

from tests.data.samples import class_folders, write
from vitrail.data.config import Columns
from vitrail.data.open import has_columns, open_data
from vitrail.data.sources.names import imagenet_wnids
from vitrail.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


def labels_by_id(source):
    return {
        name: source.classes[label] for name, label in zip(source.ids, source.labels, strict=True)
    }


def images(folder, count, start=0, suffix=".png"):
    for number in range(count):
        write(folder / f"{number}{suffix}", start + number)


def rows(count):
    return [(number, "cat" if number % 2 else "dog") for number in range(count)]


def test_metadata_of_an_image_folder_is_its_table(tmp_path):
    root = tmp_path / "pets"
    images(root, 8)
    lines = [json.dumps({"file_name": f"{n}.png", "label": label}) for n, label in rows(8)]
    (root / "metadata.jsonl").write_text("\n".join(lines))
    source = open_data(root)
    assert (source.name, source.path, source.classes) == ("pets", root, ("cat", "dog"))
    assert labels_by_id(source) == {f"{n}.png": label for n, label in rows(8)}


def test_metadata_in_each_split_gives_the_splits(tmp_path):
    for number, split in enumerate(("train", "test")):
        images(tmp_path / "x" / split, 8, start=10 * number)
        text = "\n".join(f"{n}.png,{label}" for n, label in rows(8))
        (tmp_path / "x" / split / "metadata.csv").write_text(f"file_name,label\n{text}\n")
    source = open_data(tmp_path / "x")
    given = {
        name.partition("/")[0]: split for name, split in zip(source.ids, source.splits, strict=True)
    }
    assert given["test"] == "test" and set(source.splits) == {"train", "val", "test"}
    assert sum(source.splits == "test") == 8


def test_metadata_above_the_splits_takes_them_from_the_folders(tmp_path):
    for number, split in enumerate(("train", "validation", "test")):
        images(tmp_path / "x" / split, 4, start=10 * number)
    text = "".join(
        f"{split}/{n}.png,{label}\n"
        for split in ("train", "validation", "test")
        for n, label in rows(4)
    )
    (tmp_path / "x" / "metadata.csv").write_text(f"file_name,label\n{text}")
    source = open_data(tmp_path / "x")
    assert list(source.splits) == ["train"] * 4 + ["val"] * 4 + ["test"] * 4


def test_metadata_without_labels_leaves_class_folders_as_they_are(tmp_path):
    root = class_folders(tmp_path / "x", {"cat": 4, "dog": 4})
    (root / "metadata.csv").write_text("file_name,photographer\ncat/0.png,me\n")
    assert open_data(root).classes == ("cat", "dog")
    images(tmp_path / "flat", 4)
    (tmp_path / "flat" / "metadata.csv").write_text("file_name,photographer\n0.png,me\n")
    with pytest.raises(UserError, match=r"no column 'label' .*set `data.columns.label`"):
        open_data(tmp_path / "flat")


def test_two_metadata_files_are_refused(tmp_path):
    images(tmp_path / "x", 4)
    for name in ("metadata.csv", "metadata.jsonl"):
        (tmp_path / "x" / name).write_text("file_name,label\n")
    with pytest.raises(UserError, match=r"both metadata.csv and metadata.jsonl exist"):
        open_data(tmp_path / "x")


@pytest.mark.parametrize(
    "column, ending, folder",
    [("id", "", "train"), ("image_id", ".png", "train"), ("Image", "", "")],
)
def test_a_table_of_kaggle_finds_its_images(tmp_path, column, ending, folder):
    root = tmp_path / "leaves"
    images(root / "train", 8)
    images(root / "test", 3, start=50)  # without labels
    text = "".join(f"{n}{ending},{label}\n" for n, label in rows(8))
    (root / "train.csv").write_text(f"{column},label\n{text}")
    source = open_data(root if folder else root / "train.csv")
    assert labels_by_id(source) == {f"train/{n}.png": label for n, label in rows(8)}


def test_the_columns_of_a_table_in_a_folder_can_be_named(tmp_path):
    root = tmp_path / "dogs"
    images(root / "train", 8)
    text = "".join(f"{n},{label}\n" for n, label in rows(8))
    (root / "train.csv").write_text(f"id,breed\n{text}")
    with pytest.raises(UserError, match=r"no column 'label'.*'id', 'breed'"):
        open_data(root)
    assert open_data(root, columns={"label": "breed"}).classes == ("cat", "dog")
    assert has_columns(root, Columns(label="breed"))
    plain = class_folders(tmp_path / "plain", {"a": 3, "b": 3})
    assert not has_columns(plain, Columns(label="breed"))
    with pytest.raises(UserError, match=r"is not a table; omit `data.columns`"):
        open_data(plain, columns={"label": "breed"})


def test_an_id_with_two_images_is_refused(tmp_path):
    root = tmp_path / "x"
    images(root / "train", 4)
    write(root / "train" / "2.jpg", 9)
    (root / "train.csv").write_text("id,label\n" + "".join(f"{n},{c}\n" for n, c in rows(4)))
    with pytest.raises(UserError, match=r"row 4: 2 is train/2.jpg and train/2.png; write the ext"):
        open_data(root)


def test_a_missing_image_of_a_table_is_named(tmp_path):
    images(tmp_path / "x" / "train", 4)
    (tmp_path / "x" / "train.csv").write_text("id,label\n0,a\n7,b\n")
    with pytest.raises(UserError, match=r"train.csv, row 3: 7: no such file"):
        open_data(tmp_path / "x")


WNIDS = ("n01440764", "n01443537", "n01440764")  # of the validation images 1, 2 and 3


@pytest.fixture
def validation(tmp_path):
    for number in (1, 2, 3):
        write(tmp_path / "in" / "val" / f"ILSVRC2012_val_{number:08d}.JPEG", number)
    return tmp_path / "in"


@pytest.mark.parametrize(
    "name, lines",
    [
        ("imagenet_2012_validation_synset_labels.txt", WNIDS),
        ("val.txt", [f"ILSVRC2012_val_{n:08d}.JPEG {n % 2 == 0:d}" for n in (3, 1, 2)]),
        (
            "LOC_val_solution.csv",
            ["ImageId,PredictionString"]
            + [f"ILSVRC2012_val_{n:08d},{WNIDS[n - 1]} 1 2 3 4 " for n in (2, 1, 3)],
        ),
    ],
)
def test_validation_images_of_imagenet_have_the_classes_of_the_ground_truth(
    validation, name, lines
):
    (validation / name).write_text("\n".join(lines) + "\n")
    names = [f"class {number}" for number in range(1000)]
    source = open_data(validation, classes=names, split=False)
    assert list(source.labels) == [0, 1, 0] and source.classes == tuple(names)
    assert open_data(validation, split=False).classes == ("n01440764", "n01443537")


def test_numbers_of_the_devkit_need_its_meta_file(validation):
    io = pytest.importorskip("scipy.io", reason="needs vitrail[heads]")
    folder = validation / "ILSVRC2012_devkit_t12" / "data"
    folder.mkdir(parents=True)
    (folder / "ILSVRC2012_validation_ground_truth.txt").write_text("1000\n999\n1000\n")
    with pytest.raises(UserError, match=r"an order that only the devkit's meta.mat knows"):
        open_data(validation, split=False)
    kinds = [("ILSVRC2012_ID", object), ("WNID", object)]
    order = [*reversed(imagenet_wnids()), "n00000001"]  # inner nodes follow the thousand classes
    synsets = np.array(list(enumerate(order, 1)), kinds)
    io.savemat(folder / "meta.mat", {"synsets": synsets})
    source = open_data(validation, split=False)
    assert [source.classes[label] for label in source.labels] == list(WNIDS)
    io.savemat(folder / "meta.mat", {"synsets": synsets[:5]})
    with pytest.raises(UserError, match="does not list the 1000 classes"):
        open_data(validation, split=False)


@pytest.mark.parametrize(
    "lines, message",
    [
        (WNIDS[:2], "has no class for val/ILSVRC2012_val_00000003.JPEG"),
        (["n01440764", "tench", "x"], "is not a ground truth of ImageNet"),
        ([f"ILSVRC2012_val_{n:08d}.JPEG 1000" for n in (1, 2, 3)], "'1000' is not a class from 0"),
    ],
)
def test_a_wrong_ground_truth_is_refused(validation, lines, message):
    (validation / "val.txt").write_text("\n".join(lines))
    with pytest.raises(UserError, match=message):
        open_data(validation, split=False)


def test_a_data_set_of_the_hub_without_pyarrow_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        UserError, match=r"need the package pyarrow; pip install 'vitrail\[parquet\]'"
    ):
        open_data("hf:owner/name")
