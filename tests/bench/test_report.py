"""Tables and plots of results that were made up."""

import json
from types import SimpleNamespace

import pytest

from bench import __main__ as bench
from bench import report
from bench.measure import compare, plain
from bench.report import noise, plot, table
from vitrail.errors import UserError

OURS = [1.0, 1.1, 0.9, 1.0]


def result(unit="ms", first=1.2, second=1.2, **more):
    repeats = [
        {"vitrail": OURS, "timm": [theirs * t for t in OURS], "limit": [0.6 * t for t in OURS]}
        for theirs in (first, second)
    ]
    rows = {name: plain(row) for name, row in compare(repeats).items()}
    return {
        "name": "inference",
        "machine": {"cpu": "a processor", "threads": 2},
        "versions": {"torch": "2.13"},
        "commit": "abc",
        "cases": [{"label": "Ti/16", "unit": unit, "images": 64, "rows": rows}],
        **more,
    }


def test_table_says_times_ratios_and_where():
    page = table(result())
    assert "| Ti/16 | 1,000 | 1,200 (1.20 ± 0.00) | 600 (0.60 ± 0.00) |" in page
    assert "Milliseconds" in page and "`limit`" in page
    assert "a processor, 2 threads; torch 2.13; commit abc." in page


def test_images_per_second_come_from_the_images_of_a_call():
    assert "| Ti/16 | 64.0 | 53.3 (1.20 ± 0.00) |" in table(result("images/s"))


def test_more_memory_is_no_slowness():
    assert "need more" in table(result("MB")) and "slower" not in table(result("MB"))


def test_contender_without_a_number_has_an_empty_cell():
    made = result()
    made["cases"].append(
        {**made["cases"][0], "label": "S/16", "rows": dict(made["cases"][0]["rows"])}
    )
    del made["cases"][1]["rows"]["timm"]
    assert "| S/16 | 1,000 |  | 600" in table(made)
    assert plot(made).startswith("<?xml")


def test_table_shows_where_the_time_goes():
    where = [{"label": "Ti/16", "rows": {"vitrail": {"GELU": 0.25, "norms": 0.75}}}]
    page = table(result(where=where))
    assert "| GELU | 25.0% |" in page and "| norms | 75.0% |" in page


def test_table_says_when_the_machine_was_too_noisy():
    assert noise(result()).startswith("Both repeats agree")
    assert "timm in Ti/16 (1.00 and 1.50)" in noise(result(first=1.0, second=1.5))


def test_plot_is_the_same_for_the_same_numbers():
    first = plot(result())
    assert first.startswith("<?xml")
    assert first == plot(result())


def test_without_git_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)  # no repository
    assert report.surroundings(1)["commit"] == "unknown"
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert report.surroundings(1)["commit"] == "unknown"


def test_surroundings_are_asked_for_before_the_measurement(monkeypatch):
    asked = []
    monkeypatch.setattr(report, "surroundings", lambda threads: asked.append("where") or {})
    measure = SimpleNamespace(run=lambda budget, tick: asked.append("what") or {})
    monkeypatch.setattr(bench, "import_module", lambda name: measure)
    bench.run("step", bench.Settings(names=("step",)), lambda share, words: None)
    assert asked == ["where", "what"]


def test_everything_is_made_again_from_the_json(tmp_path, monkeypatch, capsys):
    report.keep(result(), tmp_path)
    (tmp_path / "inference.md").unlink()
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    report.main([])
    assert "a processor" in capsys.readouterr().out
    assert (tmp_path / "inference.md").read_text() == table(
        json.loads((tmp_path / "inference.json").read_text())
    )


def test_a_result_that_was_never_made_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    with pytest.raises(UserError, match=r"no step.json; make it with python -m bench step"):
        report.main(["step"])
