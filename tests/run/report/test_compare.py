"""Several runs side by side: who is better, and whether that is more than chance."""

import pytest
import torch

from tests.run.fabricated import images, write_run
from vitrail.errors import UserError
from vitrail.evaluation.metrics import mcnemar
from vitrail.run import predictions
from vitrail.run.report.compare import compare, page, row

NAMES = ["cat", "dog", "<b>emu</b>"]


@pytest.fixture(scope="module")
def source():
    return images(NAMES, each=80)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, source):
    """A good run, one nearly as good, and a bad one."""
    place = tmp_path_factory.mktemp("runs")
    chances = {"good": 0.9, "near": 0.87, "bad": 0.4}
    return [
        write_run(place / name, source, chance, seed)
        for seed, (name, chance) in enumerate(chances.items())
    ]


def test_each_run_is_held_against_the_best(runs):
    good, near, bad = compare(runs)
    assert good.difference is None and good.words == "is the best on test images"
    assert bad.difference.more_than_chance and "more than chance: p < 0.0001" in bad.words
    assert not near.difference.more_than_chance and "could be chance: p = " in near.words
    assert "on the same 60 test images" in near.words


def test_the_chance_is_that_of_mcnemar(runs):
    kept = [predictions.read(folder).splits["test"] for folder in runs]
    p = mcnemar(kept[1].predicted, kept[0].predicted, kept[0].labels)
    assert compare(runs)[1].difference.p == p


def test_several_comparisons_must_each_be_surer(runs, monkeypatch):
    monkeypatch.setattr("vitrail.evaluation.metrics.mcnemar", lambda *_: 0.03)
    assert compare(runs[:2])[1].difference.more_than_chance
    near = compare(runs)[1]
    assert not near.difference.more_than_chance
    assert "as one of 2 comparisons it counts below 0.025" in near.words


def test_other_test_images_are_not_compared(runs, tmp_path):
    other = write_run(tmp_path / "other", images(NAMES, each=120), 0.5)
    found = compare([runs[0], other])[1].difference
    assert found.p is None and found.more_than_chance is None
    assert found.words == f"cannot be compared with {runs[0]}; they saw other test images"


def test_a_better_run_on_other_images_does_not_hide_those_on_the_same(runs, tmp_path):
    other = write_run(tmp_path / "other", images(NAMES, each=120), 1.0)
    good, bad, alone = compare([runs[0], runs[2], other])
    assert good.words == "is the best of the 2 runs with its test images"
    assert bad.difference.to == str(runs[0]) and bad.difference.more_than_chance
    assert alone.words == "is the only one with its test images"


def test_runs_without_predictions_are_told_what_to_do(runs, source, tmp_path):
    bare = write_run(tmp_path / "bare", source, 0.5)
    (bare / "predictions.safetensors").unlink()
    assert (
        f"kept no predictions; `vitrail report {bare}` makes them"
        in compare([runs[0], bare])[1].words
    )


def test_an_unfinished_run_has_dashes(runs, source, tmp_path):
    begun = write_run(tmp_path / "begun", source)
    (begun / "metrics.json").unlink()
    entry = compare([runs[0], begun])[1]
    assert row(entry)[5:] == ["-"] * 4 and "is not finished" in entry.words


def test_one_run_or_the_same_twice_is_refused(runs):
    with pytest.raises(UserError, match="give at least two"):
        compare(runs[:1])
    with pytest.raises(UserError, match="is given twice"):
        compare([runs[0], runs[0].parent / "near" / ".." / "good"])


def test_the_page_is_offline_and_names_every_run(runs):
    html = page(compare(runs))
    assert "<script" not in html and "http:" not in html.replace("http://www.w3.org", "")
    assert all(str(folder) in html for folder in runs)
    assert html.count("<svg") == 2


def test_equal_runs_are_no_difference(source, tmp_path):
    folders = [write_run(tmp_path / name, source, 0.7, seed=5) for name in "ab"]
    one, other = compare(folders)
    assert one.difference is None and other.difference.p == 1.0
    assert other.words.startswith(f"as {folders[0]}; could be chance: p = 1")
    seen = [predictions.read(folder).splits["test"].predicted for folder in folders]
    assert torch.equal(*seen)
