"""Heads as files: they come back the same, and nothing unsafe comes with them."""

import io
import json
import zipfile

import numpy as np
import pytest
from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
from sklearn.ensemble import AdaBoostClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.naive_bayes import GaussianNB

from tests.heads.samples import head, rows
from vitrail.errors import UserError
from vitrail.heads import keep, kinds


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", kinds.KINDS)
def test_every_kind_says_the_same_from_its_file(name, classes):
    fitted = kinds.fit(name, *rows(60, classes=classes), "abc"[:classes])
    made = head(fitted.estimator, name, classes)
    back = keep.unpack(keep.pack(made), "file")
    x, _ = rows(20, classes=classes, seed=1)
    assert np.array_equal(back.scores(x), made.scores(x))
    assert (back.classes, back.features, back.weights) == (
        made.classes,
        made.features,
        made.weights,
    )


@pytest.mark.parametrize(
    "estimator", [GaussianNB(), RidgeClassifier(), QuadraticDiscriminantAnalysis()]
)
def test_some_more_classifiers_can_be_kept(estimator):
    made = head(estimator.fit(*rows()))
    assert np.isfinite(keep.unpack(keep.pack(made), "file").scores(rows(6)[0])).all()


def test_a_head_of_unknown_parts_is_not_kept():
    with pytest.raises(UserError, match=r"AdaBoostClassifier, which no one has audited"):
        keep.pack(head(AdaBoostClassifier(n_estimators=2).fit(*rows()), "boost"))


def changed(content, change):
    """The file with another schema."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == "schema.json":
                schema = json.loads(data)
                change(schema)
                data = json.dumps(schema).encode()
            new.writestr(name, data)
    return stream.getvalue()


@pytest.fixture(scope="module")
def content():
    return keep.pack(head(LogisticRegression().fit(*rows())))


def evil(schema):
    node = schema["content"]["estimator"]
    node["__module__"], node["__class__"] = "os", "system"


def calling(schema):
    schema["content"]["kind"] = {
        "__loader__": "FunctionNode",
        "__module__": "builtins",
        "__class__": "function",
        "content": {"module_path": "os", "function": "system"},
    }


@pytest.mark.parametrize("change", [evil, calling])
def test_anything_that_is_not_on_the_list_is_refused(content, change):
    with pytest.raises(UserError, match="not among the types that are safe to load"):
        keep.unpack(changed(content, change), "file")


@pytest.mark.parametrize("position", [0, 200, 500])
def test_a_damaged_file_is_told(content, position):
    broken = bytearray(content)
    broken[position] ^= 0xFF
    with pytest.raises(UserError, match="file is no readable head"):
        keep.unpack(bytes(broken), "file")


def test_half_a_file_is_told(content):
    with pytest.raises(UserError, match="makes it again"):
        keep.unpack(content[: len(content) // 2], "file")


def test_a_file_that_unpacks_to_very_much_is_refused(content, monkeypatch):
    monkeypatch.setattr(keep, "UNPACKED", 0)
    monkeypatch.setattr(keep, "SPARE", 100)
    with pytest.raises(UserError, match="would unpack to"):
        keep.unpack(content, "file")


def test_what_unpacks_to_very_much_is_not_unpacked_to_find_out(content, monkeypatch):
    monkeypatch.setattr(keep, "UNPACKED", 0)
    monkeypatch.setattr(keep, "SPARE", 100)
    monkeypatch.setattr(zipfile.ZipFile, "open", None)
    with pytest.raises(UserError, match="would unpack to"):
        keep.unpack(content, "file")


def test_a_head_that_would_unpack_to_very_much_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(keep, "UNPACKED", 0)
    monkeypatch.setattr(keep, "SPARE", 100)
    with pytest.raises(UserError, match=r"kind logistic cannot be kept: .* would unpack to"):
        keep.pack(head(LogisticRegression().fit(*rows())))


def test_what_is_mostly_zeros_is_read_however_small_it_packs():
    """A forest of many classes is: most of its leaves have seen few of them."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("schema.json", "{}")
        archive.writestr("values.npy", bytes(80_000_000))
    assert keep.strangers(stream.getvalue()) == []


def test_a_tree_that_points_outside_of_itself_is_refused():
    forest = RandomForestClassifier(2, random_state=0).fit(*rows())
    tree = forest.estimators_[1].tree_
    state = tree.__getstate__()
    for field, value in (("left_child", 10_000), ("right_child", 0), ("feature", 99)):
        nodes = state["nodes"].copy()
        nodes[field][0] = value
        tree.__setstate__({**state, "nodes": nodes})
        with pytest.raises(UserError, match="points outside of itself"):
            keep.unpack(keep.pack(head(forest)), "file")


def test_a_boosted_tree_that_points_outside_of_itself_is_refused():
    made = head(kinds.fit("boosting", *rows(), "abc").estimator, "boosting")
    predictor = made.estimator[-1]._predictors[0][0]
    predictor.nodes["left"][0] = 10_000
    with pytest.raises(UserError, match="points outside of itself"):
        keep.unpack(keep.pack(made), "file")


def test_a_support_vector_machine_whose_numbers_do_not_fit_is_refused():
    made = head(kinds.fit("rbf-svm", *rows(), "abc").estimator, "rbf-svm")
    made.estimator[-1]._n_support = made.estimator[-1]._n_support * 1000
    with pytest.raises(UserError, match="do not fit each other"):
        keep.unpack(keep.pack(made), "file")


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UserError, match=r"cannot read the head .*head\.skops: No such file"):
        keep.load(tmp_path)
    with pytest.raises(UserError, match="cannot read the head ~nobody-of-this-name/head"):
        keep.load("~nobody-of-this-name/head")
