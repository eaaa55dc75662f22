"""`vitrail report` and `vitrail compare` as a user and as a script see them."""

import json
import shutil

import pytest

from tests.cli.conftest import call
from tests.run.fabricated import images, write_run
from vitrail.display import figures


@pytest.fixture(autouse=True)
def lightly(monkeypatch):
    monkeypatch.setattr(figures, "to_png", lambda figure: b"\x89PNG")
    monkeypatch.setattr(figures, "to_svg", lambda figure: "<svg></svg>")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root, source = tmp_path_factory.mktemp("runs"), images(["a", "[red]b"], each=60)
    return [write_run(root / name, source, rate) for name, rate in (("x", 0.9), ("y", 0.5))]


def test_report_names_the_page(capsys, runs):
    code, out, _ = call(capsys, "report", runs[0])
    assert code == 0 and out.splitlines()[-1] == f"report {runs[0] / 'report.html'}"
    assert out.startswith("without images: ")


def test_report_prints_one_json_document(capsys, runs):
    document = json.loads(call(capsys, "report", runs[0], "--json")[1])
    assert list(document) == ["run", "report", "figures", "pictures"]
    assert document["report"] == str(runs[0] / "report.html") and document["pictures"] is False


def test_report_opens_the_page_when_asked(capsys, runs, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    call(capsys, "report", runs[0], "--open")
    assert opened == [(runs[0] / "report.html").resolve().as_uri()]


def test_compare_prints_a_table_and_a_verdict(capsys, runs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")  # temporary folders have long names
    code, out, _ = call(capsys, "compare", *runs)
    assert code == 0
    assert "parameters" in out and str(runs[1]) in out
    assert "a significant difference: p = " in out and "--out compare.html" in out


def test_compare_prints_one_json_document(capsys, runs):
    one, other = json.loads(call(capsys, "compare", *runs, "--json")[1])["runs"]
    assert list(one)[:4] == ["run", "data", "model", "parameters"]
    assert one["against"] is None
    assert list(other["against"]) == ["to", "points", "p", "images", "more_than_chance"]
    assert other["against"]["more_than_chance"] is True


def test_compare_writes_a_page(capsys, runs, tmp_path):
    code, out, _ = call(capsys, "compare", *runs, "--out", tmp_path / "c.html")
    assert code == 0 and f"page {tmp_path / 'c.html'}" in out
    assert "Comparison of 2 runs" in (tmp_path / "c.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["report", "nowhere"], "nowhere is not a run folder"),
        (["compare", "nowhere", "RUN"], "nowhere is not a run folder"),
        (["compare", "RUN"], "give at least two"),
        (["compare"], "give at least two"),
        (["compare", "RUN", "RUN", "--out", "."], "is a folder"),
    ],
)
def test_a_mistake_is_one_line(capsys, runs, tmp_path, monkeypatch, arguments, answer):
    monkeypatch.chdir(tmp_path)
    code, _, _ = call(capsys, *(str(runs[0]) if word == "RUN" else word for word in arguments))
    assert isinstance(code, str) and code.startswith("error: ") and answer in code
    assert "\n" not in code and not list(tmp_path.iterdir())


def test_a_damaged_file_is_one_line(capsys, runs, tmp_path):
    broken = shutil.copytree(runs[0], tmp_path / "broken")
    (broken / "predictions.safetensors").write_bytes(b"{}")
    code, _, _ = call(capsys, "compare", runs[1], broken)
    assert "predictions.safetensors is damaged" in code and "\n" not in code
