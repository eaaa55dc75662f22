"""A table whose columns have other names than ours, through every verb that opens data."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.cli.conftest import call
from vitrail.run.recipe import read_recipe

NAMED = ("--data.columns.path", "file", "--data.columns.label", "species")
TINY = (
    *("--vit.width", "16", "--vit.depth", "1", "--vit.heads", "1", "--train.batch", "8"),
    *("--train.steps", "4", "--data.workers", "0"),
)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Two classes of twenty grey squares each, with a fold for every row."""
    root, rows = tmp_path_factory.mktemp("table"), ["file,species,fold,label"]
    for number in range(40):
        pixels = np.full((16, 16), 3 * number + 90 * (number % 2), np.uint8)
        Image.fromarray(pixels).save(root / f"{number}.png")
        fold = ("train", "train", "val", "test")[number // 2 % 4]
        rows.append(f"{number}.png,{'light' if number % 2 else 'dark'},{fold},{number}")
    (root / "table.csv").write_text("\n".join(rows))
    return root / "table.csv"


@pytest.fixture(scope="module")
def run(table, tmp_path_factory):
    from vitrail.cli.main import main

    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.run.plan.TRIAL", 0.0)
        patch.setattr("vitrail.run.finish.make_report", lambda *rest: None)
        wanted = (*NAMED, "--data.columns.split", "fold")
        main(["train", str(table), *wanted, *TINY, "--out", str(out)])
    return out


def test_a_run_stores_the_column_names(run):
    columns = read_recipe(run / "recipe.toml")["data"]["columns"]
    assert columns == {"path": "file", "label": "species", "split": "fold"}


def test_evaluate_uses_the_column_names_of_training(capsys, run, table):
    code, out, _ = call(capsys, "evaluate", run, table, "--json")
    assert (code, json.loads(out)["split"], json.loads(out)["images"]) == (0, "test", 10)


def test_evaluate_accepts_other_column_names(capsys, run, table):
    other = table.with_name("other.csv")
    other.write_text(table.read_text().replace("file,species,fold", "image,species,part"))
    flags = ("--data.columns.path", "image", "--data.columns.split", "part", "--json")
    code, out, _ = call(capsys, "evaluate", run, other, *flags)
    assert (code, json.loads(out)["split"]) == (0, "test")
    code, _, _ = call(capsys, "evaluate", run, other)
    assert "no column 'file' for the path" in code and "set --data.columns.path" in code


def test_a_run_is_resumed_and_reported_with_its_column_names(run):
    from vitrail.run.report.make import reopen_data
    from vitrail.run.resume import resume
    from vitrail.run.storage.record import read_run
    from vitrail.zoo.file import load_model

    source, why = reopen_data(read_run(run), load_model(run / "model.safetensors"))
    assert source is not None and not why
    (run / "metrics.json").unlink()
    assert resume(run, report=False, quiet=True).metrics["steps"] == 4


def test_check_accepts_column_names(capsys, table):
    code, out, _ = call(capsys, "check", table, *NAMED, "--workers", "0", "--json")
    assert json.loads(out)["classes"] == {"dark": 20, "light": 20}
    code, _, _ = call(capsys, "check", table)
    assert "set --data.columns.path to the right one" in code


def test_head_accepts_column_names_and_stores_them(capsys, run, table, tmp_path):
    pytest.importorskip("skops")
    kind = ("--kind", "nearest-mean", "--out", tmp_path / "head.skops", "--json")
    code, out, _ = call(capsys, "head", run, table, *NAMED, "--data.columns.split", "fold", *kind)
    assert (code, json.loads(out)[0]["split"]) == (0, "test")
    code, out, _ = call(capsys, "evaluate", run, table, "--head", tmp_path / "head.skops", "--json")
    assert (code, json.loads(out)["split"]) == (0, "test")


def test_column_names_are_refused_for_a_folder(capsys, table):
    code, _, _ = call(capsys, "check", table.parent, *NAMED)
    assert "is not a table; omit" in code


@pytest.mark.slow
def test_search_accepts_column_names(capsys, table, tmp_path):
    pytest.importorskip("optuna")
    (tmp_path / "space.toml").write_text('"train.lr" = [1e-3, 2e-3]')
    wanted = ("--space", tmp_path / "space.toml", "--trials", "1", "--out", tmp_path / "search")
    code, out, _ = call(capsys, "search", table, *NAMED, *TINY, *wanted, "--json")
    assert (code, json.loads(out)["trials"]) == (0, 1)
