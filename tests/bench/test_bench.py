"""What the bench computes from times; the times themselves need the peers."""

from dataclasses import asdict

import pytest

from bench import measure
from bench.limit import backward, products
from bench.measure import FEWEST, compare, interleave
from bench.report import noise, plot, table
from vitrail.model.cost import macs
from vitrail.zoo.presets import preset

OURS = [1.0, 1.1, 0.9, 1.0, 1.0, 1.1, 0.9, 1.0]


def result(theirs=(1.2,) * 8):
    rows = {
        name: asdict(row) | {"steady": row.steady}
        for name, row in compare({"vitrail": OURS, "timm": theirs, "limit": [0.6] * 8}).items()
    }
    alone = {peer: {"seconds": 3.14, "megabytes": 27.18} for peer in ("vitrail", "timm")}
    return {
        "name": "inference",
        "machine": {"cpu": "a processor", "threads": 2},
        "versions": {"torch": "2.13"},
        "commit": "abc",
        "cases": [{"label": "Ti/16", "rows": rows}],
        "alone": [{"label": "Ti/16", "rows": alone}],
    }


def test_ratio_is_their_time_over_ours():
    assert compare({"vitrail": OURS, "timm": [2 * t for t in OURS]})["timm"].ratio == 2


def test_ratio_is_taken_within_a_round():
    disturbed = [10.0, 1.0, 1.0, 30.0, 1.0, 20.0, 1.0, 1.0]
    row = compare({"vitrail": disturbed, "timm": [1.5 * t for t in disturbed]})["timm"]
    assert (row.ratio, row.spread) == (1.5, 0)


def test_one_slow_round_moves_no_median():
    assert compare({"vitrail": OURS, "timm": [1.0] * 7 + [99.0]})["timm"].median == 1


def test_best_is_the_fastest_round():
    assert compare({"vitrail": OURS})["vitrail"].best == 0.9


@pytest.mark.parametrize(
    ("first", "second", "steady"),
    [
        ([1.00, 1.02, 1.01, 1.01], [1.00, 1.02, 1.01, 1.01], True),
        ([1.00, 1.02, 1.01, 1.01], [1.03, 1.05, 1.04, 1.04], False),  # further than they spread
        ([1.00, 2.00, 1.00, 2.00], [1.02, 2.00, 1.02, 2.00], True),
        ([1.00, 2.00, 1.00, 2.00], [1.20, 2.00, 1.20, 2.00], False),  # too far to tell 5 % apart
    ],
)
def test_steady_is_when_both_halves_say_the_same(first, second, steady):
    times = {"vitrail": [1.0] * 8, "timm": first + second}
    assert compare(times)["timm"].steady == steady


def test_tasks_take_turns(monkeypatch):
    monkeypatch.setattr(measure, "TURN", 0)  # one call a turn
    called = []
    tasks = {name: lambda name=name: called.append(name) for name in "ab"}
    times = interleave(tasks, FEWEST, 60)
    rounds = [set(called[i : i + 2]) for i in range(4, len(called), 2)]  # after warming up
    assert [len(seconds) for seconds in times.values()] == [FEWEST, FEWEST]
    assert rounds == [{"a", "b"}] * FEWEST


def test_time_that_is_up_ends_the_rounds():
    assert len(interleave({"a": lambda: None}, 100, 1e-9)["a"]) == FEWEST


@pytest.mark.parametrize("name", ["Ti/16", "B/32", "Mini/4"])
def test_limit_multiplies_what_the_model_multiplies(name):
    config = preset(name)
    done = sum(count * m * k * n for count, m, k, n in products(config, 3))
    assert done == 3 * macs(config)


def test_backward_costs_twice_the_product():
    assert [a * b * c * d for a, b, c, d in backward((2, 3, 5, 7))] == [210, 210]


def test_table_says_times_ratios_memory_and_where():
    page = table(result())
    assert "| Ti/16 | 1000 | 1200 (1.20 ± 0.09) | 600 (0.60 ± 0.05) |" in page
    assert "| peak memory, Ti/16 | 27.2 MB | 27.2 MB |" in page
    assert "a processor, 2 threads; torch 2.13; commit abc." in page


def test_table_says_when_the_machine_was_too_noisy():
    assert noise(result()).startswith("Both halves")
    assert "too noisy" in noise(result([1.0] * 4 + [1.5] * 4))


def test_plot_is_the_same_for_the_same_numbers():
    first = plot(result())
    assert first.startswith("<?xml")
    assert first == plot(result())
