"""Data sets of the hub, served by a local server: parquet in, labelled images out, no code run."""

import json

import pytest

from tests.data.samples import encoded
from tests.local_hub import DatasetHub, run_hub, use_hub
from vitrail.data.open import open_data, resolve_data
from vitrail.errors import UserError

pyarrow = pytest.importorskip("pyarrow", reason="needs vitrail[parquet]")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs vitrail[parquet]")
constants = pytest.importorskip("huggingface_hub.constants", reason="needs vitrail[parquet]")

NAME = "owner/pets"
FEATURES = {"img": {"_type": "Image"}, "kind": {"names": ["cat", "dog"], "_type": "ClassLabel"}}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    (tmp_path / "remote").mkdir()
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VITRAIL_DATA", raising=False)
    with run_hub(DatasetHub, tmp_path / "remote", NAME) as server:
        yield use_hub(monkeypatch, server, tmp_path / "hub")


def save(hub, name, columns, features=None):
    table = pyarrow.table(columns)
    if features is not None:
        stored = json.dumps({"info": {"features": features}}).encode()
        table = table.replace_schema_metadata({b"huggingface": stored})
    (hub.folder / name).parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, hub.folder / name)


def images(count, start=0):
    return [{"bytes": encoded(start + n), "path": f"{n}.png"} for n in range(count)]


def pets(hub):
    for number, split in enumerate(("train", "test")):
        columns = {"img": images(8, 10 * number), "kind": [n % 2 for n in range(8)]}
        save(hub, f"data/{split}-00000-of-00001.parquet", columns, FEATURES)


def why(name=f"hf:{NAME}", **more):
    with pytest.raises(UserError) as caught:
        open_data(name, **more)
    return str(caught.value)


def test_a_data_set_of_the_hub_has_its_splits_and_class_names(hub):
    pets(hub)
    source = open_data(f"hf:{NAME}")
    assert (source.name, source.classes, len(source)) == ("pets", ("cat", "dog"), 16)
    assert set(source.splits) == {"train", "val", "test"} and sum(source.splits == "test") == 8
    contents = {source[n].content: source.labels[n] for n in range(16)}
    assert contents == {encoded(s + n): n % 2 for s in (0, 10) for n in range(8)}
    assert resolve_data(f"hf:{NAME}") == f"hf:{NAME}"


def test_it_is_downloaded_once(hub, monkeypatch):
    pets(hub)
    first = open_data(f"hf:{NAME}")
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert list(open_data(f"hf:{NAME}").ids) == list(first.ids)
    assert hub.requests == []
    assert "HF_HUB_OFFLINE is set" in why("hf:owner/other")


def test_labels_may_be_names_and_columns_may_be_named(hub):
    columns = {"scan": images(8), "photo": images(8), "species": ["a", "b"] * 4}
    save(hub, "all.parquet", columns)
    assert "has 2 columns of images; its columns are 'scan', 'photo', 'species'" in why()
    assert "no column 'label'" in why(columns={"path": "scan"})
    source = open_data(f"hf:{NAME}", columns={"path": "scan", "label": "species"})
    assert source.classes == ("a", "b") and len(source) == 8


def test_a_test_set_without_labels_is_left_out(hub, caplog):
    pets(hub)
    columns = {"img": images(8, 10), "kind": [-1] * 8}
    save(hub, "data/test-00000-of-00001.parquet", columns, FEATURES)
    assert len(open_data(f"hf:{NAME}")) == 8
    assert "test-00000-of-00001.parquet has no labels" in caplog.text


