"""Runs compared: which is better, and whether the difference is significant."""

import json
from dataclasses import replace
from types import SimpleNamespace as Namespace

import pytest
import torch

from tests.run.fabricated import images, write_run
from vitrail.errors import UserError
from vitrail.evaluation.metrics import mcnemar, two_proportion_test, wilson_interval
from vitrail.pretraining.config import PretrainConfig
from vitrail.run.report.compare import compare, list_charts, render_comparison
from vitrail.run.storage import predictions

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


def test_each_run_is_compared_with_the_best(runs):
    good, near, bad = compare(*runs).runs
    assert good.difference is None and good.verdict == "has the highest test accuracy"
    assert bad.difference.more_than_chance and "a significant difference: p < 0.0001" in bad.verdict
    assert (
        not near.difference.more_than_chance
        and "not a significant difference: p = " in near.verdict
    )
    assert "on the same 60 test images" in near.verdict


def test_the_p_value_is_that_of_mcnemar(runs):
    kept = [predictions.load_predictions(folder).splits["test"] for folder in runs]
    p = mcnemar(kept[1].predicted, kept[0].predicted, kept[0].labels)
    assert compare(*runs).runs[1].difference.p == p


def test_several_comparisons_share_the_significance_level(runs, monkeypatch):
    monkeypatch.setattr("vitrail.evaluation.metrics.mcnemar", lambda *_: 0.03)
    assert compare(*runs[:2]).runs[1].difference.more_than_chance
    near = compare(*runs).runs[1]
    assert not near.difference.more_than_chance
    assert "2 comparisons: significant below 0.025" in near.verdict


def test_other_test_images_are_not_compared(runs, tmp_path):
    other = write_run(tmp_path / "other", images(NAMES, each=120), 0.5)
    entry = compare(runs[0], other).runs[1]
    assert entry.difference.p is None and entry.difference.more_than_chance is None
    assert entry.verdict == f"cannot be compared with {runs[0]}; the test images differ"


def test_runs_are_compared_with_the_best_on_the_same_images(runs, tmp_path):
    other = write_run(tmp_path / "other", images(NAMES, each=120), 1.0)
    good, bad, alone = compare(runs[0], runs[2], other).runs
    assert good.verdict == "has the highest test accuracy of the 2 runs with its test images"
    assert bad.difference.to == str(runs[0]) and bad.difference.more_than_chance
    assert alone.verdict == "is the only run with these test images"


def test_missing_predictions_are_reported_with_advice(runs, source, tmp_path):
    bare = write_run(tmp_path / "bare", source, 0.5)
    (bare / "predictions.safetensors").unlink()
    assert (
        f"has no predictions; `vitrail report {bare}` creates them"
        in compare(runs[0], bare).runs[1].verdict
    )


def test_an_unfinished_run_has_dashes(runs, source, tmp_path):
    begun = write_run(tmp_path / "begun", source)
    (begun / "metrics.json").unlink()
    entry = compare(runs[0], begun).runs[1]
    assert entry.to_row()[5:] == ["-"] * 4 and "is not finished" in entry.verdict


def test_one_run_or_the_same_twice_is_an_error(runs):
    with pytest.raises(UserError, match="give at least two"):
        compare(*runs[:1])
    with pytest.raises(UserError, match="is listed twice"):
        compare(runs[0], runs[0].parent / "near" / ".." / "good")


def test_the_page_is_offline_and_names_every_run(runs):
    html = render_comparison(compare(*runs))
    assert "<script" not in html and "http:" not in html.replace("http://www.w3.org", "")
    assert all(str(folder) in html for folder in runs)
    assert html.count("<svg") == 2


def test_only_losses_of_the_same_kind_share_a_chart():
    keys = {"val_loss": 0.5, "val_accuracy": 0.9, "seconds": 1.0}
    runs = []
    masked, views = PretrainConfig(hog=0.9), PretrainConfig(method="views")
    configs = (None, masked, views, replace(masked, decoder_depth=3), replace(masked, mask=0.6))
    for number, config in enumerate(configs, 1):
        recipe = Namespace(pretrain=config)
        line = keys if config is None else {"val_loss": 0.5, "val_rank": 4.0, "seconds": 1.0}
        runs.append(Namespace(number=number, record=Namespace(recipe=recipe, epochs=[line])))
    charts = {
        caption: "".join(curve.label for curve in chart.curves)
        for caption, chart in list_charts(runs)
    }
    assert charts == {
        "Validation accuracy.": "1",
        "Validation loss.": "1",
        "Held-out loss of pretraining, method masked, mask 0.75, hog 0.9.": "24",
        "Held-out loss of pretraining, method views, 4 views and 0 local ones.": "3",
        "Held-out loss of pretraining, method masked, mask 0.6, hog 0.9.": "5",
        "k-NN accuracy of pretrained features.": "",
        "Effective rank of pretrained features.": "2345",
    }


