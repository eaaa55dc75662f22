"""Heads as files: they give the same logits, and nothing unsafe is loaded."""

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
from vitrail.heads import file as head_file
from vitrail.heads.fit import fit_kind
from vitrail.heads.kinds import KINDS


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_same_logits_from_its_file(name, classes):
    fitted = fit_kind(name, *rows(60, classes=classes), "abc"[:classes])
    made = head(fitted.estimator, name, classes)
    back = head_file.deserialise_head(head_file.serialise_head(made), "file")
    x, _ = rows(20, classes=classes, seed=1)
    assert np.array_equal(back.logits(x), made.logits(x))
    assert (back.classes, back.features, back.weights_hash) == (
        made.classes,
        made.features,
        made.weights_hash,
    )


@pytest.mark.parametrize(
    "estimator", [GaussianNB(), RidgeClassifier(), QuadraticDiscriminantAnalysis()]
)
def test_other_classifiers_can_be_saved(estimator):
    made = head(estimator.fit(*rows()))
    assert np.isfinite(
        head_file.deserialise_head(head_file.serialise_head(made), "file").logits(rows(6)[0])
    ).all()


def test_a_head_of_unaudited_types_is_not_saved():
    with pytest.raises(
        UserError, match=r"AdaBoostClassifier, which is not among the audited types"
    ):
        head_file.serialise_head(head(AdaBoostClassifier(n_estimators=2).fit(*rows()), "boost"))


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
    return head_file.serialise_head(head(LogisticRegression().fit(*rows())))


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
def test_types_that_are_not_allowed_are_refused(content, change):
    with pytest.raises(UserError, match="not among the types that are safe to load"):
        head_file.deserialise_head(changed(content, change), "file")


@pytest.mark.parametrize("position", [0, 200, 500])
def test_a_damaged_file_is_an_error(content, position):
    broken = bytearray(content)
    broken[position] ^= 0xFF
    with pytest.raises(UserError, match="file is not a readable head"):
        head_file.deserialise_head(bytes(broken), "file")


def test_a_truncated_file_is_an_error(content):
    with pytest.raises(UserError, match="create it again"):
        head_file.deserialise_head(content[: len(content) // 2], "file")


def test_a_decompression_bomb_is_refused(content, monkeypatch):
    monkeypatch.setattr(head_file, "MAX_RATIO", 0)
    monkeypatch.setattr(head_file, "ALLOWANCE", 100)
    with pytest.raises(UserError, match="would decompress to"):
        head_file.deserialise_head(content, "file")


def test_a_decompression_bomb_is_not_decompressed(content, monkeypatch):
    monkeypatch.setattr(head_file, "MAX_RATIO", 0)
    monkeypatch.setattr(head_file, "ALLOWANCE", 100)
    monkeypatch.setattr(zipfile.ZipFile, "open", None)
    with pytest.raises(UserError, match="would decompress to"):
        head_file.deserialise_head(content, "file")


def test_a_head_that_is_too_large_is_not_saved(monkeypatch):
    monkeypatch.setattr(head_file, "MAX_RATIO", 0)
    monkeypatch.setattr(head_file, "ALLOWANCE", 100)
    with pytest.raises(UserError, match=r"kind logistic cannot be saved: .* would decompress to"):
        head_file.serialise_head(head(LogisticRegression().fit(*rows())))


def test_a_file_of_mostly_zeros_is_read():
    """As in a forest of many classes: most leaves have images of a few classes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("schema.json", "{}")
        archive.writestr("values.npy", bytes(80_000_000))
    assert head_file.find_untrusted_types(stream.getvalue()) == []


def test_a_tree_with_an_index_out_of_range_is_refused():
    forest = RandomForestClassifier(2, random_state=0).fit(*rows())
    tree = forest.estimators_[1].tree_
    state = tree.__getstate__()
    for field, value in (("left_child", 10_000), ("right_child", 0), ("feature", 99)):
        nodes = state["nodes"].copy()
        nodes[field][0] = value
        tree.__setstate__({**state, "nodes": nodes})
        with pytest.raises(UserError, match="has an index out of range"):
            head_file.deserialise_head(head_file.serialise_head(head(forest)), "file")


def test_a_boosted_tree_with_an_index_out_of_range_is_refused():
    made = head(fit_kind("boosting", *rows(), "abc").estimator, "boosting")
    predictor = made.estimator[-1]._predictors[0][0]
    predictor.nodes["left"][0] = 10_000
    with pytest.raises(UserError, match="has an index out of range"):
        head_file.deserialise_head(head_file.serialise_head(made), "file")


def test_a_support_vector_machine_with_inconsistent_shapes_is_refused():
    made = head(fit_kind("rbf-svm", *rows(), "abc").estimator, "rbf-svm")
    made.estimator[-1]._n_support = made.estimator[-1]._n_support * 1000
    with pytest.raises(UserError, match="inconsistent shapes"):
        head_file.deserialise_head(head_file.serialise_head(made), "file")


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"cannot read the head .*head\.skops: No such file"):
        head_file.read_head_file(tmp_path)
    with pytest.raises(UserError, match="cannot read the head ~nobody-of-this-name/head"):
        head_file.read_head_file("~nobody-of-this-name/head")
