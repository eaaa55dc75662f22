"""The lists of named models and published weights from Python."""

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, fields

import pytest

import vitrail
from vitrail.zoo.models import ModelInfo, WeightsInfo
from vitrail.zoo.presets import PRESETS
from vitrail.zoo.weights import PUBLISHED


def test_every_preset_and_every_published_weight_is_listed():
    assert [info.name for info in vitrail.models()] == list(PRESETS)
    assert [info.name for info in vitrail.models(weights=True)] == [row.name for row in PUBLISHED]


def test_infos_have_the_keys_of_the_json():
    keys = ["name", "parameters", "gmacs", "tokens", "image", "patch"]
    assert [field.name for field in fields(ModelInfo)] == keys
    for info in (*vitrail.models(), *vitrail.models(weights=True)):
        assert isinstance(info, ModelInfo | WeightsInfo)
        assert json.loads(json.dumps(asdict(info)))["name"] == info.name


def test_infos_are_frozen():
    with pytest.raises(FrozenInstanceError):
        vitrail.models()[0].name = "another"  # type: ignore[misc]


def test_the_lists_do_not_import_torch():
    code = "import sys, vitrail; vitrail.models(weights=True); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