def test_equal_runs_do_not_differ(source, tmp_path):
    folders = [write_run(tmp_path / name, source, 0.7, seed=5) for name in "ab"]
    one, other = compare(*folders).runs
    assert one.difference is None and other.difference.p == 1.0
    assert other.verdict.startswith(
        f"same test accuracy as {folders[0]}; not a significant difference: p = 1"
    )
    seen = [predictions.load_predictions(folder).splits["test"].predicted for folder in folders]
    assert torch.equal(*seen)


def test_the_comparison_is_readable_as_text_and_html(runs):
    comparison = compare(*runs)
    text, html = repr(comparison), comparison._repr_html_()
    assert len(text.splitlines()) == 1 + 2 * len(runs)
    assert text.splitlines()[0].split()[:3] == ["run", "data", "model"]
    assert html.count("<tr>") == 1 + len(runs) and "has the highest test accuracy" in html


def test_the_document_has_an_entry_for_each_run(runs):
    good, _, bad = compare(*runs).to_dict()["runs"]
    assert good["against"] is None and good["run"] == str(runs[0])
    assert list(bad["against"]) == ["to", "points", "p", "images", "more_than_chance"]


@pytest.fixture
def pretrainings(tmp_path, source):
    """Two pretrainings on the same data, and one on other data: `linear` is the only difference."""
    folders = []
    for name, linear, data in (("a", 0.9, "x"), ("b", 0.5, "x"), ("c", 0.7, "y")):
        folder = write_run(tmp_path / name, source)
        interval = list(wilson_interval(linear, 60))
        row = {"fraction": 0.1, "labels": 9, "accuracy": 0.4, "interval": interval}
        probe = {"knn": 0.8, "knn_interval": interval, "linear": linear, "interval": interval}
        probe |= {"images": 60, "fractions": [row], "trained": [], "steps": 0}
        numbers = {"run": str(folder), "model": "Nano/4", "epochs": 3, "steps": 60, "seconds": 9}
        numbers |= {"method": "masked", "loss": 0.3, "rank": 7.0, "probe": probe}
        (folder / "metrics.json").write_text(json.dumps(numbers))
        (folder / ".data").write_text(f"{data}\n")
        folders.append(folder)
    return folders


def test_pretrainings_are_compared_by_their_probes(pretrainings):
    comparison = compare(*pretrainings)
    good, bad, alone = comparison.runs
    assert "the highest of the 2 pretrainings with these images" in good.verdict
    assert good.difference is None and bad.difference.to == str(pretrainings[0])
    assert bad.difference.more_than_chance and bad.difference.images == 60
    assert "40.0 percentage points below" in bad.verdict and "predictions of probes" in bad.verdict
    assert "the only pretraining with these validation images" in alone.verdict
    rows = dict((row[0], row[1:]) for row in comparison.feature_rows())
    assert rows["linear probe"][1] == "50.0 % (37.7 to 62.3)"
    assert rows["k-NN"] and rows["linear probe, 10 % of the labels"]
    text, html = repr(comparison), render_comparison(comparison)
    for part in ("held-out loss", "effective rank", "k-NN", "linear probe, 10 % of the labels"):
        assert part in text and part in html and part in comparison._repr_html_()
    assert "McNemar's exact test" not in html and "two-proportion z-test" in html
    against = comparison.to_dict()["runs"][1]["against"]
    assert list(against) == ["to", "points", "p", "images", "more_than_chance"]


def test_equal_accuracies_do_not_differ_in_the_two_proportion_test():
    assert two_proportion_test(0.5, 0.5, 10) == 1.0 == two_proportion_test(1.0, 1.0, 10)
    assert two_proportion_test(0.5, 0.6, 100) == pytest.approx(0.1552, abs=1e-4)
    assert two_proportion_test(0.5, 0.6, 10_000) < 1e-6


def test_a_page_can_be_written(runs, tmp_path):
    compare(*runs).write_page(tmp_path / "compare.html")
    assert "Comparison of 3 runs" in (tmp_path / "compare.html").read_text()
