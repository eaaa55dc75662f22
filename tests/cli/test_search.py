"""`vitrail search` as a user calls it, on digits."""

import json

import pytest

from tests.cli.conftest import FLAGS, call


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)
    monkeypatch.setattr("vitrail.run.finish.make_report", lambda *rest: None)


@pytest.fixture
def space(tmp_path):
    path = tmp_path / "space.toml"
    path.write_text('"train.lr" = {low = 1e-3, high = 1e-1, log = true}\n')
    return path


@pytest.mark.slow
def test_search_prints_one_json_document(capsys, tmp_path, space):
    flags = [*FLAGS[:-4], "--train.steps", "30", "--data.workers", "0"]
    code, out, err = call(
        *(capsys, "search", "digits", "--space", space, "--trials", 2, *flags),
        *("--out", tmp_path / "s", "--json"),
    )
    document = json.loads(out)
    assert code == 0
    assert list(document)[:4] == ["trials", "best", "recipe", "test"]
    assert set(document["best"]) >= {"value", "settings"}
    assert list(document["test"]) == ["accuracy", "interval"]
    assert "trial 1 finished" in err and "best" in err
    code, out, _ = call(
        *(capsys, "search", "digits", "--space", space, "--trials", 2, *flags),
        *("--out", tmp_path / "s"),
    )
    assert code == 0 and "page" in out and "test accuracy" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trials", "0"), "trials is 0"),
        (("--minutes", "0"), "minutes is 0"),
        (("--jobs", "0"), "jobs is 0"),
        (("--space", "nowhere.toml"), "cannot read the space nowhere.toml"),
        (("--recipe", "nowhere.toml"), "cannot read the recipe nowhere.toml"),
    ],
)
def test_a_mistake_is_reported_in_one_line(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, "search", "digits", *arguments)
    assert code.startswith("error: ") and message in code and "\n" not in code
    assert out == "" and list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_a_search_is_not_touched(capsys, tmp_path, space):
    code, _, _ = call(capsys, "search", "digits", "--space", space, "--out", tmp_path)
    assert "is not a search folder; choose another --out" in code
    assert list(tmp_path.iterdir()) == [space]
