"""`vitrail convert` and `vitrail models --weights` from outside."""

import json
import subprocess
import sys

import pytest
import torch

from tests.cli.conftest import call
from tests.zoo import samples
from vitrail.zoo.load import load_weights


def vitrail(*arguments):
    command = [sys.executable, "-m", "vitrail", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


FLAGS = ["--vit.heads", "3", "--vit.image", "24", "30", "--preprocess", "imagenet"]


def test_convert_prints_the_promised_keys_and_writes_what_loads(tmp_path, capsys):
    torch.save(samples.tensors("timm-cls"), tmp_path / "in.pth")
    target = ("--to", "timm", "--out", tmp_path / "out")
    _, out, err = call(capsys, "convert", tmp_path / "in.pth", *target, *FLAGS, "--json")
    document = json.loads(out)
    keys = ["source", "target", "format", "loaded", "resized", "adapted", "left_out", "assumed"]
    assert list(document) == keys
    assert (document["loaded"], document["target"]) == (
        len(samples.tensors("timm-cls")),
        str(tmp_path / "out"),
    )
    samples.equal(load_weights(tmp_path / "out").model, "timm-cls")
    assert "heads 3: as requested" in err


def test_changes_to_the_weights_are_printed(tmp_path, capsys):
    torch.save(samples.tensors("timm-cls"), tmp_path / "in.pth")
    more = ["--vit.classes", "4", "--vit.depth", "1"]
    target = ["--to", "vitrail", "--out", tmp_path / "out.safetensors"]
    code, out, _ = call(capsys, "convert", tmp_path / "in.pth", *target, *FLAGS, *more)
    assert "adapted: classes 7 -> classes 4" in out
    assert "adapted: depth 2 -> 1" in out
    assert code == 0


@pytest.mark.slow
def test_a_hostile_file_is_one_line_and_exit_code_one(tmp_path):
    (tmp_path / "bad.pth").write_bytes(b"\x80\x02cos\nsystem\n.")
    done = vitrail("convert", tmp_path / "bad.pth", "--to", "timm", "--out", tmp_path / "out")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_the_table_of_weights_has_the_promised_keys_without_torch():
    code = (
        "import sys\nfrom vitrail.cli.main import run\nrun(['models', '--weights', '--json'])\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    keys = {"name", "hub", "architecture", "preprocess", "parameters", "accuracy", "source"}
    assert all(keys < set(row) and row["licence"] for row in rows)


def test_the_table_of_weights_prints_whole_names(capsys):
    _, out, _ = call(capsys, "models", "--weights")
    assert "hf:timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k" in out
    assert "75.5%" in out
