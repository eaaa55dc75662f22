"""The list of built-in data sets."""

import json
from dataclasses import FrozenInstanceError

import pytest

from vitrail.data.sources.catalogue import DATASETS, datasets

KEYS = ["name", "classes", "train", "test", "image", "channels", "present", "verified"]


def test_every_data_set_is_listed_with_its_keys():
    listed = datasets()
    assert [info.name for info in listed] == list(DATASETS)
    assert all(list(info.to_dict()) == KEYS for info in listed)
    json.dumps([info.to_dict() for info in listed])


def test_digits_are_always_present():
    digits = datasets()[0]
    assert digits.name == "digits" and digits.present and digits.verified
    assert (digits.classes, digits.image, digits.channels) == (10, 8, 1)
    assert "name='digits'" in repr(digits)


def test_an_entry_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        datasets()[0].name = "other"
