"""The metadata of model files: whatever a damaged or hostile file holds, one line says so."""

import json

import pytest
from safetensors.torch import save_file

import vitrail
from vitrail.data.config import Preprocess
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.zoo.file import load_model
from vitrail.zoo.load import load_weights
from vitrail.zoo.metadata import METADATA_KEY, parse_metadata

VIT = {"image": 8, "patch": 4, "width": 8, "depth": 1, "heads": 1, "classes": 2, "channels": 1}
PREPROCESS = {"size": 8, "channels": 1, "mean": [0.5], "std": [0.5]}
GOOD = {"classes": ["a", "b"], "preprocess": PREPROCESS, "temperature": 1.5}


def write(path, changes):
    """A model file whose metadata has some entries replaced."""
    model = ViT(ViTConfig(**VIT))
    document = {"format": 1, "vit": vars(model.config), **GOOD, **changes}
    text = document if isinstance(document, str) else json.dumps(document)
    save_file(model.state_dict(), path, {METADATA_KEY: text})
    return path


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


WRONG = {
    "preprocess is a string": {"preprocess": "half"},
    "preprocess is a list": {"preprocess": [1, 2]},
    "mean of strings": {"preprocess": {**PREPROCESS, "mean": ["a"]}},
    "mean is one number": {"preprocess": {**PREPROCESS, "mean": 0.5}},
    "std is null": {"preprocess": {**PREPROCESS, "std": None}},
    "std is NaN": {"preprocess": {**PREPROCESS, "std": [float("nan")]}},
    "crop is a string": {"preprocess": {**PREPROCESS, "crop": "0.9"}},
    "size is an object": {"preprocess": {**PREPROCESS, "size": {}}},
    "size of three": {"preprocess": {**PREPROCESS, "size": [8, 8, 8]}},
    "huge size": {"preprocess": {**PREPROCESS, "size": 10**39}},
    "unknown preprocessing": {"preprocess": {**PREPROCESS, "gamma": 2}},
    "temperature is a string": {"temperature": "1.5"},
    "temperature is a list": {"temperature": [1.5]},
    "temperature is true": {"temperature": True},
    "temperature is negative": {"temperature": -1},
    "temperature is too large": {"temperature": 10**400},
    "classes is a string": {"classes": "ab"},
    "classes of numbers": {"classes": [1, 2]},
    "half a character": {"classes": ["a", "\ud800"]},
    "data is a list": {"data": []},
    "source is a number": {"data": {"source": 5}},
    "columns of numbers": {"data": {"columns": {"label": 3}}},
    "best is a string": {"best": "yes"},
    "best is incomplete": {"best": {"val_loss": 1.0}},
    "name is a list": {"name": ["Nano/4"]},
    "environment is a number": {"environment": 7},
    "vit is a list": {"vit": []},
    "vit is null": {"vit": None},
    "width is a string": {"vit": {**VIT, "width": "8"}},
    "width is true": {"vit": {**VIT, "width": True}},
    "image of floats": {"vit": {**VIT, "image": [8.0, 8.0]}},
    "huge width": {"vit": {**VIT, "width": 10**39}},
    "huge mlp_ratio": {"vit": {**VIT, "mlp_ratio": 1e300}},
    "unknown setting": {"vit": {**VIT, "gates": 2}},
    "deep nesting": {"extra": nested(200)},
    "another format": {"format": 2},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_metadata_of_wrong_types_is_one_line(tmp_path, changes):
    path = write(tmp_path / "model.safetensors", changes)
    for load in (vitrail.load, load_weights, load_model):
        with pytest.raises(UserError) as caught:
            load(path)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("depth", [70, 100_000])
def test_deeply_nested_json_is_one_line(depth):
    with pytest.raises(UserError, match="nested deeper than 64"):
        parse_metadata("[" * depth + "]" * depth, "a file")


def test_the_error_names_the_entry_and_what_was_wanted(tmp_path):
    path = write(tmp_path / "model.safetensors", {"preprocess": {**PREPROCESS, "mean": ["a"]}})
    with pytest.raises(UserError, match=r"preprocess.mean is \['a'\]; wanted a list of numbers"):
        vitrail.load(path)


def test_metadata_keeps_the_keys_of_other_versions(tmp_path):
    loaded = load_weights(write(tmp_path / "model.safetensors", {"colour": "blue"}))
    assert loaded.metadata.document["colour"] == "blue"
    changed = loaded.metadata.drop("temperature")
    assert changed.temperature is None and changed.document["colour"] == "blue"


def test_metadata_decodes_to_settings(tmp_path):
    _, metadata = load_model(write(tmp_path / "model.safetensors", {"data": {"name": "x"}}))
    assert metadata.vit == ViTConfig(**VIT)
    assert metadata.preprocess == Preprocess(size=8, channels=1)
    assert (metadata.classes, metadata.temperature) == (("a", "b"), 1.5)
    assert metadata.data.name == "x" and metadata.data.fingerprint is None


def test_a_shard_index_with_half_a_character_is_one_line(tmp_path):
    index = {"weight_map": {"head.weight": "\ud800.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="half a character"):
        vitrail.load(tmp_path)
