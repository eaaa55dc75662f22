"""Tables and plots of fabricated results."""

import json
from types import SimpleNamespace

import pytest

from bench import __main__ as bench
from bench import report
from bench.measure import compare, row_to_dict
from bench.report import describe_noise, render_plot, render_table
from vitrail.errors import UserError

OURS = [1.0, 1.1, 0.9, 1.0]


def result(unit="ms", first=1.2, second=1.2, **more):
    repeats = [
        {"vitrail": OURS, "timm": [theirs * t for t in OURS], "matmuls": [0.6 * t for t in OURS]}
        for theirs in (first, second)
    ]
    rows = {name: row_to_dict(row) for name, row in compare(repeats).items()}
    return {
        "name": "inference",
        "machine": {"cpu": "a processor", "threads": 2},
        "versions": {"torch": "2.13"},
        "commit": "abc",
        "cases": [{"label": "Ti/16", "unit": unit, "images": 64, "rows": rows}],
        **more,
    }


def test_table_has_times_ratios_and_machine():
    page = render_table(result())
    assert "| Ti/16 | 1,000 | 1,200 (1.20 ± 0.00) | 600 (0.60 ± 0.00) |" in page
    assert "Milliseconds" in page and "`matmuls`" in page
    assert "a processor, 2 threads; torch 2.13; commit abc." in page


def test_images_per_second_come_from_the_images_of_a_call():
    assert "| Ti/16 | 64.0 | 53.3 (1.20 ± 0.00) |" in render_table(result("images/s"))


def test_memory_is_not_called_slow():
    assert "needs more" in render_table(result("MB")) and "slower" not in render_table(result("MB"))


def test_contender_without_a_number_has_an_empty_cell():
    several = result()
    several["cases"].append(
        {**several["cases"][0], "label": "S/16", "rows": dict(several["cases"][0]["rows"])}
    )
    del several["cases"][1]["rows"]["timm"]
    assert "| S/16 | 1,000 |  | 600" in render_table(several)
    assert render_plot(several).startswith("<?xml")


def test_table_has_the_profile():
    profiles = [{"label": "Ti/16", "rows": {"vitrail": {"GELU": 0.25, "norms": 0.75}}}]
    page = render_table(result(profiles=profiles))
    assert "| GELU | 25.0% |" in page and "| norms | 75.0% |" in page


def test_table_reports_a_noisy_machine():
    assert describe_noise(result()).startswith("Both repeats agree")
    assert "(worst: 1.00 and 1.50)" in describe_noise(result(first=1.0, second=1.5))


def test_plot_is_the_same_for_the_same_numbers():
    first = render_plot(result())
    assert first.startswith("<?xml")
    assert first == render_plot(result())


def test_without_git_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)  # no repository
    assert report.describe_environment(1)["commit"] == "unknown"
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert report.describe_environment(1)["commit"] == "unknown"


def test_the_environment_is_recorded_before_the_measurement(monkeypatch):
    calls = []
    monkeypatch.setattr(
        report, "describe_environment", lambda threads: calls.append("environment") or {}
    )
    measure = SimpleNamespace(run=lambda budget, progress: calls.append("measure") or {})
    monkeypatch.setattr(bench, "import_module", lambda name: measure)
    bench.run("step", bench.Settings(names=("step",)), lambda done, activity: None)
    assert calls == ["environment", "measure"]


def test_table_and_plot_are_rewritten_from_the_json(tmp_path, monkeypatch, capsys):
    report.write_result(result(), tmp_path)
    (tmp_path / "inference.md").unlink()
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    report.main([])
    assert "a processor" in capsys.readouterr().out
    assert (tmp_path / "inference.md").read_text() == render_table(
        json.loads((tmp_path / "inference.json").read_text())
    )


def test_a_missing_result_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    with pytest.raises(
        UserError, match=r"step.json does not exist; create it with `python -m bench step`"
    ):
        report.main(["step"])
