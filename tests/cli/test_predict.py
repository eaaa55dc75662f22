"""`predict` on names that cannot be read, are not UTF-8, or contain no image."""

import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.cli.conftest import call

LATIN = os.fsdecode("caf\xe9.png".encode("latin-1"))  # no UTF-8
LONG = "x" * 300 + ".png"


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.png"
    Image.fromarray(np.full((8, 8), 200, np.uint8)).save(path)
    return path


def vitrail(*arguments, **how):
    """A process of its own, whose streams are as strict as most people's."""
    command = [sys.executable, "-m", "vitrail", *map(str, arguments)]
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    return subprocess.run(command, env=strict, capture_output=True, timeout=120, check=False, **how)


def told(capsys, *arguments):
    """The exit code, and the error of each path, or None."""
    code, out, _ = call(capsys, "predict", *arguments, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    return code, {line["path"]: line.get("error") for line in lines}


def test_a_name_that_is_too_long_is_reported_and_the_others_are_predicted(capsys, folder, good):
    code, errors = told(capsys, folder, LONG, good)
    assert code == 1 and errors[str(good)] is None
    assert "name too long" in errors[LONG]


def test_logits_that_are_not_finite_are_reported(capsys, folder, good, tmp_path):
    from vitrail.zoo.file import load_model, save_model

    model, metadata = load_model(folder / "model.safetensors")
    model.head.bias.data[0] = float("nan")
    metadata = {key: metadata.document[key] for key in ("classes", "preprocess")}
    save_model(tmp_path / "nan.safetensors", model, metadata)
    code, errors = told(capsys, tmp_path / "nan.safetensors", good)
    assert code == 1
    assert errors == {str(good): "the model returns NaN or infinity; its weights are damaged"}


def test_an_empty_folder_is_reported_and_the_others_are_predicted(capsys, folder, good, tmp_path):
    (tmp_path / "empty").mkdir()
    code, errors = told(capsys, folder, tmp_path / "empty", good)
    assert code == 1 and errors[str(good)] is None
    assert errors[str(tmp_path / "empty")] == "this folder contains no images"


def test_unreadable_folders_are_reported_and_the_others_are_predicted(
    capsys, folder, good, tmp_path, monkeypatch
):
    hidden = tmp_path / "album" / "hidden"
    hidden.mkdir(parents=True)
    good.rename(tmp_path / "album" / "good.png")
    scandir = os.scandir

    def refusing(path):
        if os.fspath(path) == str(hidden):
            raise PermissionError(13, "Permission denied", str(hidden))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)  # a superuser may read everything
    code, errors = told(capsys, folder, tmp_path / "album")
    assert code == 1 and errors[str(tmp_path / "album" / "good.png")] is None
    assert errors[str(hidden)] == "cannot be read: Permission denied"


@pytest.mark.slow
def test_file_names_that_are_not_utf8_are_predicted(folder, good, tmp_path):
    good.rename(tmp_path / LATIN)
    name = os.fsencode(tmp_path / LATIN)
    table = vitrail("predict", folder, tmp_path / LATIN)
    assert table.returncode == 0 and rb"caf\udce9.png  " in table.stdout
    lines = vitrail("predict", folder, tmp_path, "--json")
    assert os.fsencode(json.loads(lines.stdout)["path"]) == name
    cells = vitrail("predict", folder, "-", "--csv", input=name + b"\n")
    rows = list(csv.reader(os.fsdecode(cells.stdout).splitlines()))
    assert cells.returncode == 0 and os.fsencode(rows[1][0]) == name


def test_a_run_folder_whose_name_is_not_utf8_is_refused_before_it_is_created(capsys, tmp_path):
    code, _, _ = call(capsys, "train", "digits", "--out", tmp_path / LATIN)
    assert code.endswith("is not valid UTF-8; rename it, or choose another")
    assert not list(tmp_path.iterdir())


def test_class_names_are_escaped_for_the_terminal(capsys):
    from vitrail.cli.predict import print_table
    from vitrail.inference.prediction import ClassProbability, Prediction

    name = "[/x] \x1b[31mcat"
    guess = ClassProbability(label=name, index=0, probability=1.0)
    found = Prediction(label=name, index=0, probability=1.0, top=(guess,))
    print_table(iter([("a\nb.png", found)]))
    assert capsys.readouterr().out == "a\\nb.png  [/x] \\x1b[31mcat 100.0%\n"


@pytest.mark.slow
def test_data_whose_path_is_not_utf8_is_refused_before_training(tmp_path):
    from tests.data.samples import class_folders

    data = class_folders(tmp_path / os.fsdecode(b"caf\xe9"), {"a": 8, "b": 8})
    done = vitrail("train", data, "--epochs", "1", "--out", tmp_path / "run")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith(b"error: '/")
    assert last.endswith(b"caf\\udce9' is not valid UTF-8; rename it, or choose another")
    assert not (tmp_path / "run").exists()
