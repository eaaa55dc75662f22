"""Measured numbers in docs/ are those of bench/results, where they are kept there."""

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).resolve().parents[2]


def result_of(name):
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text()


def percent(fraction):
    return f"{100 * fraction:.1f}".removesuffix(".0") + " %"


def pets(minutes, lr):
    """The entries of the bench with this learning rate; None is Vitrail."""
    entries = result_of("finetune")["entries"]
    return [one for one in entries if one["minutes"] == minutes and one["lr"] == lr]


def mean_accuracy(entries):
    return percent(fmean(one["test"] for one in entries))


@pytest.mark.parametrize("minutes", [2, 5])
def test_accuracies_of_fine_tuning_are_those_of_the_bench(minutes):
    rates = []
    for lr in (1e-4, 3e-4, 1e-3):
        entries = pets(minutes, lr)
        seeds = "" if len(entries) == 3 else ", one seed"
        assert len(entries) in (1, 3)
        rates.append(f"{mean_accuracy(entries)} ({f'{lr:.0e}'.replace('-0', '-')}{seeds})")
    row = f"| {minutes} | {mean_accuracy(pets(minutes, None))} | {', '.join(rates)} |\n"
    assert row in page("fine-tuning")


def test_times_and_mistakes_of_fine_tuning_are_those_of_the_bench():
    spans = []
    for minutes in (2, 5):
        seconds = [one["seconds"] for one in pets(minutes, None)]
        spans.append(f"{min(seconds):.0f} to {max(seconds):.0f} s")
        wrong = sum(round(124 * (1 - one["test"])) for one in pets(minutes, 1e-4))
        assert wrong == {2: 2, 5: 1}[minutes]
    assert " and ".join(spans) in page("fine-tuning")
    assert "one or two of 372 predictions" in page("fine-tuning")


def test_cost_of_each_tune_is_that_of_the_bench():
    for step in result_of("finetune")["steps"]:
        time = f"{step['ms']:.0f}" if step["ms"] >= 1 else f"{step['ms']:g}"
        row = rf"^\| `{step['tune']}` \|.*\| {re.escape(time)} ms, {step['peak_mb']} MB \|$"
        assert re.search(row, page("fine-tuning"), re.MULTILINE), step


def test_errors_of_the_forecast_are_those_of_the_bench():
    errors = [round(100 * error) for error in result_of("plan")["errors"].values()]
    one, more, two, less = errors
    assert (
        f"with one process, the time was {one} % too long and the memory {more} % too high; "
        f"with two processes, {-two} % too short and {-less} % too low"
    ) in " ".join(page("planning").split())
