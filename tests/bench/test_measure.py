"""The statistics of the benchmarks, computed from given times."""

from functools import partial

import pytest

from bench import measure as module
from bench.measure import REPEATS, Budget, Case, compare, interleave, measure, time_calls

OURS = [1.0, 1.1, 0.9, 1.0]


def interleave_tasks(tasks, budget):
    return interleave({name: partial(time_calls, task) for name, task in tasks.items()}, budget)


def rows(*repeats):
    return compare([{"vitrail": own, "timm": theirs} for own, theirs in repeats])


def test_the_ratio_divides_by_vitrails_time():
    assert rows((OURS, [2 * t for t in OURS]), (OURS, [2 * t for t in OURS]))["timm"].ratio == 2


def test_ratio_is_taken_within_a_round():
    disturbed = [10.0, 1.0, 1.0, 30.0]
    row = rows(*[(disturbed, [1.5 * t for t in disturbed])] * 2)["timm"]
    assert (row.ratio, row.spread) == (1.5, 0)


def test_one_slow_round_does_not_change_the_median():
    assert rows((OURS, [1.0] * 4), (OURS, [1.0, 1.0, 1.0, 99.0]))["timm"].median == 1


def test_best_is_the_fastest_round_of_both_repeats():
    assert rows((OURS, OURS), ([0.8, *OURS], [0.8, *OURS]))["vitrail"].best == 0.8


@pytest.mark.parametrize(
    ("first", "second", "steady"),
    [
        ([1.00, 1.02, 1.01, 1.01], [1.00, 1.02, 1.01, 1.01], True),
        ([1.00, 1.06, 1.03, 1.03], [1.03, 1.09, 1.06, 1.06], True),  # within the spread
        ([1.00, 1.02, 1.01, 1.01], [1.04, 1.06, 1.05, 1.05], False),  # beyond the spread
        ([1.00, 1.00, 1.00, 1.00], [1.005, 1.005, 1.005, 1.005], True),  # less than 1 %
        ([1.00, 2.00, 1.00, 2.00], [1.02, 2.00, 1.02, 2.00], True),
        ([1.00, 2.00, 1.00, 2.00], [1.20, 2.00, 1.20, 2.00], False),  # more than 5 %
    ],
)
def test_a_row_is_steady_if_both_repeats_agree(first, second, steady):
    assert rows(([1.0] * 4, first), ([1.0] * 4, second))["timm"].steady == steady


def test_tasks_are_interleaved(monkeypatch):
    monkeypatch.setattr(module, "MIN_SECONDS", 0)  # one call per round, one to warm up
    called = []
    tasks = {name: lambda name=name: called.append(name) for name in "ab"}
    times = interleave_tasks(tasks, Budget(rounds=4, seconds=60))
    rounds = [set(called[i : i + 2]) for i in range(2, len(called), 2)]
    assert [len(seconds) for seconds in times.values()] == [4, 4]
    assert rounds == [{"a", "b"}] * 4


def test_rounds_end_when_the_time_is_up():
    budget = Budget(rounds=100, seconds=1e-9, min_rounds=3)
    assert len(interleave_tasks({"a": lambda: None}, budget)["a"]) == 3


def test_the_warm_up_call_does_not_count(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("bench.measure.perf_counter", lambda: clock[0])
    seconds = iter([9.0] + [2.0] * 9)

    def task():
        clock[0] += next(seconds)

    assert interleave_tasks({"a": task}, Budget(rounds=9, seconds=0)) == {"a": [2.0] * 2}


def test_all_cases_are_measured_before_any_is_repeated():
    measured, progress = [], []

    def measure_case(name, budget):
        measured.append(name)
        return {"vitrail": [1.0, 1.0]}

    cases = [Case(label=name, unit="ms", measure=partial(measure_case, name)) for name in "ab"]
    found = measure(
        cases, Budget(rounds=1, seconds=1), lambda done, activity: progress.append((done, activity))
    )
    assert measured == ["a", "b"] * REPEATS
    assert progress == [(0, "a"), (0.25, "b"), (0.5, "a"), (0.75, "b"), (1, "")]
    assert [case["label"] for case in found] == ["a", "b"]
    assert found[0]["rows"]["vitrail"]["repeats"] == (1, 1)