def test_one_of_several_configurations_is_asked_for(hub):
    for name in ("small", "large"):
        columns = {"img": images(8), "kind": [n % 2 for n in range(8)]}
        save(hub, f"{name}/train-00000-of-00001.parquet", columns, FEATURES)
    assert "several configurations, large, small: write hf:owner/pets/large" in why()
    assert "has no 'tiny'; it has large, small" in why(f"hf:{NAME}/tiny")
    assert len(open_data(f"hf:{NAME}/small")) == 8


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"text": ["a", "b"], "label": [0, 1]}, "has no column of images; its columns are 'text'"),
        (
            {"image": images(2), "label": [[0], [0, 1]]},
            "column 'label' has a list of labels for each image; set `data.labels='multi'`, or set "
            "`data.columns.label` to a column of single labels",
        ),
        ({"image": images(2), "label": ["a;b", "a"]}, "contains ';'; if it lists several labels"),
        ({"image": images(2), "label": [0, None]}, "row 1: the label is missing"),
        ({"image": [{"bytes": None, "path": "x.png"}], "label": [0]}, "is not an encoded image"),
        ({"image": images(2), "label": [0.5, 1.0]}, "is neither a string nor an integer"),
    ],
)
def test_a_parquet_file_that_does_not_fit_is_one_line(hub, columns, message):
    save(hub, "train.parquet", columns)
    line = why()
    assert message in line and "\n" not in line
    assert message in why()  # nothing half-finished is left


def test_what_the_hub_does_not_have_is_one_line(hub):
    assert "the hub has no hf:owner/absent" in why("hf:owner/absent")
    assert "is not a data set of the hub; write hf:owner/name" in why("hf:pets")
    assert f"hf:{NAME} has no parquet files" in why()
    (hub.folder / "train.parquet").write_bytes(b"PAR1 but not really PAR1")
    assert "train.parquet cannot be read" in why()


NAMED = {"names": ["cat", "dog", "owl"], "_type": "ClassLabel"}
LISTS = [[0, 1], [1], [2, 2, 0], [0, 1, 2]]


@pytest.mark.parametrize(
    "feature",
    [{"feature": NAMED, "_type": "Sequence"}, {"feature": NAMED, "_type": "List"}, [NAMED]],
)
def test_lists_of_class_labels_are_several_labels(hub, feature):
    columns = {"img": images(24), "kinds": [LISTS[n % 4] for n in range(24)]}
    save(hub, "train.parquet", columns, {"img": {"_type": "Image"}, "kinds": feature})
    source = open_data(f"hf:{NAME}", labels="multi")
    assert source.classes == ("cat", "dog", "owl") and set(source.splits) == {
        "train",
        "val",
        "test",
    }
    expected = [[1, 1, 0], [0, 1, 0], [1, 0, 1], [1, 1, 1]]
    found = {source[n].content: source[n].label.tolist() for n in range(24)}
    assert found == {encoded(n): expected[n % 4] for n in range(24)}
    assert "has a list of labels for each image; set `data.labels='multi'`" in why()
    assert len(open_data(f"hf:{NAME}", labels="none").classes) == 1


def test_lists_of_names_and_separated_names_are_several_labels(hub):
    named = [["cat", "dog"], ["dog"], ["cat"], ["dog", "cat"]] * 6
    columns = {"image": images(24), "label": named, "text": [";".join(row) for row in named]}
    save(hub, "train.parquet", {**columns, "one": [0, 1] * 12})
    lists = open_data(f"hf:{NAME}", labels="multi")
    texts = open_data(f"hf:{NAME}", labels="multi", columns={"label": "text"})
    assert lists.classes == texts.classes == ("cat", "dog")
    assert lists.labels.tolist() == texts.labels.tolist()
    assert lists.labels[:2].tolist() == [[1, 1], [0, 1]]
    line = why(labels="multi", columns={"label": "one"})
    assert "column 'one' has one label for each image; omit `data.labels`" in line


def test_an_empty_list_of_labels_on_the_hub_is_named(hub):
    columns = {"image": images(8), "label": [["a"], ["a", "b"], [], ["b"]] * 2}
    save(hub, "train.parquet", columns)
    assert "train-00000.tar:00000002: the list of labels is empty" in why(labels="multi")
