"""PackedNames sort as people expect, survive any spelling, and labels find the right class."""

import json
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.sources.names import (
    PackedNames,
    make_unique,
    match_labels,
    natural_key,
    normalise_name,
)
from vitrail.errors import UserError


def test_numbers_in_names_sort_by_value():
    names = ["img10", "img2", "IMG1", "img02b", "10", "9", "a", "B", "²"]
    shuffled = random.Random(1).sample(names, len(names))
    expected = ["9", "10", "a", "B", "IMG1", "img2", "img02b", "img10", "²"]
    assert sorted(shuffled, key=natural_key) == expected


@given(st.lists(st.text(), unique=True))
def test_natural_order_is_a_total_order(names):
    assert sorted(names, key=natural_key) == sorted(reversed(names), key=natural_key)


def test_a_number_may_have_thousands_of_digits():
    assert natural_key("9" * 6000) < natural_key("1" + "0" * 6000)


def test_packed_names_come_back_whatever_they_hold():
    texts = ["a", "", "line\nbreak", "é", "e\u0301", "\udce9 no utf-8", "x" * 1000]
    names = PackedNames(texts)
    assert list(names) == texts
    assert [names[number] for number in range(len(names))] == texts
    assert names[-1] == texts[-1] and names[1:3] == texts[1:3]
    assert names == pickle.loads(pickle.dumps(names))
    with pytest.raises(IndexError):
        names[len(texts)]


def test_accents_have_one_spelling():
    assert normalise_name(" e\u0301te\u0301 ") == "été"


def test_repeated_class_names_get_their_index():
    assert make_unique(["crane", "dog", "crane"]) == ("crane 0", "dog", "crane 2")


def test_a_name_that_repeats_after_that_is_an_error():
    with pytest.raises(UserError, match="two classes are called 'crane 0'"):
        make_unique(["crane", "crane 0", "crane"])


def test_imagenet_has_two_cranes(shared):
    names = make_unique(json.loads((shared / "data" / "imagenet-classes.json").read_text()))
    assert len(set(names)) == 1000
    assert [name for name in names if name.startswith("crane")] == ["crane 134", "crane 517"]


def test_labels_without_classes_are_the_classes():
    names, index = match_labels({"10": "", "9": "", "b": ""}, None)
    assert names == ("9", "10", "b")
    assert index == {"9": 0, "10": 1, "b": 2}


def test_labels_match_names_before_indices():
    assert match_labels({"2": "", "1": ""}, ["1", "2"])[1] == {"1": 0, "2": 1}
    assert match_labels({"2": "", "0": ""}, ["cat", "dog", "fox"])[1] == {"0": 0, "2": 2}


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["3", "0"], "row 0: label 3, but the indices of the 3 classes are 0 to 2"),
        (["cat", "1"], "row 1: label '1' is not one of the 3 classes"),
        (["dgo"], "row 0: label 'dgo' is not one of the 3 classes; the nearest is 'dog'"),
        (["-1"], "label '-1' is not one"),
    ],
)
def test_an_unmatched_label_is_an_error_that_says_where(labels, words):
    with pytest.raises(UserError, match=words):
        match_labels(
            {label: f"row {row}" for row, label in enumerate(labels)}, ["cat", "dog", "fox"]
        )


def test_an_ambiguous_name_matches_nothing():
    with pytest.raises(UserError, match="'crane' is not one of the 2 classes"):
        match_labels({"crane": "row 2"}, ["crane", "crane"])
